//! Any bytes as a server's answers to our NBD client.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    nbd::fuzzing::client(bytes);
});
