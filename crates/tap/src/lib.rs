//! Reads QEMU's stream from its sockets and hands on batches.
