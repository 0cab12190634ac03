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

use crate::takeover::{Directory, TakeoverError, Trying};

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

    /// The path of that directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// The directory of the sockets; none if no VM has been started yet.
    ///
    /// # Errors
    /// If it can't be opened.
    pub fn directory(&self) -> Result<Option<Directory>, TakeoverError> {
        Directory::open(&self.directory)
    }

    /// Whether a VM waits for a migration at a socket of this name: whether its QEMU listens there.
    ///
    /// # Errors
    /// If the kernel doesn't say.
    pub fn waits(&self, name: &str) -> Result<bool, TakeoverError> {
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

/// The VM whose migration uses a socket of this name.
#[must_use]
pub fn vm_of(name: &str) -> Option<u32> {
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
    fn only_those_that_listen_are_on_the_list() {
        let listed = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            ffff8: 00000002 00000000 00010000 0001 01 21 /run/qemu-server/100.migrate\n\
            ffff8: 00000003 00000000 00000000 0001 03 22 /run/qemu-server/100.migrate\n\
            ffff8: 00000002 00000000 00010000 0001 01 23 /run/qemu-server/101.migrate\n";
        assert_eq!(listening(listed, "100.migrate").collect::<Vec<_>>(), ["21"]);
    }
}
