//! Any bytes as events at both sides of a switchover.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| switchover::fuzzing::events(bytes));
