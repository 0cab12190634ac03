//! Any bytes as the server that our NBD reader reads from.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    nbd::fuzzing::reader(bytes);
});
