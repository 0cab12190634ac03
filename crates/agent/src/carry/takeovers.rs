//! Listeners that replace sockets which others create for a VM to leave by: virt-handler's in
//! KubeVirt's pods, and those of Proxmox VE's ssh tunnels.
//!
//! Such a listener opens only if the agent of the host to which the socket leads expects the VM.
//! Otherwise nothing is changed, and the migration takes its manager's own path.

use std::collections::HashMap;
use std::error::Error;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;
use data_threads::Joined;
use engine::{Endpoint, Local};
use managers::Socket;
use managers::takeover::{Inode, Replaced, Watch};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use wire::carry::Target;
use wire::examine::{Answer, Question};

use super::listener::Listener;
use super::listener_set::Entry;
use super::listeners::Shared;
use crate::config::PeerEntry;

/// Changes within this time are handled together, so that a program in a pod that keeps
/// creating files keeps no core busy.
const TOGETHER: Duration = Duration::from_millis(20);
/// The interval between scans that find changes without a notification.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// The longest wait for other agents' answers.
///
/// A manager works for at least half a second between creating such a socket and QEMU's connecting
/// to it.
const ANSWERS_MAX: Duration = Duration::from_millis(400);
/// Hosts that are queried in parallel.
const ASKED_AT_ONCE: usize = 32;

/// Opens and closes such listeners; dropping it stops that, and restores the sockets.
pub(super) struct Takeovers {
    shared: Arc<Shared>,
    stopping: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
    thread: Joined,
}

struct Following {
    watch: Watch,
    shared: Arc<Shared>,
    /// Sockets that are not replaced, because a VM arrives by them or no other agent expects
    /// what leaves by them, each with its inode.
    left_alone: HashMap<Target, Inode>,
    troubles: Troubles,
}

/// Errors with sockets that should be replaced. Each is logged once, though it recurs with
/// each scan.
#[derive(Default)]
struct Troubles {
    /// Those of the last scan, and of this one.
    before: HashMap<Target, String>,
    now: HashMap<Target, String>,
}

impl Troubles {
    fn next_scan(&mut self) {
        self.before = std::mem::take(&mut self.now);
    }

    /// Notes an error of this scan. Returns whether it is new.
    fn note(&mut self, target: &Target, error: &str) -> bool {
        self.now.insert(target.clone(), error.to_owned());
        self.before.get(target).is_none_or(|before| before != error)
    }

    fn warn(&mut self, target: &Target, error: &dyn Error) {
        let error = error.to_string();
        if self.note(target, &error) {
            tracing::warn!(?target, error, "cannot carry migrations that leave by this socket");
        }
    }
}

type Outcome<T> = Result<T, Box<dyn Error>>;

impl Takeovers {
    pub(super) fn follow(shared: &Arc<Shared>) -> io::Result<Self> {
        let watch = Watch::new().map_err(io::Error::other)?;
        let stopping = Arc::new(AtomicBool::new(false));
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut following = Following {
            watch,
            shared: Arc::clone(shared),
            left_alone: HashMap::new(),
            troubles: Troubles::default(),
        };
        let thread = thread::Builder::new().name("carry-takeovers".to_owned()).spawn({
            let (stopping, wake) = (Arc::clone(&stopping), Arc::clone(&wake));
            move || {
                while !stopping.load(SeqCst) {
                    if let Err(error) = following.look() {
                        tracing::warn!(%error, "cannot search for sockets of leaving migrations");
                    }
                    following.wait(&wake);
                }
            }
        })?;
        Ok(Self { shared: Arc::clone(shared), stopping, wake, thread: thread.into() })
    }
}

impl Drop for Takeovers {
    fn drop(&mut self) {
        self.stopping.store(true, SeqCst);
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        self.thread.join();
        self.shared.taken_over.lock().clear();
        self.shared.wake();
    }
}

