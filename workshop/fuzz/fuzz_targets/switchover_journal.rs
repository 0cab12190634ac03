//! Any bytes as a journal, and as a peer's message.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    switchover::fuzzing::journal(bytes);
    switchover::fuzzing::messages(bytes);
});
