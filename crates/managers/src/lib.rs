//! The programs that command the migrations that agents carry: what is special to each of them,
//! behind one trait. Xen's `xl` is apart from that: its domains are no VMs of QEMU's.

#![forbid(unsafe_code)]

mod error;
pub mod kubevirt;
pub mod libvirt;
mod onward;
pub mod proxmox;
pub mod takeover;
pub mod xen;

use std::fmt::Debug;

use takeover::{Directory, Watch};
use wire::carry::Target;

pub use error::ManagerError;
pub use onward::Onward;

/// The program that commands the migrations that are carried on this host.
///
/// The engine calls only `find`. Agents call the others before one replaces a socket of the
/// manager's.
pub trait Manager: Debug + Send + Sync {
    /// The QEMU, or disk server, that waits here for what is sent to a target.
    ///
    /// # Errors
    /// If none waits there, or carried migrations may not arrive there.
    fn find(&self, target: &Target) -> Result<Onward, ManagerError>;

    /// Whether a VM is about to arrive at a target to which another program forwards, because its
    /// manager has prepared it.
    ///
    /// # Errors
    /// If it can't be determined.
    fn expects(&self, target: &Target) -> Result<bool, ManagerError> {
        let _ = target;
        Ok(false)
    }

    /// The program's own sockets by which VMs leave or arrive, whether they exist yet or not. From
    /// now on `watch` notices new ones. Calls `failed` for a target whose socket can't be accessed.
    ///
    /// # Errors
    /// If they can't be listed.
    fn sockets(&self, watch: &Watch, failed: Failed<'_>) -> Result<Vec<Socket>, ManagerError> {
        let _ = (watch, failed);
        Ok(Vec::new())
    }
}

/// Is called for a target whose socket can't be accessed.
pub type Failed<'f> = &'f mut dyn FnMut(&Target, &ManagerError);

/// A migration socket, made by QEMU or by its manager.
pub struct Socket {
    /// Its directory.
    pub directory: Directory,
    /// Its name there.
    pub name: String,
    /// Its target, if a VM leaves by it.
    pub target: Target,
    /// Whether a VM leaves by it, rather than a QEMU waiting at it for one.
    pub leaves: Box<dyn Fn() -> Result<bool, ManagerError>>,
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_permitted_targets_are_connected_to() {
        let none = tempfile::tempdir().unwrap();
        let libvirt = libvirt::Host {
            address: "127.0.0.1".parse().unwrap(),
            ports: 49152..=49215,
            directory: "/run/droveway/migrate".into(),
        };
        let kubevirt = kubevirt::Node { records: none.path().to_owned() };
        let proxmox = proxmox::Host::new(none.path());
        let socket = |name: &str| none.path().join(name).display().to_string();
        let _other = UnixListener::bind(socket("other")).unwrap();
        let vmi = |uid: &str| Target::Vmi { uid: uid.to_owned(), port: 49152 };
        let refused: [(Target, &dyn Manager, &str); 10] = [
            (Target::Port(22), &libvirt, "49152 to 49215"),
            (vmi("8a9c-1"), &libvirt, "migrations of libvirt"),
            (vmi("8a9c-1"), &kubevirt, "no pod of this node"),
            (vmi("../8a9c"), &kubevirt, "no UID"),
            (Target::Port(49160), &kubevirt, "migrations of KubeVirt"),
            (Target::Path("/run/x".to_owned()), &kubevirt, "migrations of KubeVirt"),
            (Target::Port(49160), &proxmox, "migrations of Proxmox VE"),
            (Target::Path("/run/x".to_owned()), &proxmox, "not inside"),
            (Target::Path(socket("100.migrate")), &proxmox, "cannot connect to"),
            (Target::Path(socket("other")), &proxmox, "no VM's own QEMU"),
        ];
        for (target, manager, part) in refused {
            let Err(why) = manager.find(&target) else { panic!("{target:?} is not refused") };
            assert!(why.to_string().contains(part), "{target:?}: {why}");
            assert!(!manager.expects(&target).unwrap_or(false), "{target:?}");
        }
        let found = libvirt.find(&Target::Port(49160)).ok().unwrap();
        assert!(matches!(found, Onward::Port(at) if at.port() == 49160));
    }
}
