//! Real libvirt on the lab's hosts: a libvirtd on each, guests as its domains, and `virsh`.
//!
//! A host with libvirt has its own `/run`, `/etc`, and libvirt's directories in `/var`, as a
//! separate machine has: hosts use the same paths, and the machine's own files are left alone.
//! Agents on the host see what its libvirtd sees. There are no libvirt networks.

mod carrying;
mod daemon;
mod domain;
mod migration;
mod pod;

pub use carrying::{
    KUBEVIRT_RIGHTS, WAITS_AT, carrying_agent, carrying_for_kubevirt, leading_to_agents,
};
pub use daemon::{Libvirtd, QemuUser};
pub use domain::{Disk, Domain, Memory};
pub use migration::{Ended, Migrating, Migration};
pub use pod::{Pod, kubevirts_own, launch};
