//! virt-handlers of both hosts, for one migration: their sockets at the source lead into the pod of
//! the destination.

use std::fs;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;

use lab::libvirt::kubevirts_own;

use super::LibvirtWorld;
use crate::{Side, until};

/// Ports for RAM and devices, and for disks.
pub const PORTS: [u16; 2] = [49152, 49153];

/// Dropped, they close, and their sockets are removed.
pub enum VirtHandlers {
    /// Forwards connections as KubeVirt's own do, but without TLS between them.
    StandIn(StandIn),
    /// KubeVirt's own, one on each host.
    Own(Vec<Program>),
}

/// Sockets, and the number of connections to them.
pub struct StandIn {
    sockets: Vec<PathBuf>,
    by_ports: Arc<AtomicUsize>,
}

/// A virt-handler's proxies; they end with its standard input.
pub struct Program {
    child: Child,
    lives: Option<ChildStdin>,
}

impl VirtHandlers {
    /// Opens them for a migration from this host: KubeVirt's own if that program is available.
    ///
    /// # Panics
    /// If they can't be opened; all functions of this file panic on failure.
    #[must_use]
    pub fn open(world: &LibvirtWorld, from: Side) -> Self {
        match kubevirts_own() {
            Some(program) => Self::Own(own(world, from, &program)),
            None => Self::StandIn(StandIn::open(world, from)),
        }
    }

    /// Connections of a QEMU through them, if they count these.
    #[must_use]
    pub fn by_ports(&self) -> Option<usize> {
        match self {
            Self::StandIn(stand_in) => Some(stand_in.by_ports.load(SeqCst)),
            Self::Own(_) => None,
        }
    }
}

impl StandIn {
    fn open(world: &LibvirtWorld, from: Side) -> Self {
        let [here, there] = [from, from.other()].map(|side| {
            let pod = world.daemon(side).pod().unwrap();
            (pod, format!("/proc/{}/root", pod.pid(world.host(side)).unwrap()))
        });
        let by_ports = Arc::<AtomicUsize>::default();
        let mut sockets = Vec::new();
        for port in [None, Some(PORTS[0]), Some(PORTS[1])] {
            let socket = PathBuf::from(format!("{}{}", here.1, here.0.socket(port)));
            let _ = fs::remove_file(&socket);
            let listener = UnixListener::bind(&socket).unwrap();
            give_to_qemu(world, from, &socket);
            let target = match port {
                Some(_) => there.0.socket(port),
                None => "/run/libvirt/libvirt-sock".to_owned(),
            };
            let target = PathBuf::from(format!("{}{target}", there.1));
            let counted = port.map(|_| Arc::clone(&by_ports));
            thread::spawn(move || serve(&listener, &target, counted.as_deref()));
            sockets.push(socket);
        }
        Self { sockets, by_ports }
    }
}

fn give_to_qemu(world: &LibvirtWorld, side: Side, socket: &Path) {
    let passwd = fs::read_to_string(world.host(side).path("/etc/passwd")).unwrap();
    let line = passwd.lines().find(|line| line.starts_with("qemu:")).unwrap();
    let [uid, gid] = [2, 3].map(|nth| line.split(':').nth(nth).unwrap().parse().unwrap());
    std::os::unix::fs::chown(socket, Some(uid), Some(gid)).unwrap();
}

fn serve(listener: &UnixListener, target: &Path, counted: Option<&AtomicUsize>) {
    for taken in listener.incoming() {
        if let Some(counted) = counted {
            counted.fetch_add(1, SeqCst);
        }
        // Maybe nothing listens at the destination.
        let Some((one, other)) = taken.ok().zip(UnixStream::connect(target).ok()) else { continue };
        for (from, to) in [(&one, &other), (&other, &one)] {
            let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            thread::spawn(move || {
                let _ = io::copy(&mut from, &mut to);
                // KubeVirt's proxies close both when either has ended.
                let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
            });
        }
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        for socket in &self.sockets {
            let _ = fs::remove_file(socket);
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.lives = None;
        let _ = self.child.wait();
    }
}

/// Starts KubeVirt's target, which reports its ports, and its source with these ports.
fn own(world: &LibvirtWorld, from: Side, program: &Path) -> Vec<Program> {
    let to = from.other();
    let pod = |side: Side| world.daemon(side).pod().unwrap();
    let directory = |side: Side| pod(side).directory(world.host(side)).unwrap();
    let uid = &pod(from).uid;
    let ports = world.host(to).path("/run/target-ports.json");
    let _ = fs::remove_file(&ports);
    let mut target = world.host(to).command(program);
    let libvirtd =
        format!("/proc/{}/root/run/libvirt/libvirt-sock", pod(to).pid(world.host(to)).unwrap());
    target.args(["target", uid]).arg(directory(to)).arg(libvirtd).arg("/run/target-ports.json");
    let target = start(target);
    until("KubeVirt's target listens", || ports.is_file());
    let told = fs::read_to_string(&ports).unwrap();
    let mut source = world.host(from).command(program);
    source.args(["source", uid]).arg(directory(from));
    source.arg(world.host(to).addresses[0].to_string()).arg(told.trim());
    let source = start(source);
    let last = pod(from).socket(Some(PORTS[1]));
    until("KubeVirt's source listens", || world.host(from).path(&last).exists());
    vec![target, source]
}

fn start(mut command: Command) -> Program {
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let lives = child.stdin.take();
    Program { child, lives }
}
