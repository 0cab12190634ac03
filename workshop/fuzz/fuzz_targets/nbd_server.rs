//! Any bytes as a client of our NBD server.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    nbd::fuzzing::server(bytes);
});
