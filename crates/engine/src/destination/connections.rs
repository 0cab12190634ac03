//! Limits the number of connections of each kind, so that peers that send nothing, or request much,
//! use no more of the agent than that.

use std::collections::HashMap;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::Arc;

use identity::{Admission, AdmissionBounds, Admissions, LEAVING_MAX};
use parking_lot::Mutex;

use super::lanes::LANES_MAX;

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
pub(super) struct Place {
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
    pub(super) fn admit(self: &Arc<Self>, stream: &TcpStream, from: IpAddr) -> Option<Place> {
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
        Some(Place { connections: Arc::clone(self), number, from, admission: Some(admission) })
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

impl Place {
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

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.connections.state.lock();
        state.known.remove(&self.number);
        state.open.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const STRANGER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    fn stream() -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        TcpStream::connect(listener.local_addr().unwrap()).unwrap()
    }

    #[test]
    fn each_kind_has_its_limit_and_closed_ones_leave_room() {
        let (stream, connections) = (stream(), Connections::new([HOST]));
        let admit = || connections.admit(&stream, HOST).unwrap();
        let mut unknown: Vec<Place> = (0..UNKNOWN_OF_HOSTS.per_source).map(|_| admit()).collect();
        assert!(!unknown.iter().any(Place::gave_way));
        unknown.push(admit());
        assert!(unknown[0].gave_way() && !unknown[1].gave_way());
        unknown.truncate(UNKNOWN_OF_HOSTS.per_source / 2);
        let mut leading: Vec<Place> = Vec::new();
        for number in 0..LEADING.all {
            let mut place = admit();
            assert!(place.leads(Some(&format!("host-{number}"))));
            leading.push(place);
        }
        let mut one_more = admit();
        assert!(!one_more.leads(Some("one-more")));
        leading.pop();
        assert!(one_more.leads(Some("one-more")));
        drop((unknown, leading, one_more));
        assert_none(&connections);
    }

    #[test]
    fn no_peer_keeps_others_from_ordering() {
        let (stream, connections) = (stream(), Connections::new([HOST]));
        let admit = |from| connections.admit(&stream, from).unwrap();
        let order = |ordering: &mut Vec<Place>, from, host: Option<&str>| {
            let mut place = admit(from);
            let may = place.orders(host);
            if may {
                ordering.push(place);
            }
            may
        };
        let mut ordering: Vec<Place> = Vec::new();
        for _ in 0..ORDERING.of_peer {
            assert!(order(&mut ordering, HOST, Some("host-a")));
        }
        assert!(!order(&mut ordering, HOST, Some("host-a")));
        assert!(!order(&mut ordering, STRANGER, Some("host-a")), "wherever it comes from");
        assert!(order(&mut ordering, HOST, Some("host-b")), "whatever stands before it");
        ordering.pop();
        for _ in 0..ORDERING.of_peer {
            assert!(order(&mut ordering, HOST, None));
        }
        assert!(!order(&mut ordering, HOST, None));
        // All peers together are limited too.
        while ordering.len() < ORDERING.all {
            let name = format!("host-{}", ordering.len());
            assert!(order(&mut ordering, STRANGER, Some(&name)));
        }
        assert!(!order(&mut ordering, STRANGER, Some("host-b")));
        ordering.remove(0);
        assert!(order(&mut ordering, STRANGER, Some("host-b")));
        drop(ordering);
        assert_none(&connections);
    }

    #[test]
    fn no_peer_keeps_others_from_leading() {
        let (stream, connections) = (stream(), Connections::new([HOST]));
        let admit = |from| connections.admit(&stream, from).unwrap();
        let mut leading: Vec<Place> = Vec::new();
        for _ in 0..LEADING.of_peer {
            for host in [Some("host-a"), None] {
                let mut place = admit(HOST);
                assert!(place.leads(host));
                leading.push(place);
            }
        }
        assert!(!admit(STRANGER).leads(Some("host-a")), "wherever it comes from");
        assert!(!admit(HOST).leads(None));
        assert!(admit(STRANGER).leads(None) && admit(HOST).leads(Some("host-b")));
        // An order that is being followed, or a connection that is over, leaves its place.
        assert!(leading[0].arrives(Some("host-a")));
        assert!(admit(HOST).leads(Some("host-a")));
        drop(leading);
        assert_none(&connections);
    }

    #[test]
    fn hosts_can_connect_while_strangers_use_their_whole_share() {
        let (stream, connections) = (stream(), Connections::new([HOST]));
        let mut strangers: Vec<Place> = Vec::new();
        for last in 1..=99 {
            for _ in 0..99 {
                let place = connections.admit(&stream, [192, 0, 2, last].into());
                strangers.push(place.expect("others make room"));
                strangers.retain(|place| !place.gave_way());
            }
        }
        assert_eq!(strangers.len(), UNKNOWN_OF_STRANGERS.all);
        let admit = |from| connections.admit(&stream, from).unwrap();
        let mut lanes: Vec<Place> = (0..UNKNOWN_OF_HOSTS.per_source).map(|_| admit(HOST)).collect();
        assert!(!strangers.iter().chain(&lanes).any(Place::gave_way));
        assert!(lanes.iter_mut().all(|place| place.is_lane(Some("host-a"))));
        // A connection with a known purpose keeps no others out.
        lanes.extend((0..UNKNOWN_OF_HOSTS.per_source).map(|_| admit(HOST)));
        assert!(!lanes.iter().any(Place::gave_way));
        drop((strangers, lanes));
        assert_none(&connections);
    }

    #[test]
    fn an_address_that_has_identified_as_a_host_gets_a_hosts_share() {
        let (stream, connections) = (stream(), Connections::new([HOST]));
        connections.admit(&stream, STRANGER).unwrap().is_of_host();
        let admit = |_| connections.admit(&stream, STRANGER).unwrap();
        let lanes: Vec<Place> = (0..UNKNOWN_OF_HOSTS.per_source).map(admit).collect();
        assert!(!lanes.iter().any(Place::gave_way));
    }

    /// A host with as many lanes as it may have, which is more than it needs.
    #[test]
    fn no_peer_takes_all_of_anything() {
        let purposes = [Use::Leading, Use::Ordering, Use::Arriving, Use::Lane, Use::Serving];
        let host = |name: &str| Peer::Host(name.to_owned());
        for purpose in purposes {
            let mut state = State::default();
            for greedy in ["host-a", "host-b"] {
                while state.has_room(purpose, &host(greedy)) {
                    let number = state.known.len() as u64;
                    state.known.insert(number, (purpose, host(greedy)));
                }
            }
            assert_eq!(state.known.len(), 2 * purpose.bounds().of_peer);
            for other in purposes {
                assert!(state.has_room(other, &host("host-c")), "{purpose:?} {other:?}");
                let stranger = Peer::At(STRANGER);
                assert!(state.has_room(other, &stranger), "{purpose:?} {other:?}");
            }
        }
    }

    #[test]
    fn whatever_others_do_a_host_can_send_an_order_and_an_inquiry() {
        let (stream, connections) = (stream(), Connections::new([HOST]));
        let mut number = 1 << 32;
        for purpose in [Use::Leading, Use::Ordering, Use::Arriving, Use::Lane, Use::Serving] {
            for _ in 0..purpose.bounds().all {
                let peer = Peer::Host(format!("host-{number}"));
                connections.state.lock().known.insert(number, (purpose, peer));
                number += 1;
            }
        }
        // An inquiry is no more than that.
        let mut place = connections.admit(&stream, HOST).expect("it is admitted");
        assert!(!place.leads(None) && !place.is_lane(Some("host-a")));
        assert!(place.leads(Some("host-a")));
        assert!(!connections.admit(&stream, HOST).unwrap().leads(Some("host-a")), "one of each");
    }

    fn assert_none(connections: &Connections) {
        let state = connections.state.lock();
        assert_eq!((state.open.len(), state.known.len()), (0, 0));
    }
}
