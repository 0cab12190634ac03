//! QMP, launching QEMU, its command line, and what a VM is made of.
