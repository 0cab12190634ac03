//! The pods of this node that run VMs.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::net::sockopt::socket_peercred;

use crate::directory::Directory;
use crate::error::Trying;
use crate::record::{self, Record};
use crate::{KubevirtError, Vmi};

/// Where virt-handler notes them.
const RECORDS: &str = "/var/run/kubevirt-private/ghost-records";

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

    /// The directory that changes when VMs come and leave.
    #[must_use]
    pub fn records(&self) -> &Path {
        &self.records
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
        let by_number = format!("/proc/self/fd/{}", socket.as_raw_fd());
        let connected = UnixStream::connect(by_number).trying("connecting to virt-launcher")?;
        let peer = socket_peercred(&connected).trying("asking who virt-launcher is")?;
        let pid = u32::try_from(peer.pid.as_raw_nonzero().get())
            .map_err(|_| io::Error::other("it is not of this PID namespace: hostPID is missing"))
            .trying("asking who virt-launcher is")?;
        Ok(Self { vmi: record.vmi.clone(), pid })
    }

    /// What lies below the pod's root.
    fn root(&self) -> Result<OwnedFd, KubevirtError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(format!("/proc/{}/root", self.pid), flags, Mode::empty())
            .trying("looking into a pod")
    }

    /// A directory in the pod: links lead nowhere outside. None if it isn't there.
    pub(crate) fn open(&self, path: &str) -> Result<Option<OwnedFd>, KubevirtError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        match rustix::fs::openat2(self.root()?, path, flags, Mode::empty(), resolve) {
            Err(rustix::io::Errno::NOENT) => Ok(None),
            opened => opened.map(Some).trying("looking into a pod"),
        }
    }

    /// Where the VM's sockets are. None if no migration has begun yet.
    ///
    /// # Errors
    /// If the pod can't be looked into, or has ended.
    pub fn directory(&self) -> Result<Option<Directory>, KubevirtError> {
        Ok(self.open(Directory::PATH)?.map(|fd| Directory::new(fd, self.pid)))
    }

    /// Whether the pod has this socket's file name from inside.
    pub(crate) fn made(pid: u32, name: &str) -> io::Result<bool> {
        let listed = fs::read_to_string(format!("/proc/{pid}/net/unix"))?;
        let paths = listed.lines().filter_map(|line| line.split_whitespace().nth(7));
        Ok(paths.filter_map(|path| path.rsplit('/').next()).any(|last| last == name))
    }
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
