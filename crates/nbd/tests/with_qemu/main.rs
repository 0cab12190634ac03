//! Against real QEMU.
