//! Any bytes as what QEMU says of the guest's memory.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qemu::fuzzing::memory(bytes));
