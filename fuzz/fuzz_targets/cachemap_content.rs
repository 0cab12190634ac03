//! Any bytes as the content of one of a helper's frames.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cachemap::fuzzing::content(bytes));
