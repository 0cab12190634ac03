//! Hosts as network namespaces, joined by shaped links.
//!
//! A host has a network of its own and a private `/run/droveway-lab`, so that two hosts can use the
//! same socket paths; all other files are shared, as on shared storage, unless hosts boot systems of
//! their own. Each name contains the ID of the process that made it: [`clean`] removes what ended
//! processes have left.

mod counters;
mod host;
mod link;
mod namespace;
mod outside;
mod racks;
mod stale;
mod storage;
mod system;

pub use counters::Traffic;
pub use host::{Host, RUN_DIR};
pub use link::Link;
pub use outside::Outside;
pub use racks::{Crossed, Edges, Layout, RackHost, Racks};
pub use stale::{abandon, clean};
pub use storage::{NfsServer, Storage};

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::fs::{FlockOperation, flock};

use crate::error::{FileContext, LabError, Result, SystemContext};
use crate::program;

/// Names of the lab's namespaces begin with this and the maker's process ID.
const PREFIX: &str = "dw-";

/// Two hosts and the links between them. Dropping it removes both, and ends
/// every process on them.
#[derive(Debug)]
pub struct Hosts {
    /// Where VMs start.
    pub a: Host,
    /// Where they go.
    pub b: Host,
    /// The links between them.
    pub link: Link,
}

impl Hosts {
    /// Makes two hosts.
    ///
    /// # Errors
    /// If this isn't root, or `ip` and `tc` fail.
    pub fn new(link: Link) -> Result<Self> {
        let (_turn, prefix) = begin()?;
        let name = |host: &str| format!("{prefix}{host}");
        let a = Host::new(&name("a"), addresses(link, 1), link.mbit_per_s.is_some())?;
        let b = Host::new(&name("b"), addresses(link, 2), link.mbit_per_s.is_some())?;
        link.join(&a, &b)?;
        Ok(Self { a, b, link })
    }

    /// Traffic over the links since they were made, both ways.
    ///
    /// # Errors
    /// If the counters can't be read.
    pub fn traffic(&self) -> Result<Traffic> {
        Ok(self.a.sent()? + self.b.sent()?)
    }
}

/// Prepares to make hosts: returns the lock that [`turn`] takes, and the prefix of their names.
fn begin() -> Result<(File, String)> {
    if !program::root() {
        return Err(LabError::Unsupported(
            "hosts are network namespaces, and these need root: run it as root or with sudo"
                .to_owned(),
        ));
    }
    let turn = turn()?;
    clean()?;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let nth = NEXT.fetch_add(1, Relaxed);
    Ok((turn, format!("{PREFIX}{}-{nth}", std::process::id())))
}

/// A directory that is removed on drop, or by the next lab if this one is killed.
///
/// # Errors
/// If there is no room for it.
pub fn scratch(name: &str) -> Result<tempfile::TempDir> {
    let prefix = format!("{PREFIX}{}-{name}-", std::process::id());
    tempfile::Builder::new().prefix(&prefix).tempdir().doing("make a directory")
}

/// Waits until no other lab on this machine makes hosts or removes stale ones: several run at the
/// same time, and `ip netns` makes its own directory at its first use.
fn turn() -> Result<File> {
    std::fs::create_dir_all(RUN_DIR).at("make", RUN_DIR)?;
    let dir = File::open(RUN_DIR).at("open", RUN_DIR)?;
    flock(&dir, FlockOperation::LockExclusive).map_err(std::io::Error::from).at("lock", RUN_DIR)?;
    Ok(dir)
}

/// A host's addresses, one for each NIC, each in a network of its own.
fn addresses(link: Link, number: u8) -> Vec<IpAddr> {
    (0..link.nics).map(|nic| Ipv4Addr::new(10, 77, nic, number).into()).collect()
}
