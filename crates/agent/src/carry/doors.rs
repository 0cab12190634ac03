//! All doors of an agent: one thread waits for connections to any of them, and each
//! connection has a thread of its own.

use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use api::FromStorage;
use engine::{Caller, Carried, CarryRequest, Content, Local, Opening};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use takeover::Replaced;

use super::around;
use super::door::{Admitted, Door};
use super::posts::{Post, Posts};
use super::takeovers::Takeovers;
use crate::config::{Carry, Manager, PeerEntry};
use crate::migrations::{Migrations, What};
use crate::user::{self, UserError};

/// A door that fails, for want of descriptors perhaps, is asked again after this.
const RETRY: Duration = Duration::from_millis(200);
/// One that could not be opened, for another program that listens there perhaps, is tried
/// again after this.
const REOPEN: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Why there are no doors.
#[derive(Debug, thiserror::Error)]
pub enum DoorsError {
    /// Who may connect can't be known.
    #[error(transparent)]
    User(#[from] UserError),
    /// The directory of sockets can't be made.
    #[error("the directory of [carry], {}: {source}", directory.display())]
    Directory {
        /// Which.
        directory: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Something else of this host.
    #[error("waiting for migrations to be carried: {0}")]
    Local(io::Error),
}

/// An agent's doors. Dropped, they close, and what is carried ends with its VMs here.
pub(crate) struct Doors {
    shared: Arc<Shared>,
    waiting: Option<JoinHandle<()>>,
    /// Opens doors in the place of others' sockets.
    takeovers: Option<Takeovers>,
}

pub(super) struct Shared {
    carry: Carry,
    /// The hosts that there are now, until doors are those for them.
    changed: Mutex<Option<Vec<PeerEntry>>>,
    /// Doors in the place of others' sockets.
    pub(super) taken_over: Mutex<Vec<Arc<Post>>>,
    admitted: Admitted,
    request: CarryRequest,
    pub(super) local: Local,
    pub(super) migrations: Arc<Migrations>,
    /// Wakes the thread that waits.
    wake: OwnedFd,
    closing: AtomicBool,
    begun: AtomicU64,
    /// Each connection that is served, to be ended, and its thread.
    served: Mutex<HashMap<u64, Served>>,
}

struct Served {
    socket: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Doors {
    /// Opens them, for all of `peers`. Those that can't be opened are tried again.
    pub(crate) fn open(
        carry: &Carry,
        peers: &[PeerEntry],
        local: Local,
        migrations: Arc<Migrations>,
    ) -> Result<Self, DoorsError> {
        let qemu = carry.qemu_user.as_deref().map(user::numbers).transpose()?;
        if carry.manager == Manager::Libvirt {
            make_directory(carry, qemu)?;
        }
        let posts = Posts::new(carry, peers, qemu);
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
            admitted: Admitted { qemu: qemu.map(|(uid, _)| uid) },
            request,
            local,
            migrations,
            wake,
            closing: AtomicBool::new(false),
            begun: AtomicU64::new(0),
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

    /// What opens and closes them as hosts come and leave.
    pub(crate) fn reopener(&self) -> Reopener {
        Reopener(Arc::clone(&self.shared))
    }

    /// Takes no more, and ends what is carried.
    pub(crate) fn close(&mut self) {
        self.takeovers = None;
        self.shared.closing.store(true, SeqCst);
        self.shared.wake();
        if let Some(waiting) = self.waiting.take() {
            let _ = waiting.join();
        }
        let threads: Vec<_> = {
            let mut served = self.shared.served.lock();
            served
                .values_mut()
                .filter_map(|one| {
                    // It may have ended.
                    let _ = one.socket.shutdown(std::net::Shutdown::Both);
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

/// Opens and closes doors as hosts come and leave.
pub(crate) struct Reopener(Arc<Shared>);

impl Reopener {
    /// From now on there are those for these hosts. What is carried goes on.
    pub(crate) fn reopen(&self, peers: &[PeerEntry]) {
        *self.0.changed.lock() = Some(peers.to_vec());
        self.0.wake();
    }
}

/// QEMUs wait at sockets in it, and make them.
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
    /// Has the thread that waits look for what has changed.
    pub(super) fn wake(&self) {
        // Only a counter that is full is not written to, and wakes as well.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Waits for connections to any door, until the end.
    fn wait(self: &Arc<Self>, mut posts: Posts) {
        while !self.closing.load(SeqCst) {
            if let Some(peers) = self.changed.lock().take() {
                posts.are_for(&self.carry, &peers);
            }
            let is_free = |post: &&Arc<Post>| !post.busy.load(SeqCst);
            let taken_over = self.taken_over.lock().clone();
            let all = posts.open().iter().chain(&taken_over);
            let free: Vec<_> = all.filter(is_free).cloned().collect();
            drop(taken_over);
            let fds = free.iter().map(|post| post.door.fd()).chain([self.wake.as_fd()]);
            let fds: Vec<_> = fds.collect();
            let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            let limit = (!posts.all_open()).then_some(&REOPEN);
            match poll(&mut polled, limit) {
                Ok(0) => posts.open_missing(),
                Ok(_) => {}
                Err(_) => continue,
            }
            let ready: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.wake, &mut count);
            drop(fds);
            for (post, _) in free.into_iter().zip(ready).filter(|(_, ready)| *ready) {
                self.take(&post);
            }
        }
    }

    /// Takes a connection, and leaves the door to its thread until it has all that
    /// belong to it.
    fn take(self: &Arc<Self>, post: &Arc<Post>) {
        let door = &post.door;
        let socket = match door.take(self.admitted) {
            Ok(Some(socket)) => socket,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%door, %error, "cannot take a connection");
                thread::sleep(RETRY);
                return;
            }
        };
        let Ok(kept) = socket.try_clone() else { return };
        post.busy.store(true, SeqCst);
        let number = self.begun.fetch_add(1, SeqCst);
        let mut served = self.served.lock();
        let spawned = thread::Builder::new().name(format!("carry-{number}")).spawn({
            let (shared, post) = (Arc::clone(self), Arc::clone(post));
            move || {
                shared.serve(post, socket);
                shared.served.lock().remove(&number);
            }
        });
        match spawned {
            Ok(thread) => {
                served.insert(number, Served { socket: kept, thread: Some(thread) });
            }
            Err(error) => {
                drop(served);
                tracing::warn!(%error, "no thread for a connection; turned away");
                self.free(post);
            }
        }
    }

    fn free(&self, post: &Post) {
        if post.busy.swap(false, SeqCst) {
            self.wake();
        }
    }

    /// Serves a connection to its end.
    fn serve(&self, post: Arc<Post>, socket: UnixStream) {
        let door = &post.door;
        let (at, host) = (door.to_string(), door.peer.clone());
        if post.goes_around.load(SeqCst) {
            return self.go_around(post, &socket, "those before it do");
        }
        let opened = match self.open_way(door, Caller::new(socket)) {
            Err(refused) if door.replaces().is_some() => {
                let (why, caller) = *refused;
                post.goes_around.store(true, SeqCst);
                return self.go_around(post, &caller.into_connection(), &why);
            }
            Err(refused) => Err(refused.0),
            Ok(opened) => Ok(opened),
        };
        let carried = opened.and_then(|(id, opening)| {
            let vm = opening.vm().or(opening.uuid()).unwrap_or("unnamed").to_owned();
            let uuid = opening.uuid().map(str::to_owned);
            let content = opening.begin(&mut || door.take(self.admitted));
            Ok((id, vm, uuid, content.map_err(|error| error.to_string())?))
        });
        // It has all that belongs to it.
        self.free(&post);
        drop(post);
        match carried {
            Err(error) => tracing::warn!(door = at, host, error, "not carried"),
            Ok((id, vm, _, Content::Other(relay))) => {
                let _in = data_threads::migration_span(&id, &vm).entered();
                tracing::info!(door = at, host, "a disk is carried");
                let run = |watch: &_| relay.carry(&self.request, watch);
                let shown = format!("{vm} (disk)");
                let bounds = self.request.bounds.clone();
                self.migrations.carry((&id, &shown, &host), bounds, What::Disk, run);
            }
            Ok((id, vm, uuid, Content::Stream(carried))) => {
                let _in = data_threads::migration_span(&id, &vm).entered();
                self.run((&id, &vm, uuid), &host, carried);
            }
        }
    }

    /// Has the other host's agent connect to what waits there. If it can't: why, and who
    /// called, who can still go another way.
    fn open_way(
        &self,
        door: &Door,
        caller: Caller,
    ) -> Result<(String, Opening), Box<(String, Caller)>> {
        let denied = |denied: crate::denied::Denied| denied.to_string();
        let known = self.migrations.peer(&door.peer).map_err(denied);
        let known = known.and_then(|peer| Ok((peer, self.migrations.new_id().map_err(denied)?)));
        let (peer, id) = match known {
            Ok(known) => known,
            Err(why) => return Err(Box::new((why, caller))),
        };
        let target = (id.as_str(), door.target());
        match Opening::new(&self.local, &peer, target, self.request.clone(), caller) {
            Ok(opening) => Ok((id, opening)),
            Err(refused) => {
                let (error, caller) = *refused;
                Err(Box::new((error.to_string(), caller)))
            }
        }
    }

    /// As if there were no agent.
    fn go_around(&self, post: Arc<Post>, socket: &UnixStream, why: &str) {
        let (door, way) = (post.door.to_string(), post.door.replaces().map(Replaced::go_around));
        self.free(&post);
        drop(post);
        let Some(way) = way else { return };
        tracing::info!(door, why, "not carried, but passed on");
        if let Err(error) = way.and_then(|way| around::pass(socket, &way)) {
            tracing::warn!(door, %error, "passed on");
        }
    }

    fn run(&self, (id, vm, uuid): (&str, &str, Option<String>), to: &str, carried: Carried) {
        tracing::info!(uuid, to, "carrying");
        let run = |watch: &_| carried.run(&self.request, watch);
        self.migrations.carry((id, vm, to), self.request.bounds.clone(), What::Migration, run);
    }
}
