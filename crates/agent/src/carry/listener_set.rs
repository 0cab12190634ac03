//! The listeners that an agent has for the hosts of its peers file.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};

use engine::Caller;
use parking_lot::Mutex;

use super::listener::{Address, Admitted, Listener};
use crate::config::{Carry, Manager, PeerEntry};

/// Connections of one listener that are served at a time. The others wait in the kernel: a VM that
/// has broken out of its QEMU leaves threads for those at other listeners. More than the other host
/// accepts, and than may be relayed.
pub(super) const SERVED_OF_ONE_MAX: usize = 96;

/// A listener and its use, kept while its host is in the peers file or a connection uses it.
pub(super) struct Entry {
    pub(super) listener: Listener,
    /// A thread is accepting connections at the listener now: one of a migration, all of its own.
    pub(super) busy: AtomicBool,
    /// Threads that serve connections of it, also when it is no longer kept.
    pub(super) served: Arc<AtomicUsize>,
    /// Which one that was of all such threads, from the agent's start on.
    pub(super) turn: AtomicU64,
    /// A connection was relayed to its original target instead of carried, so those that
    /// belong to it are too.
    pub(super) is_bypassed: AtomicBool,
    /// A connection was carried from here, so a main connection has not gone past this listener.
    pub(super) has_carried: AtomicBool,
    /// The last migration that came is passed on unchanged, so its multifd channels are too.
    pub(super) relays: AtomicBool,
    /// Those of its channels that were accepted before that was known: they come next.
    pub(super) accepted: Mutex<VecDeque<Caller>>,
}

/// An entry at whose listener one thread accepts connections, until this is dropped, even by a
/// panic. Then the next connection may come, and the listener be closed if its host has left.
pub(super) struct BusyEntry {
    entry: Arc<Entry>,
    /// Wakes the thread that waits for connections.
    wake: Arc<OwnedFd>,
}

/// The listeners to open, and those that could be opened.
pub(super) struct ListenerSet {
    /// The host and the address of each listener.
    expected: Vec<(String, Address)>,
    open: Vec<Arc<Entry>>,
    /// This host.
    own: String,
    /// The user that QEMUs run as.
    qemu: Option<(u32, u32)>,
}

impl ListenerSet {
    /// Opens the listeners of the host `own` for `peers`.
    pub(super) fn new(
        own: &str,
        carry: &Carry,
        peers: &[PeerEntry],
        qemu: Option<(u32, u32)>,
    ) -> Self {
        let (expected, open) = (Vec::new(), Vec::new());
        let mut listeners = Self { expected, open, own: own.to_owned(), qemu };
        listeners.are_for(carry, peers);
        listeners
    }

    /// Changes the listeners to those for `peers`, as far as they can be opened.
    pub(super) fn are_for(&mut self, carry: &Carry, peers: &[PeerEntry]) {
        self.expected = addresses(carry, peers).collect();
        let own = sockets(carry, &self.own).map(|path| (self.own.clone(), Address::Path(path)));
        for (address, hosts) in take_shared(&mut self.expected, own) {
            tracing::error!(
                listener = address,
                hosts = hosts.join(", "),
                "several hosts map to this socket, so the agent does not listen there, and \
                 migrations to it fail to connect: set `sockets` under [carry] to 1, or rename a \
                 host"
            );
        }
        let Self { expected, open, .. } = self;
        // Close first: another host may have these ports now.
        open.retain(|entry| {
            expected.iter().any(|(peer, address)| entry.listener.is(peer, address))
        });
        self.open_each(|peer, address, error| {
            tracing::error!(
                peer,
                listener = %address,
                %error,
                "cannot listen for a host: migrations to it fail to connect here; retrying"
            );
        });
    }

    /// Retries the listeners that could not be opened.
    pub(super) fn open_missing(&mut self) {
        self.open_each(|peer, at, error| tracing::debug!(peer, %at, %error, "not listening yet"));
    }

    pub(super) fn open(&self) -> &[Arc<Entry>] {
        &self.open
    }

    pub(super) fn all_open(&self) -> bool {
        self.open.len() >= self.expected.len()
    }

    fn open_each(&mut self, failed: impl Fn(&str, &Address, io::Error)) {
        let Self { expected, open, qemu, .. } = self;
        for (peer, address) in expected {
            if open.iter().any(|entry| entry.listener.is(peer, address)) {
                continue;
            }
            match Listener::open(peer, address, *qemu) {
                Ok(listener) => open.push(Arc::new(Entry::at(listener))),
                Err(error) => failed(peer, address, error),
            }
        }
    }
}

/// The addresses at which the agent stands for each host.
fn addresses<'p>(
    carry: &'p Carry,
    peers: &'p [PeerEntry],
) -> impl Iterator<Item = (String, Address)> + 'p {
    let peers = if carry.manager == Manager::Libvirt { peers } else { &[] };
    peers.iter().flat_map(|peer| {
        let ports = peer.carry_address.zip(peer.carry_ports);
        let ports = ports.into_iter().flat_map(|(address, [first, last])| {
            (first..=last).map(move |port| Address::Port(SocketAddr::new(address.into(), port)))
        });
        let paths = sockets(carry, &peer.name).map(Address::Path);
        ports.chain(paths).map(|address| (peer.name.clone(), address))
    })
}

/// The sockets at which agents stand for a host, and at which its QEMUs wait.
fn sockets<'c>(carry: &'c Carry, host: &'c str) -> impl Iterator<Item = PathBuf> + 'c {
    (1..=carry.sockets).map(move |nth| {
        carry.directory.join(match nth {
            1 => format!("{host}.sock"),
            nth => format!("{host}-{nth}.sock"),
        })
    })
}

