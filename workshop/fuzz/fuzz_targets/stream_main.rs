//! Any bytes as QEMU's main stream, classic and multifd.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stream::fuzzing::main_stream(data));
