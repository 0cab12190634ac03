//! Any bytes as QEMU's answers about its disks.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qemu::fuzzing::disks(bytes));