/// Takes out the addresses that are of several hosts, such as the second socket of `node` and the
/// first of `node-2`: a VM must not go to the wrong one. Returns them, with their hosts.
fn take_shared(
    expected: &mut Vec<(String, Address)>,
    own: impl Iterator<Item = (String, Address)>,
) -> BTreeMap<String, Vec<String>> {
    let mut hosts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (host, address) in expected.iter().cloned().chain(own) {
        hosts.entry(address.to_string()).or_default().push(host);
    }
    hosts.retain(|_, hosts| hosts.len() > 1);
    expected.retain(|(_, address)| !hosts.contains_key(&address.to_string()));
    hosts
}

impl Entry {
    pub(super) fn at(listener: Listener) -> Self {
        Self {
            listener,
            busy: AtomicBool::new(false),
            served: Arc::default(),
            turn: AtomicU64::new(0),
            is_bypassed: AtomicBool::new(false),
            has_carried: AtomicBool::new(false),
            relays: AtomicBool::new(false),
            accepted: Mutex::default(),
        }
    }

    /// The next connection; none if none is waiting, or once `closing` is set.
    pub(super) fn next(
        &self,
        admitted: &Admitted,
        closing: &AtomicBool,
    ) -> io::Result<Option<Caller>> {
        let accepted = self.accepted.lock().pop_front();
        match accepted {
            None => Ok(self.listener.take(admitted, closing)?.map(Caller::new)),
            accepted => Ok(accepted),
        }
    }

    /// Leaves it to one thread.
    pub(super) fn occupy(self: &Arc<Self>, wake: &Arc<OwnedFd>) -> BusyEntry {
        self.busy.store(true, SeqCst);
        BusyEntry { entry: Arc::clone(self), wake: Arc::clone(wake) }
    }

    /// Whether a thread may accept connections at it: none does, and there are not too many.
    pub(super) fn is_free(&self) -> bool {
        !self.busy.load(SeqCst) && self.served.load(SeqCst) < SERVED_OF_ONE_MAX
    }

    /// Whether a connection waits that was accepted already.
    pub(super) fn has_accepted(&self) -> bool {
        !self.accepted.lock().is_empty()
    }
}

impl Deref for BusyEntry {
    type Target = Entry;

    fn deref(&self) -> &Entry {
        &self.entry
    }
}

impl Drop for BusyEntry {
    fn drop(&mut self) {
        self.entry.busy.store(false, SeqCst);
        wake(&self.wake);
    }
}

/// Wakes the thread that waits for connections so that it sees what has changed.
pub(super) fn wake(wake: &OwnedFd) {
    // The write fails only if the counter is full, and then the thread wakes as well.
    let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn an_address_that_another_program_has_does_not_keep_the_others_closed() {
        let dir = tempfile::tempdir().unwrap();
        let taken = TcpListener::bind("127.7.0.7:0").unwrap();
        let at = taken.local_addr().unwrap();
        let (expected, open) = (Vec::new(), Vec::new());
        let mut listeners = ListenerSet { expected, open, own: "a".to_owned(), qemu: None };
        listeners.expected.push(("b".to_owned(), Address::Port(at)));
        listeners.expected.push(("b".to_owned(), Address::Path(dir.path().join("b.sock"))));
        listeners.open_missing();
        assert_eq!((listeners.open().len(), listeners.all_open()), (1, false));
        drop(taken);
        listeners.open_missing();
        assert_eq!((listeners.open().len(), listeners.all_open()), (2, true));
    }

    #[test]
    fn a_listener_has_so_many_connections_and_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let address = Address::Path(dir.path().join("b.sock"));
        let entry = Entry::at(Listener::open("b", &address, None).unwrap());
        let served = Arc::clone(&entry.served);
        let accepted = (0..2 * SERVED_OF_ONE_MAX).filter(|_| {
            let is_free = entry.is_free();
            served.fetch_add(usize::from(is_free), SeqCst);
            is_free
        });
        assert_eq!(accepted.count(), SERVED_OF_ONE_MAX);
        served.fetch_sub(1, SeqCst);
        assert!(entry.is_free());
    }

    #[test]
    fn a_thread_that_panics_leaves_its_listener_to_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let address = Address::Path(dir.path().join("b.sock"));
        let entry = Arc::new(Entry::at(Listener::open("b", &address, None).unwrap()));
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let busy = entry.occupy(&wake);
        assert!(!entry.is_free());
        let panicked = thread::spawn(move || assert!(busy.is_free(), "a fault, for a test"));
        assert!(panicked.join().is_err());
        assert!(entry.is_free());
        assert_eq!(rustix::io::read(&wake, &mut [0; 8]), Ok(8), "the waiting thread is woken");
    }

    #[test]
    fn a_socket_that_would_be_of_two_hosts_is_none_s() {
        let path = |host: &str, name: &str| (host.to_owned(), Address::Path(name.into()));
        let own = || [path("own", "own.sock"), path("own", "own-2.sock")].into_iter();
        let mut expected = vec![
            path("node", "node.sock"),
            path("node", "node-2.sock"),
            path("node-2", "node-2.sock"),
            path("node-2", "node-2-2.sock"),
            path("own-2", "own-2.sock"),
            path("own-2", "own-2-2.sock"),
        ];
        let shared = take_shared(&mut expected, own());
        let left: Vec<String> = expected.iter().map(|(_, address)| address.to_string()).collect();
        assert_eq!(left, ["node.sock", "node-2-2.sock", "own-2-2.sock"]);
        let shared: Vec<_> = shared.into_iter().collect();
        let of =
            |address: &str, hosts: [&str; 2]| (address.to_owned(), hosts.map(str::to_owned).into());
        assert_eq!(
            shared,
            [of("node-2.sock", ["node", "node-2"]), of("own-2.sock", ["own-2", "own"])]
        );
    }
}
