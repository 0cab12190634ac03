//! Any bytes as what a guest's helper answers, and as what it is asked.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cachemap::fuzzing::port(bytes));
