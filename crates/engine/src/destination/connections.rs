//! How many connections there are, and of which kind: peers that say nothing, or
//! ask for much, take no more of the agent than that.

use std::collections::HashMap;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::Arc;

use identity::{Admission, AdmissionBounds, Admissions, LEAVING_MAX};
use parking_lot::Mutex;

/// Connections of which it is known what they are for, at a time: 8 arrivals with 64
/// lanes each are 520. Unknown ones are bounded apart, or strangers would be in the
/// way of these.
const KNOWN_MAX: usize = 1024;
/// Those of which it isn't, from addresses that are known as hosts'. Each is unknown
/// for as long as a handshake takes, and words about a switchover to their end. From
/// one address come all lanes of two migrations at the same moment; lanes that have to
/// make room for others try again for seconds.
const UNKNOWN_OF_HOSTS: AdmissionBounds = AdmissionBounds { all: 256, per_source: 128 };
/// And from all other addresses. A host is a stranger at an address which nobody has
/// named until it has shown there who it is.
const UNKNOWN_OF_STRANGERS: AdmissionBounds = AdmissionBounds { all: 64, per_source: 16 };
/// Of the known ones, those that are to order or ask something, and have not been given
/// what a VM that comes has: each keeps a few messages in memory.
const LEADING_MAX: usize = 32;
/// Of them, those by which other agents have VMs moved: each stays for as long
/// as one VM's migration, and keeps a thread.
const ORDERING_MAX: usize = 64;
/// And those of one peer: as many as a gang has VMs of a host move at a time, and some
/// to ask by.
const ORDERING_OF_PEER_MAX: usize = 24;
// One VM more moves while another is about to finish.
const _: () = assert!(ORDERING_OF_PEER_MAX > policy::gang::PARALLEL_MAX + 1);
const _: () = assert!(2 * ORDERING_OF_PEER_MAX < ORDERING_MAX);

/// Of them, those by which other hosts of the rack ask for content, or where it is:
/// each keeps two threads at most. Two of each host.
const SERVING_MAX: usize = 256;

// Each has two descriptors, its own and the one that it is ended by. With the 192 of
// the API's port, unknown ones leave 100 for the agent itself where no more than 1024
// files may be open.
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
    leading: usize,
    /// Whose each is, by its number.
    ordering: HashMap<u64, Orderer>,
    serving: usize,
}

/// Who orders moves of VMs.
#[derive(Debug, PartialEq, Eq)]
enum Orderer {
    /// The host that its certificate names.
    Host(String),
    /// Somebody without a certificate.
    At(IpAddr),
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Unknown,
    Leading,
    Ordering,
    Serving,
    Known,
}

/// One connection among the others, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    connections: Arc<Connections>,
    number: u64,
    counts_as: Use,
    from: IpAddr,
    /// While it is unknown.
    admission: Option<Admission<Arc<TcpStream>>>,
}

impl Connections {
    /// None yet. `hosts` are the addresses that hosts are known to have.
    pub(super) fn new(hosts: impl IntoIterator<Item = IpAddr>) -> Arc<Self> {
        let unknown = Admissions::new(hosts, UNKNOWN_OF_HOSTS, UNKNOWN_OF_STRANGERS);
        Arc::new(Self { unknown, state: Mutex::default() })
    }

    /// From now on these are the addresses that hosts are known to have.
    pub(super) fn know_hosts(&self, hosts: impl IntoIterator<Item = IpAddr>) {
        self.unknown.know(hosts);
    }

