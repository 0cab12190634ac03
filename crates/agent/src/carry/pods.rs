//! Doors in the pods of KubeVirt's VMs: one opens where virt-handler has made a socket
//! for a VM to leave by, if the agent of the node to which it goes is there to take it.
//!
//! Otherwise nothing is touched, and the migration goes KubeVirt's own way.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;
use engine::{Endpoint, Local};
use kubevirt::{Inode, KubevirtError, Launcher, Made, Node, Port, SocketName, Vmi, Watch};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use wire::examine::{Answer, Question};

use super::door::Door;
use super::doors::{Post, Shared};
use crate::config::PeerEntry;

/// A pod that came without notice is found by then.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// From virt-handler's socket until QEMU connects to it, libvirt starts a QEMU at the
/// destination: half a second at least. Who has not answered by then isn't waited for.
const ANSWERS_MAX: Duration = Duration::from_millis(400);
/// Nodes that are asked at a time.
const ASKED_AT_ONCE: usize = 32;

/// Opens and closes the doors in pods. Dropped, it stops, and gives them all back.
pub(super) struct Pods {
    shared: Arc<Shared>,
    stopping: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

struct Following {
    node: Node,
    watch: Watch,
    shared: Arc<Shared>,
    /// Sockets of VMs that come, or that nobody takes who carries: which file each was.
    left_alone: HashMap<SocketName, Inode>,
}

impl Pods {
    pub(super) fn follow(node: Node, shared: &Arc<Shared>) -> io::Result<Self> {
        let watch = Watch::new().map_err(io::Error::other)?;
        let stopping = Arc::new(AtomicBool::new(false));
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut following =
            Following { node, watch, shared: Arc::clone(shared), left_alone: HashMap::new() };
        let thread = thread::Builder::new().name("carry-pods".to_owned()).spawn({
            let (stopping, wake) = (Arc::clone(&stopping), Arc::clone(&wake));
            move || {
                while !stopping.load(SeqCst) {
                    following.look();
                    following.wait(&wake);
                }
            }
        })?;
        Ok(Self { shared: Arc::clone(shared), stopping, wake, thread: Some(thread) })
    }
}

impl Drop for Pods {
    fn drop(&mut self) {
        self.stopping.store(true, SeqCst);
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.shared.in_pods.lock().clear();
        self.shared.wake();
    }
}

impl Following {
    fn wait(&self, wake: &OwnedFd) {
        let mut polled = [
            PollFd::new(&wake, PollFlags::IN),
            PollFd::from_borrowed_fd(self.watch.fd(), PollFlags::IN),
        ];
        let _ = poll(&mut polled, Timespec::try_from(LOOK_AGAIN).ok().as_ref());
        if let Err(error) = self.watch.clear() {
            tracing::warn!(%error, "cannot see what has changed in pods");
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Looks at all pods.
    fn look(&mut self) {
        if let Err(error) = self.watch.node(&self.node) {
            tracing::debug!("{error}");
        }
        let launchers = match self.node.launchers() {
            Ok(launchers) => launchers,
            Err(error) => {
                tracing::warn!("{error}");
                return;
            }
        };
        let is_there = |vmi: &Vmi| launchers.iter().any(|launcher| launcher.vmi == *vmi);
        let is_open = |post: &Arc<Post>| {
            post.door.pod().is_some_and(|socket| is_there(&socket.name().vmi) && socket.is_there())
        };
        self.shared.in_pods.lock().retain(is_open);
        self.left_alone.retain(|name, _| is_there(&name.vmi));
        for launcher in &launchers {
            if let Err(error) = self.look_at(launcher) {
                tracing::debug!(vmi = %launcher.vmi, "{error}");
            }
        }
    }

    fn look_at(&mut self, launcher: &Launcher) -> Result<(), KubevirtError> {
        self.watch.launcher(launcher)?;
        for port in Port::ALL {
            let name = SocketName { vmi: launcher.vmi.clone(), port };
            let open = self.shared.in_pods.lock().iter().find(|post| is_at(post, &name)).cloned();
            if let Some(post) = open {
                post.door.pod().map_or(Ok(()), kubevirt::Replaced::take_owner)?;
                continue;
            }
            let Some(directory) = launcher.directory()? else { return Ok(()) };
            // One of ours that nobody listens at any more.
            directory.give_back(&name)?;
            let Some(now) = directory.which(&name)? else {
                self.left_alone.remove(&name);
                continue;
            };
            if self.left_alone.get(&name) == Some(&now) {
                continue;
            }
            if directory.made(&name)? == Made::Outside
                && let Some(peer) = self.who_takes(&launcher.vmi)
            {
                let door = Door::in_pod(&peer, directory.replace(name.clone())?);
                tracing::info!(vmi = %launcher.vmi, door = %door, peer, "what leaves here is carried");
                self.shared.in_pods.lock().push(Arc::new(Post::at(door)));
                self.shared.wake();
                continue;
            }
            self.left_alone.insert(name, now);
        }
        Ok(())
    }

    /// The host that has another pod of that VM, if its agent says so in time.
    fn who_takes(&self, vmi: &Vmi) -> Option<String> {
        let peers = self.shared.migrations.routes().peers.now();
        let found = who_has(&self.shared.local, &peers, vmi);
        match &*found {
            [one] => Some(one.clone()),
            [] => {
                tracing::info!(%vmi, "no other agent has a pod of it: not carried");
                None
            }
            several => {
                tracing::warn!(%vmi, ?several, "several nodes have a pod of it: not carried");
                None
            }
        }
    }
}

fn is_at(post: &Post, name: &SocketName) -> bool {
    post.door.pod().is_some_and(|socket| socket.name() == name)
}

/// Asks all at the same time, and takes who has said yes by then.
fn who_has(local: &Local, peers: &Arc<[PeerEntry]>, vmi: &Vmi) -> Vec<String> {
    let until = Instant::now() + ANSWERS_MAX;
    let (tell, told) = unbounded();
    let next = Arc::new(AtomicUsize::new(0));
    for _ in 0..peers.len().min(ASKED_AT_ONCE) {
        let (tell, next) = (tell.clone(), Arc::clone(&next));
        let (local, peers, vmi) = (local.clone(), Arc::clone(peers), vmi.clone());
        let ask = move || {
            while let Some(peer) = peers.get(next.fetch_add(1, SeqCst)) {
                let has = Instant::now() < until && has(&local, peer, &vmi);
                if tell.send(has.then(|| peer.name.clone())).is_err() {
                    return;
                }
            }
        };
        // Without a thread others ask.
        let _ = thread::Builder::new().name("carry-ask".to_owned()).spawn(ask);
    }
    drop(tell);
    let answers = std::iter::from_fn(|| told.recv_deadline(until).ok());
    answers.take(peers.len()).flatten().collect()
}

fn has(local: &Local, peer: &PeerEntry, vmi: &Vmi) -> bool {
    let question = Question::Vmi { uid: vmi.to_string() };
    let way = Endpoint { local: None, remote: peer.address };
    match engine::examine(local, &peer.name, way, question, ANSWERS_MAX) {
        Ok(examined) => examined.answer == Answer::Vmi { here: true },
        Err(error) => {
            tracing::debug!(peer = peer.name, %error, "asked for a pod");
            false
        }
    }
}
