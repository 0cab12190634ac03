//! All doors of an agent: one thread waits for connections at all of them. Where some wait, a
//! thread of that door's own accepts them, and serves the first that is from an admitted user.

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

use api::FromStorage;
use engine::{Caller, CarryRequest, Local};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use wire::carry::Target;

use super::bypass::Bypasses;
use super::door::Admitted;
use super::posts::{self, Post, Posts, SERVED_OF_ONE_MAX};
use super::takeovers::Takeovers;
use crate::config::{Carry, Manager, PeerEntry};
use crate::examiner::Examiner;
use crate::moves::migrations::Migrations;
use crate::user::{self, UserError};

/// Doors at which connections are accepted at a time. The others take turns: a user who keeps
/// connecting to all doors makes no more threads, and keeps nobody out.
const ACCEPTING_MAX: usize = 32;
/// Connections that are served at a time, each by a thread and some that it starts. The rest waits in
/// the kernel. Of those that are carried each other host takes 24, of the others there are 256.
const SERVED_MAX: usize = 512;
/// A door at which accepting fails, such as for lack of descriptors, is retried after this.
const RETRY: Duration = Duration::from_millis(200);
/// A door that could not be opened, such as because another program listens there, is
/// retried after this.
const REOPEN: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Why there are no doors.
#[derive(Debug, thiserror::Error)]
pub enum DoorsError {
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

/// An agent's doors.
///
/// Dropping them closes them and ends what is carried; its VMs stay here.
pub(crate) struct Doors {
    shared: Arc<Shared>,
    waiting: Option<JoinHandle<()>>,
    /// Opens doors that replace others' sockets.
    takeovers: Option<Takeovers>,
}

pub(super) struct Shared {
    carry: Carry,
    /// The new hosts, until the doors are changed to theirs.
    changed: Mutex<Option<Vec<PeerEntry>>>,
    /// Doors that replace others' sockets.
    pub(super) taken_over: Mutex<Vec<Arc<Post>>>,
    /// Where agents could not carry the last migration: the next one takes its manager's own path.
    /// KubeVirt tries again by itself, and would fail each time.
    pub(super) own_way: Mutex<HashSet<Target>>,
    admitted: Admitted,
    request: CarryRequest,
    pub(super) local: Local,
    pub(super) migrations: Arc<Migrations>,
    examiner: Arc<Examiner>,
    /// Wakes the thread that waits for connections.
    wake: Arc<OwnedFd>,
    closing: AtomicBool,
    /// Threads that accept connections now.
    accepting: AtomicUsize,
    /// Threads that have accepted connections since the agent's start.
    begun: AtomicU64,
    /// Those that are not carried, but passed on.
    bypasses: Bypasses,
    /// Each thread of a connection.
    served: Mutex<HashMap<u64, Served>>,
}

// Some doors that are full leave room for others.
const _: () = assert!(4 * SERVED_OF_ONE_MAX < SERVED_MAX);

struct Served {
    /// The connection, to end it. None while the thread waits for one.
    socket: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Doors {
    /// Opens the doors for all of `peers`; those that can't be opened are retried.
    pub(crate) fn open(
        carry: &Carry,
        peers: &[PeerEntry],
        local: Local,
        migrations: Arc<Migrations>,
        examiner: Arc<Examiner>,
    ) -> Result<Self, DoorsError> {
        let users = carry.qemu_users.iter().map(|name| user::numbers(name));
        let users = users.collect::<Result<Vec<_>, _>>()?;
        let qemu = users.first().copied();
        if carry.manager == Manager::Libvirt {
            make_directory(carry, qemu)?;
        }
        let posts = Posts::new(&local.agent, carry, peers, qemu);
        let request = CarryRequest {
            lanes: carry.lanes,
            downtime_ms: carry.downtime_ms,
            compress: carry.compress,
            audit: carry.audit,
            slowing: carry.slowing,
            sharing: carry.sharing.clone(),
            storage: FromStorage { read: carry.storage, ..FromStorage::default() },
            ..CarryRequest::default()
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| DoorsError::Local(errno.into()))?;
        let shared = Arc::new(Shared {
            carry: carry.clone(),
            changed: Mutex::default(),
            taken_over: Mutex::default(),
            own_way: Mutex::default(),
            admitted: Admitted { qemu: users.into_iter().map(|(uid, _)| uid).collect() },
            request,
            local,
            migrations,
            examiner,
            wake: Arc::new(wake),
            closing: AtomicBool::new(false),
            accepting: AtomicUsize::new(0),
            // A door that had no turn yet has 0.
            begun: AtomicU64::new(1),
            bypasses: Bypasses::default(),
            served: Mutex::default(),
        });
        let waiting = thread::Builder::new()
            .name("carry-doors".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.wait(posts)
            })
            .map_err(DoorsError::Local)?;
        let takeovers = match carry.manager {
            Manager::Libvirt => None,
            Manager::Kubevirt | Manager::Proxmox => {
                Some(Takeovers::follow(&shared).map_err(DoorsError::Local)?)
            }
        };
        Ok(Self { shared, waiting: Some(waiting), takeovers })
    }

    /// A handle that changes the doors when the hosts change.
    pub(crate) fn reopener(&self) -> Reopener {
        Reopener(Arc::clone(&self.shared))
    }

