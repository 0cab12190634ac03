//! Any bytes as a peer's control connection.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| wire::fuzzing::control(bytes));
