//! All doors of an agent: one thread waits for connections to any of them, and each
//! connection has a thread of its own.

use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use engine::{Caller, Carried, CarryRequest, Content, Local, Opening, Peer};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::door::{Admitted, Door};
use crate::config::{Carry, PeerEntry};
use crate::migrations::Migrations;
use crate::user::{self, UserError};

/// A door that fails, for want of descriptors perhaps, is asked again after this.
const RETRY: Duration = Duration::from_millis(200);

/// Why there are no doors.
#[derive(Debug, thiserror::Error)]
pub enum DoorsError {
    /// Who may connect can't be known.
    #[error(transparent)]
    User(#[from] UserError),
    /// A door can't be opened.
    #[error("standing for {peer} at {place}: {source}")]
    Door {
        /// For whom.
        peer: String,
        /// Where.
        place: String,
        /// Why not.
        source: io::Error,
    },
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
}

struct Shared {
    doors: Vec<Door>,
    /// Of each door, whether a migration takes its own connections at it now.
    busy: Vec<AtomicBool>,
    admitted: Admitted,
    request: CarryRequest,
    local: Local,
    migrations: Arc<Migrations>,
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
    /// Opens them, for all of `peers`.
    pub(crate) fn open(
        carry: &Carry,
        peers: &[PeerEntry],
        local: Local,
        migrations: Arc<Migrations>,
    ) -> Result<Self, DoorsError> {
        let qemu = carry.qemu_user.as_deref().map(user::numbers).transpose()?;
        let doors = open(carry, peers, qemu)?;
        let request = CarryRequest {
            lanes: carry.lanes,
            downtime_ms: carry.downtime_ms,
            compress: carry.compress,
            audit: carry.audit,
            slowing: carry.slowing,
            ..CarryRequest::default()
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| DoorsError::Local(errno.into()))?;
        let shared = Arc::new(Shared {
            busy: doors.iter().map(|_| AtomicBool::new(false)).collect(),
            doors,
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
                move || shared.wait()
            })
            .map_err(DoorsError::Local)?;
        Ok(Self { shared, waiting: Some(waiting) })
    }

    /// Takes no more, and ends what is carried.
    pub(crate) fn close(&mut self) {
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

fn open(
    carry: &Carry,
    peers: &[PeerEntry],
    qemu: Option<(u32, u32)>,
) -> Result<Vec<Door>, DoorsError> {
    make_directory(carry, qemu)?;
    let mut doors = Vec::new();
    for peer in peers {
        let failed = |place: String| {
            let peer = peer.name.clone();
            move |source| DoorsError::Door { peer, place, source }
        };
        let places = peer.carry_address.zip(peer.carry_ports);
        let places = places.into_iter().flat_map(|(address, [first, last])| {
            (first..=last).map(move |port| SocketAddr::new(address.into(), port))
        });
        for address in places {
            doors.push(Door::at_port(&peer.name, address).map_err(failed(address.to_string()))?);
        }
        for nth in 1..=carry.sockets {
            let name = match nth {
                1 => format!("{}.sock", peer.name),
                nth => format!("{}-{nth}.sock", peer.name),
            };
            let path = carry.directory.join(name);
            let door = Door::at_path(&peer.name, &path, qemu);
            doors.push(door.map_err(failed(path.display().to_string()))?);
        }
    }
    Ok(doors)
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
    fn wake(&self) {
        // Only a counter that is full is not written to, and wakes as well.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Waits for connections to any door, until the end.
    fn wait(self: &Arc<Self>) {
        while !self.closing.load(SeqCst) {
            let is_free = |nth: &usize| !self.busy[*nth].load(SeqCst);
            let free: Vec<usize> = (0..self.doors.len()).filter(is_free).collect();
            let fds = free.iter().map(|nth| self.doors[*nth].fd()).chain([self.wake.as_fd()]);
            let fds: Vec<_> = fds.collect();
            let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            if poll(&mut polled, None).is_err() {
                continue;
            }
            let ready: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.wake, &mut count);
            for (nth, _) in free.into_iter().zip(ready).filter(|(_, ready)| *ready) {
                self.take(nth);
            }
        }
    }

    /// Takes a connection, and leaves the door to its thread until it has all that
    /// belong to it.
    fn take(self: &Arc<Self>, nth: usize) {
        let door = &self.doors[nth];
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
        self.busy[nth].store(true, SeqCst);
        let number = self.begun.fetch_add(1, SeqCst);
        let mut served = self.served.lock();
        let spawned = thread::Builder::new().name(format!("carry-{number}")).spawn({
            let shared = Arc::clone(self);
            move || {
                shared.serve(nth, socket);
                shared.free(nth);
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
                self.free(nth);
            }
        }
    }

    fn free(&self, nth: usize) {
        if self.busy[nth].swap(false, SeqCst) {
            self.wake();
        }
    }

    /// Serves a connection to its end.
    fn serve(&self, nth: usize, socket: UnixStream) {
        let door = &self.doors[nth];
        let caller = Caller::new(socket);
        let carried = self.peer(&door.peer).and_then(|peer| {
            let id = self.migrations.new_id().map_err(|denied| denied.to_string())?;
            let target = (id.as_str(), door.target());
            let opening = Opening::new(&self.local, &peer, target, self.request.clone(), caller);
            let opening = opening.map_err(|error| error.to_string())?;
            let vm = opening.vm().or(opening.uuid()).unwrap_or("unnamed").to_owned();
            let uuid = opening.uuid().map(str::to_owned);
            let content = opening.begin(&mut || door.take(self.admitted));
            Ok((id, vm, uuid, content.map_err(|error| error.to_string())?))
        });
        // It has all that belongs to it.
        self.free(nth);
        match carried {
            Err(error) => tracing::warn!(%door, host = door.peer, error, "not carried"),
            Ok((_, vm, _, Content::Other(relay))) => {
                tracing::info!(vm, %door, host = door.peer, "a disk is carried");
                if let Err(error) = relay.run() {
                    tracing::warn!(vm, %door, %error, "a disk's connection broke off");
                }
            }
            Ok((id, vm, uuid, Content::Stream(carried))) => {
                self.run((&id, &vm, uuid), &door.peer, carried);
            }
        }
    }

    fn run(&self, (id, vm, uuid): (&str, &str, Option<String>), to: &str, carried: Carried) {
        tracing::info!(vm, uuid, to, migration = id, "carrying");
        let run = |watch: &_| carried.run(&self.request, watch);
        self.migrations.carry((id, vm, to), self.request.bounds.clone(), run);
    }

    fn peer(&self, name: &str) -> Result<Peer, String> {
        self.migrations.peer(name).map_err(|denied| denied.to_string())
    }
}
