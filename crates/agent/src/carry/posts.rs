//! The doors that an agent has for the hosts of its peers file.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use engine::Caller;
use parking_lot::Mutex;

use super::door::{Admitted, Door, Place};
use crate::config::{Carry, Manager, PeerEntry};

/// A door, kept while its host is in the peers file or a connection uses it.
pub(super) struct Post {
    pub(super) door: Door,
    /// A migration is accepting its connections at the door now.
    pub(super) busy: AtomicBool,
    /// A connection was relayed to its original target instead of carried, so those that
    /// belong to it are too.
    pub(super) goes_around: AtomicBool,
    /// A connection was carried from here, so a main connection has not gone past this door.
    pub(super) has_carried: AtomicBool,
    /// The last migration that came is passed on unchanged, so its multifd channels are too.
    pub(super) relays: AtomicBool,
    /// Those of its channels that were accepted before that was known: they come next.
    pub(super) accepted: Mutex<VecDeque<Caller>>,
}

/// The doors to open, and those that could be opened.
pub(super) struct Posts {
    /// The host and the place of each door.
    wanted: Vec<(String, Place)>,
    open: Vec<Arc<Post>>,
    /// The user that QEMUs run as.
    qemu: Option<(u32, u32)>,
}

impl Posts {
    /// Opens the doors for `peers`.
    pub(super) fn new(carry: &Carry, peers: &[PeerEntry], qemu: Option<(u32, u32)>) -> Self {
        let mut posts = Self { wanted: Vec::new(), open: Vec::new(), qemu };
        posts.are_for(carry, peers);
        posts
    }

    /// Changes the doors to those for `peers`, as far as they can be opened.
    pub(super) fn are_for(&mut self, carry: &Carry, peers: &[PeerEntry]) {
        self.wanted = places(carry, peers).collect();
        let Self { wanted, open, .. } = self;
        // Close first: another host may have these ports now.
        open.retain(|post| wanted.iter().any(|(peer, place)| post.door.is(peer, place)));
        self.open_each(|peer, place, error| {
            tracing::error!(
                peer,
                %place,
                %error,
                "cannot stand for a host: its migrations fail to connect here; tried again"
            );
        });
    }

    /// Retries the doors that could not be opened.
    pub(super) fn open_missing(&mut self) {
        self.open_each(|peer, place, error| tracing::debug!(peer, %place, %error, "not yet"));
    }

    pub(super) fn open(&self) -> &[Arc<Post>] {
        &self.open
    }

    pub(super) fn all_open(&self) -> bool {
        self.open.len() >= self.wanted.len()
    }

    fn open_each(&mut self, failed: impl Fn(&str, &Place, io::Error)) {
        let Self { wanted, open, qemu } = self;
        for (peer, place) in wanted {
            if open.iter().any(|post| post.door.is(peer, place)) {
                continue;
            }
            match Door::open(peer, place, *qemu) {
                Ok(door) => open.push(Arc::new(Post::at(door))),
                Err(error) => failed(peer, place, error),
            }
        }
    }
}

/// The places at which the agent stands for each host.
fn places<'p>(
    carry: &'p Carry,
    peers: &'p [PeerEntry],
) -> impl Iterator<Item = (String, Place)> + 'p {
    let peers = if carry.manager == Manager::Libvirt { peers } else { &[] };
    peers.iter().flat_map(|peer| {
        let ports = peer.carry_address.zip(peer.carry_ports);
        let ports = ports.into_iter().flat_map(|(address, [first, last])| {
            (first..=last).map(move |port| Place::Port(SocketAddr::new(address.into(), port)))
        });
        let paths = (1..=carry.sockets).map(|nth| {
            let name = match nth {
                1 => format!("{}.sock", peer.name),
                nth => format!("{}-{nth}.sock", peer.name),
            };
            Place::Path(carry.directory.join(name))
        });
        ports.chain(paths).map(|place| (peer.name.clone(), place))
    })
}

impl Post {
    pub(super) fn at(door: Door) -> Self {
        Self {
            door,
            busy: AtomicBool::new(false),
            goes_around: AtomicBool::new(false),
            has_carried: AtomicBool::new(false),
            relays: AtomicBool::new(false),
            accepted: Mutex::default(),
        }
    }

    /// The next connection; none if none is waiting.
    pub(super) fn next(&self, admitted: &Admitted) -> io::Result<Option<Caller>> {
        let accepted = self.accepted.lock().pop_front();
        match accepted {
            None => Ok(self.door.take(admitted)?.map(Caller::new)),
            accepted => Ok(accepted),
        }
    }

    /// Whether a connection waits that was accepted already.
    pub(super) fn has_accepted(&self) -> bool {
        !self.accepted.lock().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn one_that_another_program_has_does_not_keep_the_others_closed() {
        let dir = tempfile::tempdir().unwrap();
        let taken = TcpListener::bind("127.7.0.7:0").unwrap();
        let at = taken.local_addr().unwrap();
        let mut posts = Posts { wanted: Vec::new(), open: Vec::new(), qemu: None };
        posts.wanted.push(("b".to_owned(), Place::Port(at)));
        posts.wanted.push(("b".to_owned(), Place::Path(dir.path().join("b.sock"))));
        posts.open_missing();
        assert_eq!((posts.open().len(), posts.all_open()), (1, false));
        drop(taken);
        posts.open_missing();
        assert_eq!((posts.open().len(), posts.all_open()), (2, true));
    }
}
