//! Limits the number of connections of each kind, so that peers that send nothing, or request much,
//! use no more of the agent than that.

use std::collections::HashMap;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::Arc;

use identity::{Admission, AdmissionBounds, Admissions, LEAVING_MAX};
use parking_lot::Mutex;

use crate::resources::LANES_MAX;

/// Connections without a known purpose from addresses of known hosts. A connection is unknown
/// during its handshake, and an inquiry about a switchover to its end. All lanes of two migrations
/// may connect from one address at the same moment; lanes that have to give way to others try again
/// for seconds.
const UNKNOWN_OF_HOSTS: AdmissionBounds = AdmissionBounds { all: 256, per_source: 128 };
/// The same from all other addresses. A host is a stranger at an address that is not configured,
/// until it has identified itself from there.
const UNKNOWN_OF_STRANGERS: AdmissionBounds = AdmissionBounds { all: 64, per_source: 16 };
/// Connections of one purpose at a time.
struct Bounds {
    all: usize,
    /// Of one peer. Two of them don't keep the others out.
    of_peer: usize,
}

/// Before they get an arrival's resources: each keeps a few messages in memory. A gang moves fewer
/// VMs of a host at a time, and there are questions.
const LEADING: Bounds = Bounds { all: 64, of_peer: 24 };
/// Each lasts as long as one VM's migration, and keeps a thread. As many as a gang moves VMs of a
/// host at a time, and some for questions.
const ORDERING: Bounds = Bounds { all: 64, of_peer: 24 };
/// Each is a VM, and buffers bound them too. Those of one peer fit into the usual pool and leave
/// room for others, also if disks move.
const ARRIVING: Bounds = Bounds { all: 128, of_peer: 24 };
/// Of one peer, 64 for each VM of a gang, and 128 more that are about to replace others. All of them
/// have 6,144 descriptors, of the 32,768 that the unit allows.
const LANES: Bounds = Bounds { all: 3072, of_peer: 1152 };
/// Each keeps two threads at most. A host of the rack has one to the directory, and one for content.
const SERVING: Bounds = Bounds { all: 256, of_peer: 16 };

// One more VM moves while another is about to finish.
const _: () = assert!(ORDERING.of_peer > policy::gang::PARALLEL_MAX + 1);
const _: () = assert!(LEADING.of_peer > policy::gang::PARALLEL_MAX + 1);
const _: () = assert!(ARRIVING.of_peer > policy::gang::PARALLEL_MAX + 1);
const _: () = assert!(LANES.of_peer >= (policy::gang::PARALLEL_MAX + 2) * LANES_MAX);
const _: () = assert!(2 * ORDERING.of_peer < ORDERING.all && 2 * LEADING.of_peer < LEADING.all);
const _: () = assert!(2 * ARRIVING.of_peer < ARRIVING.all && 2 * LANES.of_peer < LANES.all);
const _: () = assert!(2 * SERVING.of_peer < SERVING.all);

// Each connection has two descriptors, its own and the one by which it is ended. With the 192 of
// the API's port, unknown connections leave 100 for the agent itself if no more than 1024 files may
// be open.
const _: () = assert!(
    2 * (UNKNOWN_OF_HOSTS.all + UNKNOWN_OF_STRANGERS.all + 2 * LEAVING_MAX) + 192 < 1024 - 100
);

/// The connections of an agent.
#[derive(Debug)]
pub(super) struct Connections {
    unknown: Arc<Admissions<Arc<TcpStream>>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    open: HashMap<u64, Arc<TcpStream>>,
    taken_in: u64,
    /// Those whose purpose is known, by their numbers.
    known: HashMap<u64, (Use, Peer)>,
}

/// The other end of a connection.
#[derive(Debug, PartialEq, Eq)]
enum Peer {
    /// The host that its certificate names.
    Host(String),
    /// A peer without a certificate.
    At(IpAddr),
}

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Leading,
    Ordering,
    Arriving,
    Lane,
    Serving,
}

/// A connection's place among the others, until it is dropped.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    connections: Arc<Connections>,
    number: u64,
    from: IpAddr,
    /// Present while its purpose is unknown.
    admission: Option<Admission<Arc<TcpStream>>>,
}

impl Connections {
    /// Without connections. `hosts` are the known addresses of hosts.
    pub(super) fn new(hosts: impl IntoIterator<Item = IpAddr>) -> Arc<Self> {
        let unknown = Admissions::new(hosts, UNKNOWN_OF_HOSTS, UNKNOWN_OF_STRANGERS);
        Arc::new(Self { unknown, state: Mutex::default() })
    }

