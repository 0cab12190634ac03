//! Any bytes as TLS records: unsealed, and sealed by a hostile peer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    identity::fuzzing::stranger(bytes);
    identity::fuzzing::peer(bytes);
});