impl Following {
    fn wait(&self, wake: &OwnedFd) {
        let watch = self.watch.fd();
        let mut polled = [PollFd::new(wake, PollFlags::IN), PollFd::new(&watch, PollFlags::IN)];
        let _ = poll(&mut polled, Timespec::try_from(LOOK_AGAIN).ok().as_ref());
        let has_changed = !polled[1].revents().is_empty();
        if has_changed {
            thread::sleep(TOGETHER);
        }
        if let Err(error) = self.watch.clear() {
            tracing::warn!(%error, "cannot read the changes of watched directories");
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Handles all sockets that exist.
    fn look(&mut self) -> Outcome<()> {
        self.troubles.next_scan();
        let sockets = match &self.shared.local.manager {
            Some(manager) => manager.sockets(&self.watch, &mut |target, error| {
                self.troubles.warn(target, error);
            })?,
            None => Vec::new(),
        };
        self.watch.forget_others();
        let is_there = |target: &Target| sockets.iter().any(|socket| socket.target == *target);
        let is_open = |entry: &Arc<Entry>| {
            is_there(&entry.listener.target())
                && entry.listener.replaces().is_some_and(Replaced::is_there)
        };
        let closed: Vec<_> =
            self.shared.taken_over.lock().extract_if(.., |entry| !is_open(entry)).collect();
        if !closed.is_empty() {
            drop(closed);
            // The thread that polls these listeners still holds them.
            self.shared.wake();
        }
        self.left_alone.retain(|target, _| is_there(target));
        self.shared.own_path.lock().retain(is_there);
        for socket in sockets {
            let target = socket.target.clone();
            if let Err(error) = self.look_at(socket) {
                self.troubles.warn(&target, &*error);
            }
        }
        Ok(())
    }

    fn look_at(&mut self, socket: Socket) -> Outcome<()> {
        let Socket { directory, name, target, leaves } = socket;
        let is_at = |entry: &&Arc<Entry>| entry.listener.target() == target;
        let open = self.shared.taken_over.lock().iter().find(is_at).cloned();
        if let Some(entry) = open {
            return Ok(entry.listener.replaces().map_or(Ok(()), Replaced::take_owner)?);
        }
        // Restores a socket that an earlier run of the agent replaced.
        directory.give_back(&name)?;
        let Some(now) = directory.which(&name)? else {
            self.left_alone.remove(&target);
            return Ok(());
        };
        if self.left_alone.get(&target) == Some(&now) {
            return Ok(());
        }
        if leaves()?
            && !self.takes_own_path(&target)
            && let Some(peer) = self.who_takes(&target)
        {
            let listener = Listener::in_place_of(&peer, directory.replace(name)?, target);
            tracing::info!(%listener, peer, "carrying migrations that leave by this socket");
            self.shared.taken_over.lock().push(Arc::new(Entry::at(listener)));
            self.shared.wake();
        } else {
            self.left_alone.insert(target, now);
        }
        Ok(())
    }

    /// Whether this migration is left to its manager, since agents could not carry the one before.
    fn takes_own_path(&self, target: &Target) -> bool {
        let takes = self.shared.own_path.lock().remove(target);
        if takes {
            tracing::info!(
                ?target,
                "the agents could not carry the last migration to this target: not carrying this \
                 one"
            );
        }
        takes
    }

    /// The host that expects the VM, if its agent reports that in time.
    fn who_takes(&self, target: &Target) -> Option<String> {
        let peers = self.shared.migrations.routes().peers.now();
        let found = who_expects(&self.shared.local, &peers, target);
        match &*found {
            [one] => Some(one.clone()),
            [] => {
                tracing::info!(?target, "no other agent expects the migration: not carried");
                None
            }
            several => {
                tracing::warn!(
                    ?target,
                    ?several,
                    "several hosts expect the migration: not carried"
                );
                None
            }
        }
    }
}

/// Queries all peers in parallel, and returns those that have confirmed it in time.
fn who_expects(local: &Local, peers: &Arc<[PeerEntry]>, target: &Target) -> Vec<String> {
    let until = Instant::now() + ANSWERS_MAX;
    let (tell, told) = unbounded();
    let next = Arc::new(AtomicUsize::new(0));
    for _ in 0..peers.len().min(ASKED_AT_ONCE) {
        let (tell, next) = (tell.clone(), Arc::clone(&next));
        let (local, peers, target) = (local.clone(), Arc::clone(peers), target.clone());
        let query = move || {
            while let Some(peer) = peers.get(next.fetch_add(1, SeqCst)) {
                let expects = Instant::now() < until && self::expects(&local, peer, &target);
                if tell.send(expects.then(|| peer.name.clone())).is_err() {
                    return;
                }
            }
        };
        // If this thread can't be started, the others ask its share.
        let _ = thread::Builder::new().name("carry-query".to_owned()).spawn(query);
    }
    drop(tell);
    let answers = std::iter::from_fn(|| told.recv_deadline(until).ok());
    answers.take(peers.len()).flatten().collect()
}

fn expects(local: &Local, peer: &PeerEntry, target: &Target) -> bool {
    let question = Question::Comes { target: target.clone() };
    let route = Endpoint { local: None, remote: peer.address };
    match engine::examine(local, &peer.name, route, question, ANSWERS_MAX) {
        Ok(examined) => examined.answer == Answer::Comes { here: true },
        Err(error) => {
            tracing::debug!(
                peer = peer.name,
                %error,
                "cannot query a peer for expected migrations"
            );
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_logged_once_until_it_is_over_or_another() {
        let mut troubles = Troubles::default();
        let [one, other] = [49152, 49153].map(Target::Port);
        type Scan<'s> = (&'s [(&'s Target, &'s str)], &'s [bool]);
        let scans: [Scan<'_>; 5] = [
            (&[(&one, "read-only"), (&other, "read-only")], &[true, true]),
            (&[(&one, "read-only"), (&other, "no right")], &[false, true]),
            (&[(&other, "no right")], &[false]),
            (&[(&one, "read-only")], &[true]),
            (&[(&one, "read-only")], &[false]),
        ];
        for (errors, expected) in scans {
            troubles.next_scan();
            let new = errors.iter().map(|(target, error)| troubles.note(target, error));
            assert_eq!(new.collect::<Vec<_>>(), expected, "{errors:?}");
        }
    }
}
