//! Migrations of Proxmox VE on one host: the sockets through which VMs leave and arrive.
//!
//! ```text
//! source                                            destination
//! QEMU connects to /run/qemu-server/ID.migrate      QEMU waits there (RAM and devices)
//!                  /run/qemu-server/ID_nbd.migrate  and there (disks)
//!        |                                               ^
//!        v                                               |
//! ssh -L listens there <-------- ssh --------> sshd connects there
//! ```
//!
//! Both ends use the same path. At the destination the VM's QEMU listens, whose PID is in a file;
//! at the source ssh listens.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use wire::carry::Target;

use crate::error::{ManagerError, Trying};
use crate::onward::socket_below;
use crate::takeover::{Directory, Watch};
use crate::{Failed, Manager, Onward, Socket};

/// Proxmox VE's directory for them.
pub const DIRECTORY: &str = "/run/qemu-server";

/// This host.
#[derive(Clone, Debug)]
pub struct Host {
    directory: PathBuf,
}

impl Host {
    /// A host with its sockets in this directory.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// Whether a VM waits for a migration at a path: whether its QEMU listens there.
    fn waits_at(&self, path: &Path) -> Result<bool, ManagerError> {
        let name = path.strip_prefix(&self.directory).ok().and_then(Path::to_str);
        name.map_or(Ok(false), |name| self.waits(name))
    }

    /// The same at a socket of this name.
    fn waits(&self, name: &str) -> Result<bool, ManagerError> {
        let Some(vm) = vm_of(name) else { return Ok(false) };
        let pid = match fs::read_to_string(self.directory.join(format!("{vm}.pid"))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            pid => pid.trying("reading a VM's process ID")?,
        };
        let Ok(pid) = pid.trim().parse::<u32>() else { return Ok(false) };
        let listed = fs::read_to_string("/proc/net/unix").trying("reading the list of sockets")?;
        let listening: Vec<_> = listening(&listed, name).collect();
        let files = match fs::read_dir(format!("/proc/{pid}/fd")) {
            // QEMU has ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            files => files.trying("reading the open files of a QEMU")?,
        };
        let targets = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        let is_one = |target: PathBuf| {
            let inode = target.to_str().and_then(|text| text.strip_prefix("socket:["));
            inode.is_some_and(|inode| listening.contains(&inode.trim_end_matches(']')))
        };
        Ok(targets.into_iter().any(is_one))
    }
}

impl Manager for Host {
    fn find(&self, target: &Target) -> Result<Onward, ManagerError> {
        let Target::Path(path) = target else {
            return Err(ManagerError::OtherManager("Proxmox VE"));
        };
        let path = Path::new(path);
        let socket = socket_below(&self.directory, path)?;
        if !self.waits_at(path)? {
            let path = path.display();
            return Err(ManagerError::Refused(format!("no VM's own QEMU listens at {path}")));
        }
        Ok(Onward::Path(socket))
    }

    fn expects(&self, target: &Target) -> Result<bool, ManagerError> {
        let Target::Path(path) = target else { return Ok(false) };
        self.waits_at(Path::new(path))
    }

    fn sockets(&self, watch: &Watch, _: Failed<'_>) -> Result<Vec<Socket>, ManagerError> {
        let Some(listed) = Directory::open(&self.directory)? else { return Ok(Vec::new()) };
        watch.directory(&listed)?;
        let mut sockets = Vec::new();
        for name in listed.names()? {
            if vm_of(&name).is_none() {
                continue;
            }
            let Some(directory) = Directory::open(&self.directory)? else { continue };
            let target = Target::Path(self.directory.join(&name).display().to_string());
            let (host, at) = (self.clone(), name.clone());
            let leaves = move || host.waits(&at).map(|waits| !waits);
            sockets.push(Socket { directory, name, target, leaves: Box::new(leaves) });
        }
        Ok(sockets)
    }
}

/// The VM whose migration uses a socket of this name.
fn vm_of(name: &str) -> Option<u32> {
    let stem = name.strip_suffix(".migrate")?;
    let digits = stem.strip_suffix("_nbd").unwrap_or(stem);
    let is_number = !digits.starts_with('0') && digits.bytes().all(|digit| digit.is_ascii_digit());
    digits.parse().ok().filter(|_| is_number)
}

/// The inodes of sockets that listen at a file of that name, in the kernel's list.
fn listening<'l>(listed: &'l str, name: &'l str) -> impl Iterator<Item = &'l str> {
    listed.lines().filter_map(move |line| {
        let mut words = line.split_whitespace().skip(5);
        let (state, inode, path) = (words.next()?, words.next()?, words.next()?);
        let is_it = state == "01" && path.rsplit('/').next() == Some(name);
        is_it.then_some(inode)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn sockets_are_named_after_vms() {
        assert_eq!(vm_of("100.migrate"), Some(100));
        assert_eq!(vm_of("100_nbd.migrate"), Some(100));
        for other in
            ["100.qmp", "migrate", ".migrate", "0100.migrate", "+1.migrate", "100.migrate.kept"]
        {
            assert_eq!(vm_of(other), None, "{other}");
        }
    }

    #[test]
    fn a_vm_waits_where_its_own_qemu_listens() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::new(dir.path());
        let name = "4711.migrate";
        assert!(!host.waits(name).unwrap());
        let _listener = UnixListener::bind(dir.path().join(name)).unwrap();
        assert!(!host.waits(name).unwrap(), "nobody says that it is the VM's");
        let pid = |text: &str| fs::write(dir.path().join("4711.pid"), text).unwrap();
        pid("1\n");
        assert!(!host.waits(name).unwrap(), "another one listens");
        pid(&format!("{}\n", std::process::id()));
        assert!(host.waits(name).unwrap());
        assert!(!host.waits("4711_nbd.migrate").unwrap());
        pid("no number");
        assert!(!host.waits(name).unwrap());
    }

    #[test]
    fn a_vm_leaves_by_a_socket_at_which_its_own_qemu_does_not_listen() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::new(dir.path());
        let watch = Watch::new().unwrap();
        let sockets = || host.sockets(&watch, &mut |_, error| panic!("{error}")).unwrap();
        assert!(sockets().is_empty());
        let path = |name: &str| dir.path().join(name);
        let _listeners =
            ["4712.migrate", "4712.qmp"].map(|name| UnixListener::bind(path(name)).unwrap());
        let listed = sockets();
        let [socket] = &listed[..] else { panic!("{} sockets", listed.len()) };
        let target = Target::Path(path("4712.migrate").display().to_string());
        assert_eq!(socket.target, target);
        assert_eq!(((socket.leaves)().unwrap(), host.expects(&target).unwrap()), (true, false));
        assert!(host.find(&target).is_err());
        fs::write(path("4712.pid"), std::process::id().to_string()).unwrap();
        assert_eq!(((socket.leaves)().unwrap(), host.expects(&target).unwrap()), (false, true));
        assert!(matches!(host.find(&target), Ok(Onward::Path(_))));
    }

    #[test]
    fn only_those_that_listen_are_on_the_list() {
        let listed = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            ffff8: 00000002 00000000 00010000 0001 01 21 /run/qemu-server/100.migrate\n\
            ffff8: 00000003 00000000 00000000 0001 03 22 /run/qemu-server/100.migrate\n\
            ffff8: 00000002 00000000 00010000 0001 01 23 /run/qemu-server/101.migrate\n";
        assert_eq!(listening(listed, "100.migrate").collect::<Vec<_>>(), ["21"]);
    }
}
