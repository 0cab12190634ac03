//! Hosts as network namespaces, tiny Linux guests, and QEMU's own migration to compare with.
