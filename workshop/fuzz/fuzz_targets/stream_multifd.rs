//! Any bytes as one of QEMU's multifd channels.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stream::fuzzing::multifd_channel(data));
