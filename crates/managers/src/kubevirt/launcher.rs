//! The pods of this node that run VMs.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use qemu::socket::connect_opened;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::net::sockopt::socket_peercred;

use super::name::{SocketName, Vmi};
use super::record::{self, Record};
use crate::error::{ManagerError, Trying};
use crate::takeover::{self, Directory, Watch};

/// virt-handler's ghost records, which list this node's VMs.
const RECORDS: &str = "/var/run/kubevirt-private/ghost-records";
/// A pod's directory of migration sockets, and its parent.
const SOCKETS: &str = "var/run/kubevirt/migrationproxy";
const OWN: &str = "var/run/kubevirt";

/// virt-launcher's backlog has room for thousands of connections. If a connection has to wait, the
/// listener is not virt-launcher, and it must not hold up other VMs.
const ACCEPTS_MAX: Duration = Duration::from_millis(20);

/// This node.
#[derive(Clone, Debug)]
pub struct Node {
    pub(crate) records: PathBuf,
}

impl Default for Node {
    fn default() -> Self {
        Self { records: RECORDS.into() }
    }
}

impl Node {
    /// The directory of its ghost records, which virt-handler makes when it starts.
    #[must_use]
    pub fn records(&self) -> &Path {
        &self.records
    }

    /// All pods that run VMs. A pod that is starting or ending may be missing.
    pub(super) fn launchers(&self) -> Result<Vec<Launcher>, ManagerError> {
        let records = record::all(&self.records)?.into_iter();
        let launcher = |record: Record| match Launcher::of(&record) {
            Ok(launcher) => Some(launcher),
            Err(error) => {
                tracing::debug!(vmi = %record.vmi, %error, "no virt-launcher");
                None
            }
        };
        Ok(records.filter_map(launcher).collect())
    }

    /// The pod of a VM.
    pub(super) fn launcher(&self, vmi: &Vmi) -> Result<Launcher, ManagerError> {
        let mut records = record::all(&self.records)?.into_iter();
        let record = records.find(|record| record.vmi == *vmi);
        Launcher::of(&record.ok_or_else(|| ManagerError::NoSuchVmi(vmi.to_string()))?)
    }
}

/// A pod that runs a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launcher {
    /// The VM.
    pub(super) vmi: Vmi,
    /// The PID of a process in the pod, in this node's PID namespace.
    pid: u32,
}

impl Launcher {
    /// Finds the pod by the process that listens at the recorded socket, as virt-handler does.
    fn of(record: &Record) -> Result<Self, ManagerError> {
        // The pod controls the path.
        let socket = takeover::open_socket(CWD, &record.socket, ResolveFlags::empty());
        let socket = socket.trying("opening virt-launcher's socket")?;
        let connected = connect_opened(socket, ACCEPTS_MAX);
        let connected = connected.trying("connecting to virt-launcher")?;
        let peer = socket_peercred(&connected).trying("reading virt-launcher's credentials")?;
        let pid = u32::try_from(peer.pid.as_raw_nonzero().get())
            .map_err(|_| io::Error::other("it is not of this PID namespace: hostPID is missing"))
            .trying("reading virt-launcher's credentials")?;
        Ok(Self { vmi: record.vmi.clone(), pid })
    }

    /// The pod's root directory.
    fn root(&self) -> Result<OwnedFd, ManagerError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(format!("/proc/{}/root", self.pid), flags, Mode::empty());
        opened.trying("opening a pod's file system")
    }

    /// A directory in the pod; no link leads out of the pod. None if it doesn't exist.
    fn open(&self, path: &str) -> Result<Option<Directory>, ManagerError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        match takeover::open_resolved(self.root()?, Path::new(path), flags, resolve) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => Ok(Some(opened.trying("opening a pod's file system")?.into())),
        }
    }

    /// The directory of the VM's sockets; none if no migration has started yet.
    pub(super) fn directory(&self) -> Result<Option<Directory>, ManagerError> {
        self.open(SOCKETS)
    }

    /// Watches for sockets in the pod. Calling it again is harmless.
    pub(super) fn watch(&self, watch: &Watch) -> Result<(), ManagerError> {
        for path in [OWN, SOCKETS] {
            if let Some(directory) = self.open(path)? {
                watch.directory(directory)?;
            }
        }
        Ok(())
    }

    /// Whether a process is in the pod, judged by its network namespace.
    pub(crate) fn runs(&self, pid: u32) -> bool {
        let network = |pid| {
            let stat = rustix::fs::stat(format!("/proc/{pid}/ns/net"));
            stat.map(|stat| (stat.st_dev, stat.st_ino)).ok()
        };
        network(self.pid).is_some_and(|own| network(pid) == Some(own))
    }

    /// Whether QEMU waits at a socket for the VM to arrive. virt-handler makes sockets for VMs that
    /// leave, from outside, and the pod's network namespace lists only those made inside.
    pub(super) fn waits(&self, name: &SocketName) -> Result<bool, ManagerError> {
        let listed = fs::read_to_string(format!("/proc/{}/net/unix", self.pid));
        let listed = listed.trying("reading a pod's sockets")?;
        Ok(lists(&listed, &name.to_string()))
    }
}

/// Whether the kernel's list has a socket at a file of this name.
fn lists(listed: &str, name: &str) -> bool {
    let paths = listed.lines().filter_map(|line| line.split_whitespace().nth(7));
    paths.filter_map(|path| path.rsplit('/').next()).any(|last| last == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_in_a_pod_is_on_its_list() {
        let listed = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            ffff8: 00000002 00000000 00010000 0001 01 21190 /run/kubevirt/x-49152-source.sock\n\
            ffff9: 00000003 00000000 00000000 0001 03 21191\n";
        assert!(lists(listed, "x-49152-source.sock"));
        assert!(!lists(listed, "x-49153-source.sock"));
        assert!(!lists(listed, "Path/x"));
    }
}