    /// Replaces the known addresses of hosts.
    pub(super) fn know_hosts(&self, hosts: impl IntoIterator<Item = IpAddr>) {
        self.unknown.know(hosts);
    }

    /// Admits a connection from this address, if permitted. Another one may be broken off for it.
    pub(super) fn admit(
        self: &Arc<Self>,
        stream: &TcpStream,
        from: IpAddr,
    ) -> Option<ConnectionSlot> {
        let mut state = self.state.lock();
        let stream = Arc::new(stream.try_clone().ok()?);
        let (admission, gives_way) = self.unknown.admit(from, Arc::clone(&stream))?;
        if let Some(other) = gives_way {
            // It may be closed already.
            let _ = other.shutdown(Shutdown::Both);
        }
        let number = state.taken_in;
        state.open.insert(number, stream);
        state.taken_in += 1;
        let (connections, admission) = (Arc::clone(self), Some(admission));
        Some(ConnectionSlot { connections, number, from, admission })
    }

    /// Breaks off connections of a rack with hosts that are not listed.
    pub(super) fn end_unlisted(&self, is_listed: &dyn Fn(&str) -> bool) {
        let state = self.state.lock();
        for (number, (purpose, peer)) in &state.known {
            let Peer::Host(host) = peer else { continue };
            if *purpose == Use::Serving
                && !is_listed(host)
                && let Some(stream) = state.open.get(number)
            {
                // It may be closed already.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Breaks off all connections.
    pub(super) fn end_all(&self) {
        for stream in self.state.lock().open.values() {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Use {
    fn bounds(self) -> Bounds {
        match self {
            Self::Leading => LEADING,
            Self::Ordering => ORDERING,
            Self::Arriving => ARRIVING,
            Self::Lane => LANES,
            Self::Serving => SERVING,
        }
    }
}

impl State {
    /// Whether one more connection of that peer may have that purpose.
    fn has_room(&self, purpose: Use, peer: &Peer) -> bool {
        let Bounds { all, of_peer } = purpose.bounds();
        let same = || self.known.values().filter(|(other, _)| *other == purpose);
        let of_this = same().filter(|(_, other)| other == peer).count();
        // Whatever other hosts do, each can send one order.
        let is_first = purpose == Use::Leading && of_this == 0 && matches!(peer, Peer::Host(_));
        is_first || of_this < of_peer && same().count() < all
    }
}

impl ConnectionSlot {
    /// The connection will send an order or a question, in the name of the host in its certificate,
    /// if it has one. False if there are too many in all, or too many of that peer; so it is with
    /// each purpose.
    pub(super) fn leads(&mut self, host: Option<&str>) -> bool {
        self.has_purpose(Use::Leading, host)
    }

    /// The connection will order moves of VMs.
    pub(super) fn orders(&mut self, host: Option<&str>) -> bool {
        self.has_purpose(Use::Ordering, host)
    }

    /// A VM arrives by the connection.
    pub(super) fn arrives(&mut self, host: Option<&str>) -> bool {
        self.has_purpose(Use::Arriving, host)
    }

    /// The connection is a lane of a VM that arrives.
    pub(super) fn is_lane(&mut self, host: Option<&str>) -> bool {
        self.has_purpose(Use::Lane, host)
    }

    /// The connection serves a host of the rack.
    pub(super) fn serves(&mut self, host: Option<&str>) -> bool {
        self.has_purpose(Use::Serving, host)
    }

    fn has_purpose(&mut self, purpose: Use, host: Option<&str>) -> bool {
        let peer = match host {
            Some(host) => Peer::Host(host.to_owned()),
            None => Peer::At(self.from.to_canonical()),
        };
        let mut state = self.connections.state.lock();
        if !state.has_room(purpose, &peer) {
            return false;
        }
        state.known.insert(self.number, (purpose, peer));
        drop(state);
        self.admission = None;
        true
    }

    /// The peer is a host: its address is known as one from now on.
    pub(super) fn is_of_host(&self) {
        self.connections.unknown.remember(self.from);
    }

    /// Whether it was broken off to make room for another connection.
    pub(super) fn gave_way(&self) -> bool {
        self.admission.as_ref().is_some_and(Admission::gave_way)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut state = self.connections.state.lock();
        state.known.remove(&self.number);
        state.open.remove(&self.number);
    }
}

#[cfg(test)]
mod tests;
