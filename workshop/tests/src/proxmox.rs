//! What Proxmox VE has on its hosts besides QEMU: for each VM a file that names its QEMU, and for
//! each migration a tunnel by ssh.

pub mod ssh;

use std::fs;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;

use lab::hosts::RUN_DIR;

use crate::commander::Commander;
use crate::{Side, until};
use ssh::Ssh;

/// The VM's number.
const ID: u32 = 100;

/// Directory of a host's VM files: in place of `/run/qemu-server`, since the lab's hosts share
/// `/run`.
#[must_use]
pub fn directory() -> String {
    format!("{RUN_DIR}/qemu-server")
}

/// Path of a migration's socket on the hosts.
#[must_use]
pub fn socket(what: &str) -> String {
    format!("{}/{ID}{what}.migrate", directory())
}

/// A tunnel for one migration. Dropped, its sockets are removed, as with Proxmox VE.
pub struct Tunnel {
    sockets: Vec<PathBuf>,
    connections: Arc<AtomicUsize>,
    _ssh: Option<Ssh>,
}

fn outside(commander: &Commander, side: Side, name: &str) -> PathBuf {
    commander.world.host(side).run_dir.join("qemu-server").join(name)
}

impl Tunnel {
    /// Opens it, once a QEMU waits at the other end.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn open(commander: &Commander, from: Side, whats: &[&str]) -> Self {
        note_qemus(commander);
        let connections = Arc::<AtomicUsize>::default();
        let mut sockets = Vec::new();
        for what in whats {
            let name = format!("{ID}{what}.migrate");
            let [here, there] = [from, from.other()].map(|side| outside(commander, side, &name));
            let _ = fs::remove_file(&here);
            let listener = UnixListener::bind(&here).unwrap();
            sockets.push(here);
            let connections = Arc::clone(&connections);
            thread::spawn(move || forward(&listener, &there, &connections));
        }
        Self { sockets, connections, _ssh: None }
    }

    /// The same with OpenSSH, which doesn't count its connections.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn by_ssh(commander: &Commander, from: Side, whats: &[&str]) -> Self {
        note_qemus(commander);
        let hosts = [from, from.other()].map(|side| commander.world.host(side));
        let paths =
            whats.iter().map(|what| outside(commander, from, &format!("{ID}{what}.migrate")));
        let sockets: Vec<_> = paths.collect();
        for socket in &sockets {
            let _ = fs::remove_file(socket);
        }
        let whats: Vec<String> = whats.iter().map(|what| socket(what)).collect();
        let ssh = Ssh::open(hosts[0], hosts[1], &whats);
        Self { sockets, connections: Arc::default(), _ssh: Some(ssh) }
    }

    /// Waits until the agent of the source has taken over the sockets.
    ///
    /// # Panics
    /// If it doesn't.
    pub fn wait_until_taken_over(&self, commander: &Commander, from: Side) {
        for socket in &self.sockets {
            let name = socket.file_name().unwrap().to_str().unwrap();
            let kept = outside(commander, from, &format!("{name}.kept"));
            until("the agent stands in ssh's place", || kept.exists());
        }
    }

    /// Number of connections through it.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.connections.load(SeqCst)
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        for socket in &self.sockets {
            let _ = fs::remove_file(socket);
        }
    }
}

fn note_qemus(commander: &Commander) {
    for side in [Side::A, Side::B] {
        let pid = commander.at(side).pid();
        fs::write(outside(commander, side, &format!("{ID}.pid")), format!("{pid}\n")).unwrap();
    }
}

fn forward(listener: &UnixListener, there: &Path, connections: &AtomicUsize) {
    for taken in listener.incoming() {
        connections.fetch_add(1, SeqCst);
        let Some((one, other)) = taken.ok().zip(UnixStream::connect(there).ok()) else { continue };
        for (from, to) in [(&one, &other), (&other, &one)] {
            let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            thread::spawn(move || {
                let _ = io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            });
        }
    }
}
