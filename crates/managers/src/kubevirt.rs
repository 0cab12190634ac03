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

mod launcher;
mod name;
mod record;

use wire::carry::Target;

use crate::takeover::{Directory, Watch};
use crate::{Failed, Manager, ManagerError, Onward, Socket};
use name::{SocketName, Vmi};

pub use launcher::{Launcher, Node};
pub use name::Port;

impl Manager for Node {
    fn find(&self, target: &Target) -> Result<Onward, ManagerError> {
        let Target::Vmi { uid, port } = target else {
            return Err(ManagerError::OtherManager("KubeVirt"));
        };
        let vmi: Vmi = uid.parse()?;
        let launcher = self.launcher(&vmi)?;
        let nothing = || ManagerError::Refused(format!("no QEMU waits in the pod of the VM {vmi}"));
        let directory = launcher.directory()?.ok_or_else(nothing)?;
        let Some(port) = Port::of(*port) else {
            return Err(ManagerError::Refused(format!("{port} is not one of KubeVirt's ports")));
        };
        let name = SocketName { vmi: vmi.clone(), port };
        let socket = directory.socket(&name.to_string())?.ok_or_else(nothing)?;
        if !launcher.waits(&name)? {
            let why = format!("the VM {vmi} leaves this host, and does not arrive");
            return Err(ManagerError::Refused(why));
        }
        Ok(Onward::Pod(socket, launcher))
    }

    fn expects(&self, target: &Target) -> Result<bool, ManagerError> {
        let Target::Vmi { uid, .. } = target else { return Ok(false) };
        self.launcher(&uid.parse::<Vmi>()?).map(|_| true)
    }

    /// Both sockets of each pod.
    fn sockets(&self, watch: &Watch, failed: Failed<'_>) -> Result<Vec<Socket>, ManagerError> {
        // virt-handler makes the directory when it starts.
        if let Some(records) = Directory::open(self.records())? {
            watch.directory(records)?;
        }
        let mut sockets = Vec::new();
        for launcher in self.launchers()? {
            for port in Port::ALL {
                let target = Target::Vmi { uid: launcher.vmi.to_string(), port: port.number() };
                // A pod that isn't watched is still scanned at intervals.
                if let Err(error) = launcher.watch(watch) {
                    tracing::debug!(?target, %error, "cannot watch a pod");
                }
                match launcher.directory() {
                    Ok(Some(directory)) => {
                        let socket = SocketName { vmi: launcher.vmi.clone(), port };
                        let (name, launcher) = (socket.to_string(), launcher.clone());
                        let leaves = move || launcher.waits(&socket).map(|waits| !waits);
                        sockets.push(Socket { directory, name, target, leaves: Box::new(leaves) });
                    }
                    Ok(None) => {}
                    Err(error) => failed(&target, &error),
                }
            }
        }
        Ok(sockets)
    }
}
