//! QEMU's migration stream: read, split, write, without I/O.
