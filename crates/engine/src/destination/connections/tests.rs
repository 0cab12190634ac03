//! Connections of hosts, strangers and greedy peers.

use std::io::ErrorKind;
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
    let mut unknown: Vec<ConnectionSlot> =
        (0..UNKNOWN_OF_HOSTS.per_source).map(|_| admit()).collect();
    assert!(!unknown.iter().any(ConnectionSlot::gave_way));
    unknown.push(admit());
    assert!(unknown[0].gave_way() && !unknown[1].gave_way());
    unknown.truncate(UNKNOWN_OF_HOSTS.per_source / 2);
    let mut leading: Vec<ConnectionSlot> = Vec::new();
    for number in 0..LEADING.all {
        let mut slot = admit();
        assert!(slot.leads(Some(&format!("host-{number}"))));
        leading.push(slot);
    }
    let mut one_more = admit();
    assert!(!one_more.leads(None));
    leading.pop();
    assert!(one_more.leads(None));
    drop((unknown, leading, one_more));
    assert_none(&connections);
}

#[test]
fn no_peer_keeps_others_from_ordering() {
    let (stream, connections) = (stream(), Connections::new([HOST]));
    let admit = |from| connections.admit(&stream, from).unwrap();
    let order = |ordering: &mut Vec<ConnectionSlot>, from, host: Option<&str>| {
        let mut slot = admit(from);
        let may = slot.orders(host);
        if may {
            ordering.push(slot);
        }
        may
    };
    let mut ordering: Vec<ConnectionSlot> = Vec::new();
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
    let mut leading: Vec<ConnectionSlot> = Vec::new();
    for _ in 0..LEADING.of_peer {
        for host in [Some("host-a"), None] {
            let mut slot = admit(HOST);
            assert!(slot.leads(host));
            leading.push(slot);
        }
    }
    assert!(!admit(STRANGER).leads(Some("host-a")), "wherever it comes from");
    assert!(!admit(HOST).leads(None));
    assert!(admit(STRANGER).leads(None) && admit(HOST).leads(Some("host-b")));
    // An order that is being followed, or a connection that has ended, leaves its slot.
    assert!(leading[0].arrives(Some("host-a")));
    assert!(admit(HOST).leads(Some("host-a")));
    drop(leading);
    assert_none(&connections);
}

#[test]
fn a_host_that_is_removed_loses_its_connections_of_the_rack() {
    let connections = Connections::new([HOST]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let pair = || {
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        there.set_nonblocking(true).unwrap();
        (listener.accept().unwrap().0, there)
    };
    let is_open = |stream: &TcpStream| {
        stream.peek(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    };
    let [leaves, stays, moves] = [pair(), pair(), pair()];
    let mut places =
        [&leaves, &stays, &moves].map(|(here, _)| connections.admit(here, HOST).unwrap());
    assert!(places[0].serves(Some("host-a")) && places[1].serves(Some("host-b")));
    assert!(places[2].arrives(Some("host-a")), "what moves goes on");
    connections.end_unlisted(&|host| host == "host-b");
    assert_eq!([leaves, stays, moves].map(|(_, there)| is_open(&there)), [false, true, true]);
}

#[test]
fn hosts_can_connect_while_strangers_use_their_whole_share() {
    let (stream, connections) = (stream(), Connections::new([HOST]));
    let mut strangers: Vec<ConnectionSlot> = Vec::new();
    for last in 1..=99 {
        for _ in 0..99 {
            let slot = connections.admit(&stream, [192, 0, 2, last].into());
            strangers.push(slot.expect("others make room"));
            strangers.retain(|slot| !slot.gave_way());
        }
    }
    assert_eq!(strangers.len(), UNKNOWN_OF_STRANGERS.all);
    let admit = |from| connections.admit(&stream, from).unwrap();
    let mut lanes: Vec<ConnectionSlot> =
        (0..UNKNOWN_OF_HOSTS.per_source).map(|_| admit(HOST)).collect();
    assert!(!strangers.iter().chain(&lanes).any(ConnectionSlot::gave_way));
    assert!(lanes.iter_mut().all(|slot| slot.is_lane(Some("host-a"))));
    // A connection with a known purpose keeps no others out.
    lanes.extend((0..UNKNOWN_OF_HOSTS.per_source).map(|_| admit(HOST)));
    assert!(!lanes.iter().any(ConnectionSlot::gave_way));
    drop((strangers, lanes));
    assert_none(&connections);
}

#[test]
fn an_address_that_has_identified_as_a_host_gets_a_hosts_share() {
    let (stream, connections) = (stream(), Connections::new([HOST]));
    connections.admit(&stream, STRANGER).unwrap().is_of_host();
    let admit = |_| connections.admit(&stream, STRANGER).unwrap();
    let lanes: Vec<ConnectionSlot> = (0..UNKNOWN_OF_HOSTS.per_source).map(admit).collect();
    assert!(!lanes.iter().any(ConnectionSlot::gave_way));
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
    let mut slot = connections.admit(&stream, HOST).expect("it is admitted");
    assert!(!slot.leads(None) && !slot.is_lane(Some("host-a")));
    assert!(slot.leads(Some("host-a")));
    assert!(!connections.admit(&stream, HOST).unwrap().leads(Some("host-a")), "one of each");
}

fn assert_none(connections: &Connections) {
    let state = connections.state.lock();
    assert_eq!((state.open.len(), state.known.len()), (0, 0));
}
