//! Any bytes as an answer of a guest's helper, and as a request to it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cachemap::fuzzing::port(bytes));
