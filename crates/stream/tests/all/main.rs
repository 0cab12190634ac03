//! QEMU's streams, written by tests or recorded. One program, since each is linked by itself.

mod answered;
mod mutations;
mod recorded;
mod round_trip;
