//! Any bytes as QEMU's answers about the guest's memory.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qemu::fuzzing::memory(bytes));
