//! Any bytes as the stream of `xl migrate`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| xen::fuzzing::stream(data));
