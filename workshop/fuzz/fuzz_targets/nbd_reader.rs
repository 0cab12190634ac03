//! Any bytes as a server's answers to our NBD reader.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    nbd::fuzzing::reader(bytes);
});
