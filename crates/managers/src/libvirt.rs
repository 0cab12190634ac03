//! libvirt, and any other program that is configured to connect to the agent's listeners: VMs leave
//! by these, so no socket is replaced, and arrive at ports and sockets that the agent's files name.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use wire::carry::Target;

use crate::onward::socket_below;
use crate::{Manager, ManagerError, Onward};

/// This host.
#[derive(Debug)]
pub struct Host {
    /// The address at which its QEMUs wait for VMs.
    pub address: IpAddr,
    /// Their ports.
    pub ports: RangeInclusive<u16>,
    /// The directory of the sockets at which they wait too.
    pub directory: PathBuf,
}

impl Manager for Host {
    fn find(&self, target: &Target) -> Result<Onward, ManagerError> {
        match target {
            Target::Port(port) if self.ports.contains(port) => {
                Ok(Onward::Port(SocketAddr::new(self.address, *port)))
            }
            Target::Port(port) => Err(ManagerError::Refused(format!(
                "port {port} is outside those that are carried here, {} to {}: `carry-ports` of \
                 this host in the peers file",
                self.ports.start(),
                self.ports.end()
            ))),
            Target::Path(path) => socket_below(&self.directory, Path::new(path)).map(Onward::Path),
            Target::Vmi { .. } => Err(ManagerError::OtherManager("libvirt")),
        }
    }
}