    /// One more from that address, if there may be. Another may be broken off for it.
    pub(super) fn admit(self: &Arc<Self>, stream: &TcpStream, from: IpAddr) -> Option<Place> {
        let mut state = self.state.lock();
        if state.open.len() - state.unknown >= KNOWN_MAX {
            return None;
        }
        let stream = Arc::new(stream.try_clone().ok()?);
        let (admission, gives_way) = self.unknown.admit(from, Arc::clone(&stream))?;
        if let Some(other) = gives_way {
            // It may be gone.
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

    /// Breaks all of them off.
    pub(super) fn end_all(&self) {
        for stream in self.state.lock().open.values() {
            // It may be gone.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl State {
    fn count(&mut self, of: Use) -> Option<&mut usize> {
        match of {
            Use::Unknown => Some(&mut self.unknown),
            Use::Leading => Some(&mut self.leading),
            Use::Serving => Some(&mut self.serving),
            Use::Ordering | Use::Known => None,
        }
    }
}

impl Place {
    /// It is to order or ask something. False if too many are.
    pub(super) fn leads(&mut self) -> bool {
        let has_room = self.connections.state.lock().leading < LEADING_MAX;
        if has_room {
            self.count_as(Use::Leading);
        }
        has_room
    }

    /// It is to order moves of VMs, in the name of the host that its certificate names, if
    /// it has one. False if too many are, or too many of that peer.
    pub(super) fn orders(&mut self, host: Option<&str>) -> bool {
        let orderer = match host {
            Some(host) => Orderer::Host(host.to_owned()),
            None => Orderer::At(self.from.to_canonical()),
        };
        let mut state = self.connections.state.lock();
        let of_peer = state.ordering.values().filter(|other| **other == orderer).count();
        if state.ordering.len() >= ORDERING_MAX || of_peer >= ORDERING_OF_PEER_MAX {
            return false;
        }
        state.ordering.insert(self.number, orderer);
        drop(state);
        self.count_as(Use::Ordering);
        true
    }

    /// It is for what the hosts of a rack have of one another. False if too many are.
    pub(super) fn serves(&mut self) -> bool {
        let has_room = self.connections.state.lock().serving < SERVING_MAX;
        if has_room {
            self.count_as(Use::Serving);
        }
        has_room
    }

    /// It belongs to something that is bounded by itself.
    pub(super) fn is_known(&mut self) {
        self.count_as(Use::Known);
    }

    /// It is a host's: its address is known as one from now on.
    pub(super) fn is_of_host(&self) {
        self.connections.unknown.remember(self.from);
    }

    /// Whether it was broken off to make room for another.
    pub(super) fn gave_way(&self) -> bool {
        self.admission.as_ref().is_some_and(Admission::gave_way)
    }

    fn count_as(&mut self, new: Use) {
        let mut state = self.connections.state.lock();
        let old = std::mem::replace(&mut self.counts_as, new);
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
    fn each_kind_has_its_bound_and_what_goes_leaves_room() {
        let (stream, connections) = (stream(), Connections::new([HOST]));
        let admit = || connections.admit(&stream, HOST).unwrap();
        let mut unknown: Vec<Place> = (0..UNKNOWN_OF_HOSTS.per_source).map(|_| admit()).collect();
        assert!(!unknown.iter().any(Place::gave_way));
        unknown.push(admit());
        assert!(unknown[0].gave_way() && !unknown[1].gave_way());
        unknown.truncate(UNKNOWN_OF_HOSTS.per_source / 2);
        let mut leading: Vec<Place> = Vec::new();
        for _ in 0..LEADING_MAX {
            let mut place = admit();
            assert!(place.leads());
            leading.push(place);
        }
        let mut one_more = admit();
        assert!(!one_more.leads());
        leading.pop();
        assert!(one_more.leads());
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
        // Those of all peers are bounded, too.
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
    fn hosts_come_while_strangers_hold_all_that_they_can() {
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
        // One of which it is known is in nobody's way.
        lanes.extend((0..UNKNOWN_OF_HOSTS.per_source).map(|_| admit(HOST)));
        assert!(!lanes.iter().any(Place::gave_way));
        drop((strangers, lanes));
        assert_none(&connections);
    }

    #[test]
    fn an_address_that_has_shown_itself_a_hosts_has_a_hosts_share() {
        let (stream, connections) = (stream(), Connections::new([HOST]));
        connections.admit(&stream, STRANGER).unwrap().is_of_host();
        let admit = |_| connections.admit(&stream, STRANGER).unwrap();
        let lanes: Vec<Place> = (0..UNKNOWN_OF_HOSTS.per_source).map(admit).collect();
        assert!(!lanes.iter().any(Place::gave_way));
    }

    fn assert_none(connections: &Connections) {
        let state = connections.state.lock();
        let counts = (state.open.len(), state.unknown, state.leading, state.ordering.len());
        assert_eq!(counts, (0, 0, 0, 0));
    }
}
