//! All listeners of an agent: one thread waits for connections at all of them. Where some wait, a
//! thread of that listener's own accepts them, and serves the first that is from an admitted user.

mod serving;

use std::collections::{HashMap, HashSet};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use data_threads::Joined;
use engine::{Caller, Local};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use wire::carry::Target;

use super::bypass::Bypasses;
use super::listener::Admitted;
use super::listener_set::{self, Entry, ListenerSet, SERVED_OF_ONE_MAX};
use super::takeovers::Takeovers;
use crate::config::{Carry, Manager, PeerEntry};
use crate::examiner::Examiner;
use crate::moves::migrations::Migrations;
use crate::user::{self, UserError};

/// Listeners at which connections are accepted at a time. The others take turns: a user who keeps
/// connecting to all of them makes no more threads, and others still connect.
const ACCEPTING_MAX: usize = 32;
/// Connections that are served at a time, each by a thread and some that it starts. The rest waits
/// in the kernel. Of those that are carried each other host takes 24, of the others there are 256.
const SERVED_MAX: usize = 512;
/// A listener at which accepting fails, such as for lack of descriptors, is retried after this.
const RETRY: Duration = Duration::from_millis(200);
/// A listener that could not be opened, such as because another program listens there, is
/// retried after this.
const REOPEN: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Why carried migrations can't be accepted.
#[derive(Debug, thiserror::Error)]
pub enum CarryListenersError {
    /// The users that may connect can't be determined.
    #[error(transparent)]
    User(#[from] UserError),
    /// The directory of sockets can't be created.
    #[error("the directory of [carry], {}: {source}", directory.display())]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Another operation on this host failed.
    #[error("cannot wait for migrations to carry: {0}")]
    Local(io::Error),
}

/// An agent's listeners for carried migrations.
///
/// Dropping them closes them and ends what is carried; its VMs stay here.
pub(crate) struct CarryListeners {
    shared: Arc<Shared>,
    waiting: Joined,
    /// Opens listeners that replace others' sockets.
    takeovers: Option<Takeovers>,
}

pub(super) struct Shared {
    carry: Carry,
    /// The new hosts, until the listeners are changed to theirs.
    changed: Mutex<Option<Vec<PeerEntry>>>,
    /// Listeners that replace others' sockets.
    pub(super) taken_over: Mutex<Vec<Arc<Entry>>>,
    /// Where agents could not carry the last migration: the next one takes its manager's own path.
    /// KubeVirt tries again by itself, and would fail each time.
    pub(super) own_path: Mutex<HashSet<Target>>,
    admitted: Admitted,
    pub(super) local: Local,
    pub(super) migrations: Arc<Migrations>,
    examiner: Arc<Examiner>,
    /// Wakes the thread that waits for connections.
    wake: Arc<OwnedFd>,
    closing: AtomicBool,
    /// Threads that accept connections now.
    accepting: AtomicUsize,
    /// Threads that have accepted connections since the agent's start.
    started: AtomicU64,
    /// Those that are not carried, but passed on.
    bypasses: Bypasses,
    /// Each thread of a connection.
    served: Mutex<HashMap<u64, Served>>,
}

// Some listeners that are full leave room for others.
const _: () = assert!(4 * SERVED_OF_ONE_MAX < SERVED_MAX);

struct Served {
    /// The connection, to end it. None while the thread waits for one.
    socket: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl CarryListeners {
    /// Opens the listeners for all of `peers`; those that can't be opened are retried.
    pub(crate) fn open(
        carry: &Carry,
        peers: &[PeerEntry],
        local: Local,
        migrations: Arc<Migrations>,
        examiner: Arc<Examiner>,
    ) -> Result<Self, CarryListenersError> {
        let users = carry.qemu_users.iter().map(|name| user::numbers(name));
        let users = users.collect::<Result<Vec<_>, _>>()?;
        let qemu = users.first().copied();
        if carry.manager == Manager::Libvirt {
            make_directory(carry, qemu)?;
        }
        let listeners = ListenerSet::new(&local.agent, carry, peers, qemu);
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| CarryListenersError::Local(errno.into()))?;
        let shared = Arc::new(Shared {
            carry: carry.clone(),
            changed: Mutex::default(),
            taken_over: Mutex::default(),
            own_path: Mutex::default(),
            admitted: Admitted { qemu: users.into_iter().map(|(uid, _)| uid).collect() },
            local,
            migrations,
            examiner,
            wake: Arc::new(wake),
            closing: AtomicBool::new(false),
            accepting: AtomicUsize::new(0),
            // A listener that had no turn yet has 0.
            started: AtomicU64::new(1),
            bypasses: Bypasses::default(),
            served: Mutex::default(),
        });
        let waiting = thread::Builder::new()
            .name("carry-listen".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.wait(listeners)
            })
            .map_err(CarryListenersError::Local)?;
        let takeovers = match carry.manager {
            Manager::Libvirt => None,
            Manager::Kubevirt | Manager::Proxmox => {
                Some(Takeovers::follow(&shared).map_err(CarryListenersError::Local)?)
            }
        };
        Ok(Self { shared, waiting: waiting.into(), takeovers })
    }

