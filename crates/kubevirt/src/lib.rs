//! KubeVirt's migrations on one node: which VMs it runs, and the sockets by which they
//! leave and come.
//!
//! ```text
//! source's pod                                         destination's pod
//! QEMU connects to                                     QEMU waits at
//!   /var/run/kubevirt/migrationproxy/UID-49152-source.sock (RAM), UID-49153-... (disks)
//!        |                                                  ^
//!        v                                                  |
//! virt-handler listens there <------- TLS -------> virt-handler connects there
//! ```
//!
//! Both have the same path, each in its pod. What is made at the source is virt-handler's,
//! from outside the pod; what is made at the destination is QEMU's, from inside. So which
//! of them a socket is, its pod's network namespace says: the kernel lists there what was
//! made inside.
//!
//! virt-handler notes each VM that it has a pod for, with the socket at which the pod's
//! virt-launcher listens; who listens there is in the pod.

mod error;
mod launcher;
mod name;
mod record;

pub use error::KubevirtError;
pub use launcher::{Launcher, Made, Node};
pub use name::{Port, SocketName, Vmi};
