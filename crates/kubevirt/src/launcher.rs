//! The pods of this node that run VMs.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::net::sockopt::socket_peercred;
use takeover::{Directory, Trying, Watch};

use crate::record::{self, Record};
use crate::{KubevirtError, SocketName, Vmi};

/// Where virt-handler notes them.
const RECORDS: &str = "/var/run/kubevirt-private/ghost-records";
/// Where a pod has its sockets, and what that is made in.
const SOCKETS: &str = "var/run/kubevirt/migrationproxy";
const OWN: &str = "var/run/kubevirt";

/// virt-launcher has room for thousands of connections that it has not accepted: what has
/// none is not virt-launcher, and others wait meanwhile.
const ACCEPTS_MAX: Duration = Duration::from_millis(20);

/// Who has made a socket, and so what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// By QEMU, in the pod: a VM is to come.
    Inside,
    /// By virt-handler: one is to leave.
    Outside,
}

/// This node.
#[derive(Clone, Debug)]
pub struct Node {
    records: PathBuf,
}

impl Default for Node {
    fn default() -> Self {
        Self { records: RECORDS.into() }
    }
}

impl Node {
    /// Where virt-handler notes its VMs there.
    #[must_use]
    pub fn with_records(records: impl Into<PathBuf>) -> Self {
        Self { records: records.into() }
    }

    /// Watches for VMs that come and leave. Once more does no harm.
    ///
    /// # Errors
    /// If the system refuses. virt-handler may not have begun yet: that is none.
    pub fn watch(&self, watch: &Watch) -> Result<(), KubevirtError> {
        let records = Directory::open(&self.records)?;
        Ok(records.map_or(Ok(()), |records| watch.directory(records))?)
    }

    /// All pods that run VMs. One that is about to end, or to begin, may be missing.
    ///
    /// # Errors
    /// If virt-handler's notes can't be read.
    pub fn launchers(&self) -> Result<Vec<Launcher>, KubevirtError> {
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
    ///
    /// # Errors
    /// If there is none.
    pub fn launcher(&self, vmi: &Vmi) -> Result<Launcher, KubevirtError> {
        let mut records = record::all(&self.records)?.into_iter();
        let record = records.find(|record| record.vmi == *vmi);
        Launcher::of(&record.ok_or_else(|| KubevirtError::NoSuchVmi(vmi.to_string()))?)
    }
}

/// A pod that runs a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launcher {
    /// The VM.
    pub vmi: Vmi,
    /// A process in the pod, as this node numbers it.
    pid: u32,
}

impl Launcher {
    /// Whoever listens at the socket that virt-handler noted: virt-handler finds the pod
    /// so, too.
    fn of(record: &Record) -> Result<Self, KubevirtError> {
        let socket = open_socket(&record.socket).trying("opening virt-launcher's socket")?;
        let connected = takeover::connect_opened(socket, ACCEPTS_MAX);
        let connected = connected.trying("connecting to virt-launcher")?;
        let peer = socket_peercred(&connected).trying("asking who virt-launcher is")?;
        let pid = u32::try_from(peer.pid.as_raw_nonzero().get())
            .map_err(|_| io::Error::other("it is not of this PID namespace: hostPID is missing"))
            .trying("asking who virt-launcher is")?;
        Ok(Self { vmi: record.vmi.clone(), pid })
    }

    /// What lies below the pod's root.
    fn root(&self) -> Result<OwnedFd, KubevirtError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(format!("/proc/{}/root", self.pid), flags, Mode::empty());
        Ok(opened.trying("looking into a pod")?)
    }

    /// A directory in the pod: links lead nowhere outside. None if it isn't there.
    fn open(&self, path: &str) -> Result<Option<Directory>, KubevirtError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        match rustix::fs::openat2(self.root()?, path, flags, Mode::empty(), resolve) {
            Err(rustix::io::Errno::NOENT) => Ok(None),
            opened => Ok(Some(opened.trying("looking into a pod")?.into())),
        }
    }

    /// Where the VM's sockets are. None if no migration has begun yet.
    ///
    /// # Errors
    /// If the pod can't be looked into, or has ended.
    pub fn directory(&self) -> Result<Option<Directory>, KubevirtError> {
        self.open(SOCKETS)
    }

    /// Watches for sockets in the pod. Once more does no harm.
    ///
    /// # Errors
    /// If it has ended.
    pub fn watch(&self, watch: &Watch) -> Result<(), KubevirtError> {
        for path in [OWN, SOCKETS] {
            if let Some(directory) = self.open(path)? {
                watch.directory(directory)?;
            }
        }
        Ok(())
    }

    /// Whether a process runs in the pod, by its network.
    #[must_use]
    pub fn runs(&self, pid: u32) -> bool {
        let network = |pid| {
            let stat = rustix::fs::stat(format!("/proc/{pid}/ns/net"));
            stat.map(|stat| (stat.st_dev, stat.st_ino)).ok()
        };
        network(self.pid).is_some_and(|own| network(pid) == Some(own))
    }

    /// Who has made a socket that is there: the pod lists those that were made in it.
    ///
    /// # Errors
    /// If the pod has ended.
    pub fn made(&self, name: &SocketName) -> Result<Made, KubevirtError> {
        let listed = fs::read_to_string(format!("/proc/{}/net/unix", self.pid));
        let listed = listed.trying("asking for a pod's sockets")?;
        Ok(if lists(&listed, &name.to_string()) { Made::Inside } else { Made::Outside })
    }
}

/// Whether the kernel's list has a socket whose file has that name.
fn lists(listed: &str, name: &str) -> bool {
    let paths = listed.lines().filter_map(|line| line.split_whitespace().nth(7));
    paths.filter_map(|path| path.rsplit('/').next()).any(|last| last == name)
}

/// The pod may put something else there, but no link that leads out of it.
fn open_socket(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let opened = rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), resolve)?;
    let stat = rustix::fs::fstat(&opened)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(io::Error::other(format!("{} is no socket", path.display())));
    }
    Ok(opened)
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
