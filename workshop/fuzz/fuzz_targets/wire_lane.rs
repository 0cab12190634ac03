//! Any bytes as a peer's lane connection.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| wire::fuzzing::lane(bytes));
