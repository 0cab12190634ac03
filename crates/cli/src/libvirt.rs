//! Setup that sends libvirt's migrations to a host through the agents: the host's place in
//! the cluster, and the lines of `qemu.conf` that follow from it.

pub(crate) mod obstacles;
pub(crate) mod place;
pub(crate) mod qemu_conf;
pub(crate) mod write;
