//! Any bytes as a connection to a directory, from either end.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| directory::fuzzing::connection(bytes));
