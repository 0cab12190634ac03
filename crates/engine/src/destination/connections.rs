//! Limits the number of connections of each kind, so that peers that send nothing, or request much,
//! use no more of the agent than that.

use std::collections::HashMap;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::Arc;

use identity::{Admission, AdmissionBounds, Admissions, LEAVING_MAX};
use parking_lot::Mutex;

/// Connections with a known purpose at a time: 8 arrivals with 64 lanes each are 520. Connections
/// whose purpose is not known yet have limits of their own, or strangers could keep these out.
const KNOWN_MAX: usize = 1024;
/// Connections without a known purpose from addresses of known hosts. A connection is unknown
/// during its handshake, and an inquiry about a switchover to its end. All lanes of two migrations
/// may connect from one address at the same moment; lanes that have to give way to others try again
/// for seconds.
const UNKNOWN_OF_HOSTS: AdmissionBounds = AdmissionBounds { all: 256, per_source: 128 };
/// The same from all other addresses. A host is a stranger at an address that is not configured,
/// until it has identified itself from there.
const UNKNOWN_OF_STRANGERS: AdmissionBounds = AdmissionBounds { all: 64, per_source: 16 };
/// Known connections that will send an order or a question, before they get an arrival's resources:
/// each keeps a few messages in memory.
const LEADING_MAX: usize = 64;
/// The same for one peer: a gang moves fewer VMs of a host at a time, and there are questions.
const LEADING_OF_PEER_MAX: usize = 24;
/// Known connections by which other agents order moves: each lasts as long as one VM's migration,
/// and keeps a thread.
const ORDERING_MAX: usize = 64;
/// The same for one peer: as many as a gang moves VMs of a host at a time, and some for questions.
const ORDERING_OF_PEER_MAX: usize = 24;
// One more VM moves while another is about to finish.
const _: () = assert!(ORDERING_OF_PEER_MAX > policy::gang::PARALLEL_MAX + 1);
const _: () = assert!(LEADING_OF_PEER_MAX > policy::gang::PARALLEL_MAX + 1);
// Two peers don't keep the others out.
const _: () = assert!(2 * ORDERING_OF_PEER_MAX < ORDERING_MAX);
const _: () = assert!(2 * LEADING_OF_PEER_MAX < LEADING_MAX);

/// Known connections by which other hosts of the rack request content or its location: each keeps
/// two threads at most. Two for each host.
const SERVING_MAX: usize = 256;

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
    unknown: usize,
    /// The peer of each connection, by its number.
    leading: HashMap<u64, Peer>,
    ordering: HashMap<u64, Peer>,
    serving: usize,
}

/// A peer that sends orders or questions.
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
    Unknown,
    Leading,
    Ordering,
    Serving,
    Known,
}

