//! KubeVirt's migrations on one node: the VMs that it runs, and the sockets through which they
//! leave and arrive.
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
//! Both sockets have the same path, each in its own pod. At the source, virt-handler makes the
//! socket from outside the pod; at the destination, QEMU makes it inside. The pod's network
//! namespace tells which of the two a socket is: the kernel lists there only sockets made inside.
//!
//! virt-handler keeps a ghost record for each VM that has a pod, with the path of the socket of the
//! pod's virt-launcher. The process that listens there is in the pod.

mod error;
mod launcher;
mod name;
mod record;

pub use error::KubevirtError;
pub use launcher::{Launcher, Made, Node};
pub use name::{Port, SocketName, Vmi};