    /// Accepts no more connections: others' sockets are theirs again. What is carried goes on.
    pub(crate) fn stop_accepting(&mut self) {
        self.takeovers = None;
        self.shared.closing.store(true, SeqCst);
        self.shared.wake();
        if let Some(waiting) = self.waiting.take() {
            let _ = waiting.join();
        }
    }

    /// Waits for migrations that take their manager's own way through this agent, at most until
    /// `until`.
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

impl Drop for Doors {
    fn drop(&mut self) {
        self.close();
    }
}

/// Changes the doors when the hosts change.
pub(crate) struct Reopener(Arc<Shared>);

impl Reopener {
    /// Changes the doors to those for `peers`; what is carried goes on.
    pub(crate) fn reopen(&self, peers: &[PeerEntry]) {
        *self.0.changed.lock() = Some(peers.to_vec());
        self.0.wake();
    }
}

/// Creates the directory in which QEMUs create the sockets at which they wait.
fn make_directory(carry: &Carry, qemu: Option<(u32, u32)>) -> Result<(), DoorsError> {
    let directory = &carry.directory;
    let made = DirBuilder::new().recursive(true).mode(0o755).create(directory).and_then(|()| {
        match qemu {
            Some((uid, gid)) => std::os::unix::fs::chown(directory, Some(uid), Some(gid)),
            None => Ok(()),
        }?;
        fs::metadata(directory).map(drop)
    });
    made.map_err(|source| DoorsError::Directory { directory: directory.clone(), source })
}

impl Shared {
    /// Wakes the waiting thread so that it sees what has changed.
    pub(super) fn wake(&self) {
        posts::wake(&self.wake);
    }

    /// Waits for connections at all doors, until they are closed.
    fn wait(self: &Arc<Self>, mut posts: Posts) {
        while !self.closing.load(SeqCst) {
            if let Some(peers) = self.changed.lock().take() {
                posts.are_for(&self.carry, &peers);
            }
            let room = ACCEPTING_MAX.saturating_sub(self.accepting.load(SeqCst));
            let room = room.min(SERVED_MAX.saturating_sub(self.served.lock().len()));
            let mut ready = self.ready(&mut posts, room > 0);
            // Those whose last turn is longest ago come first.
            ready.sort_by_key(|post| post.turn.load(SeqCst));
            ready.iter().take(room).for_each(|post| self.accept(post));
        }
    }

    /// Waits until connections wait at doors that no thread accepts them from, and returns these
    /// doors; none if something else has changed. Without room for more threads, it waits only for
    /// that.
    fn ready(&self, posts: &mut Posts, has_room: bool) -> Vec<Arc<Post>> {
        let mut free = Vec::new();
        if has_room {
            let taken_over = self.taken_over.lock();
            let all = posts.open().iter().chain(&*taken_over);
            free.extend(all.filter(|post| post.is_free()).cloned());
        }
        let (next, free): (Vec<_>, Vec<_>) = free.into_iter().partition(|it| it.has_accepted());
        if !next.is_empty() {
            return next;
        }
        let fds = free.iter().map(|post| post.door.fd()).chain([self.wake.as_fd()]);
        let fds: Vec<_> = fds.collect();
        let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let limit = (!posts.all_open()).then_some(&REOPEN);
        match poll(&mut polled, limit) {
            Ok(0) => posts.open_missing(),
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
        free.into_iter().zip(ready).filter_map(|(post, ready)| ready.then_some(post)).collect()
    }

    /// Leaves a door to a thread that accepts a connection, until that has all connections of its
    /// migration.
    fn accept(self: &Arc<Self>, post: &Arc<Post>) {
        let number = self.begun.fetch_add(1, SeqCst);
        post.turn.store(number, SeqCst);
        let busy = post.occupy(&self.wake);
        post.served.fetch_add(1, SeqCst);
        let accepting = Accepting::one_more(self);
        // The thread waits for its entry.
        let mut served = self.served.lock();
        let spawned = thread::Builder::new().name(format!("carry-{number}")).spawn({
            let shared = Arc::clone(self);
            move || {
                let of_post = Arc::clone(&busy.served);
                let _serving = Serving { shared: Arc::clone(&shared), number, of_post };
                // Dropped before that: closing the doors waits for threads that serve.
                let post = busy;
                let caller = shared.next(&post, number);
                drop(accepting);
                if let Some(caller) = caller {
                    shared.serve(post, caller);
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
                post.served.fetch_sub(1, SeqCst);
            }
        }
    }

    /// The next connection of an admitted user, for thread `number`; none if none is waiting, or
    /// the doors are closed.
    fn next(&self, post: &Post, number: u64) -> Option<Caller> {
        let next = post.next(&self.admitted, &self.closing).and_then(|caller| {
            let kept = caller.as_ref().map(Caller::try_clone_connection).transpose()?;
            Ok(caller.zip(kept))
        });
        let (caller, kept) = match next {
            Ok(next) => next?,
            Err(error) => {
                tracing::warn!(listener = %post.door, %error, "cannot accept a connection");
                thread::sleep(RETRY);
                return None;
            }
        };
        let mut served = self.served.lock();
        let entry = served.get_mut(&number).filter(|_| !self.closing.load(SeqCst))?;
        entry.socket = Some(kept);
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
    of_post: Arc<AtomicUsize>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.of_post.fetch_sub(1, SeqCst);
        let served = self.shared.served.lock().remove(&self.number);
        drop(served);
        // There may be room again.
        self.shared.wake();
    }
}