/// A connection's place among the others, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    connections: Arc<Connections>,
    number: u64,
    counts_as: Use,
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
        if state.open.len() - state.unknown >= KNOWN_MAX {
            return None;
        }
        let stream = Arc::new(stream.try_clone().ok()?);
        let (admission, gives_way) = self.unknown.admit(from, Arc::clone(&stream))?;
        if let Some(other) = gives_way {
            // It may be closed already.
            let _ = other.shutdown(Shutdown::Both);
        }
        let number = state.taken_in;
        state.open.insert(number, stream);
        state.taken_in += 1;
        state.unknown += 1;
        Some(Place {
            connections: Arc::clone(self),
            number,
            counts_as: Use::Unknown,
            from,
            admission: Some(admission),
        })
    }

    /// Breaks off all connections.
    pub(super) fn end_all(&self) {
        for stream in self.state.lock().open.values() {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl State {
    fn count(&mut self, of: Use) -> Option<&mut usize> {
        match of {
            Use::Unknown => Some(&mut self.unknown),
            Use::Serving => Some(&mut self.serving),
            Use::Leading | Use::Ordering | Use::Known => None,
        }
    }
}

impl Place {
    /// The connection will send an order or a question, in the name of the host in its certificate,
    /// if it has one. False if there are too many in all, or too many of that peer.
    pub(super) fn leads(&mut self, host: Option<&str>) -> bool {
        let peer = self.peer(host);
        let mut state = self.connections.state.lock();
        let of_peer = state.leading.values().filter(|other| **other == peer).count();
        if state.leading.len() >= LEADING_MAX || of_peer >= LEADING_OF_PEER_MAX {
            return false;
        }
        state.leading.insert(self.number, peer);
        drop(state);
        self.count_as(Use::Leading);
        true
    }

    /// The connection will order moves of VMs, in the name of the host in its certificate, if it
    /// has one. False if there are too many in all, or too many of that peer.
    pub(super) fn orders(&mut self, host: Option<&str>) -> bool {
        let peer = self.peer(host);
        let mut state = self.connections.state.lock();
        let of_peer = state.ordering.values().filter(|other| **other == peer).count();
        if state.ordering.len() >= ORDERING_MAX || of_peer >= ORDERING_OF_PEER_MAX {
            return false;
        }
        state.ordering.insert(self.number, peer);
        drop(state);
        self.count_as(Use::Ordering);
        true
    }

    fn peer(&self, host: Option<&str>) -> Peer {
        match host {
            Some(host) => Peer::Host(host.to_owned()),
            None => Peer::At(self.from.to_canonical()),
        }
    }

    /// The connection serves hosts of the rack. False if there are too many.
    pub(super) fn serves(&mut self) -> bool {
        let has_room = self.connections.state.lock().serving < SERVING_MAX;
        if has_room {
            self.count_as(Use::Serving);
        }
        has_room
    }

    /// The connection belongs to something that has a limit of its own.
    pub(super) fn is_known(&mut self) {
        self.count_as(Use::Known);
    }

    /// The peer is a host: its address is known as one from now on.
    pub(super) fn is_of_host(&self) {
        self.connections.unknown.remember(self.from);
    }

    /// Whether it was broken off to make room for another connection.
    pub(super) fn gave_way(&self) -> bool {
        self.admission.as_ref().is_some_and(Admission::gave_way)
    }

    fn count_as(&mut self, new: Use) {
        let mut state = self.connections.state.lock();
        let old = std::mem::replace(&mut self.counts_as, new);
        if new != Use::Leading {
            state.leading.remove(&self.number);
        }
        if new != Use::Ordering {
            state.ordering.remove(&self.number);
        }
        if let Some(count) = state.count(old) {
            *count -= 1;
        }
        if let Some(count) = state.count(new) {
            *count += 1;
        }
        drop(state);
        if new != Use::Unknown {
            self.admission = None;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.count_as(Use::Known);
        self.connections.state.lock().open.remove(&self.number);
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
        for number in 0..LEADING_MAX {
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
        for _ in 0..ORDERING_OF_PEER_MAX {
            assert!(order(&mut ordering, HOST, Some("host-a")));
        }
        assert!(!order(&mut ordering, HOST, Some("host-a")));
        assert!(!order(&mut ordering, STRANGER, Some("host-a")), "wherever it comes from");
        assert!(order(&mut ordering, HOST, Some("host-b")), "whatever stands before it");
        ordering.pop();
        for _ in 0..ORDERING_OF_PEER_MAX {
            assert!(order(&mut ordering, HOST, None));
        }
        assert!(!order(&mut ordering, HOST, None));
        // All peers together are limited too.
        while ordering.len() < ORDERING_MAX {
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
        for _ in 0..LEADING_OF_PEER_MAX {
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
        leading[0].is_known();
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
        lanes.iter_mut().for_each(Place::is_known);
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

    fn assert_none(connections: &Connections) {
        let state = connections.state.lock();
        let counts = (state.open.len(), state.unknown, state.leading.len(), state.ordering.len());
        assert_eq!(counts, (0, 0, 0, 0));
    }
}
