//! Any bytes as the content of a helper's frame.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cachemap::fuzzing::content(bytes));