    /// Changes the listeners to those for other hosts; what is carried goes on.
    pub(crate) fn reopener(&self) -> impl Fn(&[PeerEntry]) + Send + Sync + use<> {
        let shared = Arc::clone(&self.shared);
        move |peers: &[PeerEntry]| {
            *shared.changed.lock() = Some(peers.to_vec());
            shared.wake();
        }
    }

    /// Accepts no more connections, and restores others' sockets. What is carried continues.
    pub(crate) fn stop_accepting(&mut self) {
        self.takeovers = None;
        self.shared.closing.store(true, SeqCst);
        self.shared.wake();
        self.waiting.join();
    }

    /// Waits for migrations that bypass the agents through this one, at most until `until`.
    pub(crate) fn wait_for_bypasses(&self, until: Instant) {
        let connections = self.shared.bypasses.number();
        if connections > 0 {
            tracing::info!(connections, "waiting for migrations that bypass the agents");
        }
        let connections = self.shared.bypasses.wait_none(until);
        if connections > 0 {
            tracing::error!(
                connections,
                "aborting migrations that bypass the agents; a VM in post-copy stops until its \
                 manager resumes its migration"
            );
        }
    }

    /// Accepts no more connections, and ends what is carried.
    pub(crate) fn close(&mut self) {
        self.stop_accepting();
        let threads: Vec<_> = {
            let mut served = self.shared.served.lock();
            served
                .values_mut()
                .filter_map(|one| {
                    if let Some(socket) = &one.socket {
                        // The connection may have ended.
                        let _ = socket.shutdown(std::net::Shutdown::Both);
                    }
                    one.thread.take()
                })
                .collect()
        };
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Drop for CarryListeners {
    fn drop(&mut self) {
        self.close();
    }
}

/// Creates the directory in which QEMUs create the sockets at which they wait.
fn make_directory(carry: &Carry, qemu: Option<(u32, u32)>) -> Result<(), CarryListenersError> {
    let directory = &carry.directory;
    let made = DirBuilder::new().recursive(true).mode(0o755).create(directory).and_then(|()| {
        match qemu {
            Some((uid, gid)) => std::os::unix::fs::chown(directory, Some(uid), Some(gid)),
            None => Ok(()),
        }?;
        fs::metadata(directory).map(drop)
    });
    made.map_err(|source| CarryListenersError::Directory { directory: directory.clone(), source })
}

impl Shared {
    /// Wakes the waiting thread so that it reads what has changed.
    pub(super) fn wake(&self) {
        listener_set::wake(&self.wake);
    }

    /// Waits for connections at all listeners, until they are closed.
    fn wait(self: &Arc<Self>, mut listeners: ListenerSet) {
        while !self.closing.load(SeqCst) {
            if let Some(peers) = self.changed.lock().take() {
                listeners.are_for(&self.carry, &peers);
            }
            let room = ACCEPTING_MAX.saturating_sub(self.accepting.load(SeqCst));
            let room = room.min(SERVED_MAX.saturating_sub(self.served.lock().len()));
            let mut ready = self.ready(&mut listeners, room > 0);
            // Those whose last turn is longest ago come first.
            ready.sort_by_key(|entry| entry.turn.load(SeqCst));
            ready.iter().take(room).for_each(|entry| self.accept(entry));
        }
    }

    /// Waits until connections wait at listeners that no thread accepts them from, and returns the
    /// listeners' entries; none if something else has changed. Without room for more threads, it
    /// waits only for that.
    fn ready(&self, listeners: &mut ListenerSet, has_room: bool) -> Vec<Arc<Entry>> {
        let mut free = Vec::new();
        if has_room {
            let taken_over = self.taken_over.lock();
            let all = listeners.open().iter().chain(&*taken_over);
            free.extend(all.filter(|entry| entry.is_free()).cloned());
        }
        let (next, free): (Vec<_>, Vec<_>) = free.into_iter().partition(|it| it.has_accepted());
        if !next.is_empty() {
            return next;
        }
        let fds = free.iter().map(|entry| entry.listener.fd()).chain([self.wake.as_fd()]);
        let fds: Vec<_> = fds.collect();
        let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let limit = (!listeners.all_open()).then_some(&REOPEN);
        match poll(&mut polled, limit) {
            Ok(0) => listeners.open_missing(),
            Ok(_) => {}
            Err(Errno::INTR) => return Vec::new(),
            Err(error) => {
                tracing::warn!(%error, "cannot wait for connections");
                thread::sleep(RETRY);
                return Vec::new();
            }
        }
        let ready: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
        free.into_iter().zip(ready).filter_map(|(entry, ready)| ready.then_some(entry)).collect()
    }

    /// Leaves a listener to a thread that accepts a connection, until that has all connections of
    /// its migration.
    fn accept(self: &Arc<Self>, entry: &Arc<Entry>) {
        let number = self.started.fetch_add(1, SeqCst);
        entry.turn.store(number, SeqCst);
        let busy = entry.occupy(&self.wake);
        entry.served.fetch_add(1, SeqCst);
        let accepting = Accepting::one_more(self);
        // The thread waits until the map has it.
        let mut served = self.served.lock();
        let spawned = thread::Builder::new().name(format!("carry-{number}")).spawn({
            let shared = Arc::clone(self);
            move || {
                let of_entry = Arc::clone(&busy.served);
                let _serving = Serving { shared: Arc::clone(&shared), number, of_entry };
                // Dropped before that: closing the listeners waits for threads that serve.
                let entry = busy;
                let caller = shared.next(&entry, number);
                drop(accepting);
                if let Some(caller) = caller {
                    shared.serve(entry, caller);
                }
            }
        });
        match spawned {
            Ok(thread) => {
                served.insert(number, Served { socket: None, thread: Some(thread) });
            }
            Err(error) => {
                drop(served);
                tracing::warn!(
                    %error,
                    "cannot start a thread for a connection; the connection waits"
                );
                thread::sleep(RETRY);
                entry.served.fetch_sub(1, SeqCst);
            }
        }
    }

    /// The next connection of an admitted user, for thread `number`; none if none is waiting, or
    /// the listeners are closed.
    fn next(&self, entry: &Entry, number: u64) -> Option<Caller> {
        let next = entry.next(&self.admitted, &self.closing).and_then(|caller| {
            let kept = caller.as_ref().map(Caller::try_clone_connection).transpose()?;
            Ok(caller.zip(kept))
        });
        let (caller, kept) = match next {
            Ok(next) => next?,
            Err(error) => {
                tracing::warn!(listener = %entry.listener, %error, "cannot accept a connection");
                thread::sleep(RETRY);
                return None;
            }
        };
        let mut served = self.served.lock();
        let connection = served.get_mut(&number).filter(|_| !self.closing.load(SeqCst))?;
        connection.socket = Some(kept);
        Some(caller)
    }
}

/// A thread that accepts connections, until this is dropped, even by a panic.
struct Accepting(Arc<Shared>);

impl Accepting {
    fn one_more(shared: &Arc<Shared>) -> Self {
        shared.accepting.fetch_add(1, SeqCst);
        Self(Arc::clone(shared))
    }
}

impl Drop for Accepting {
    fn drop(&mut self) {
        self.0.accepting.fetch_sub(1, SeqCst);
        // There is room again.
        self.0.wake();
    }
}

/// The thread of a connection, until this is dropped, even by a panic.
struct Serving {
    shared: Arc<Shared>,
    number: u64,
    of_entry: Arc<AtomicUsize>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.of_entry.fetch_sub(1, SeqCst);
        let served = self.shared.served.lock().remove(&self.number);
        drop(served);
        // There may be room again.
        self.shared.wake();
    }
}
