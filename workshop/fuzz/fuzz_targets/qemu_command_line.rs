//! Any bytes as QEMU's command line.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| qemu::fuzzing::command_line(bytes));
