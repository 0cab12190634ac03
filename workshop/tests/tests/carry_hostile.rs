//! A peer that breaks the rules while something is relayed: the recipient gets only what was sent,
//! in order, or the end of its connection.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread::{self, JoinHandle};

use end_to_end::commander::{carrying, port};
use end_to_end::hostile::{Caller, Pages, block, ending, frame, hear, say};
use end_to_end::{Side, World};
use identity::{Connection, Security};
use lab::hosts::Link;
use lab::libvirt::WAITS_AT;
use wire::carry::{Carry, Target};
use wire::{AuditOrder, Frame, Kind, ToDestination, ToSource, Token};

/// A piece of a relayed connection, with arbitrary numbers.
#[derive(Clone, Copy)]
struct Piece<'p> {
    disk: u16,
    sequence: u64,
    offset: u64,
    /// Its announced length; the highest bit marks zeros.
    extent: u32,
    payload: &'p [u8],
}

impl Piece<'_> {
    fn send(&self, lane: &mut Connection) {
        let mut bytes = vec![0xb2, 0xd7, 0, 0];
        bytes.extend(self.disk.to_le_bytes());
        bytes.extend(1_u16.to_le_bytes());
        bytes.extend(self.sequence.to_le_bytes());
        bytes.extend(u32::try_from(self.payload.len()).unwrap().to_le_bytes());
        bytes.extend(self.offset.to_le_bytes());
        bytes.extend(self.extent.to_le_bytes());
        bytes.extend(self.payload);
        // The agent may have hung up.
        let _ = lane.write_all(&bytes);
    }
}

const SAID: &[u8] = b"what was said";
const GOOD: Piece<'_> = Piece { disk: 0, sequence: 0, offset: 0, extent: 13, payload: SAID };

/// A recipient at host B: returns what it got of one connection.
fn waits(world: &World) -> JoinHandle<Vec<u8>> {
    let there = (WAITS_AT, port(Side::B) + 1);
    let listener = world.host(Side::B).within(|| TcpListener::bind(there).unwrap());
    thread::spawn(move || {
        let mut got = Vec::new();
        // The connection may be cut.
        let _ = listener.accept().unwrap().0.read_to_end(&mut got);
        got
    })
}

/// Has the agent of B connect to the recipient.
fn carried(caller: &Caller<'_>) -> (Connection, Token) {
    let mut control = caller.call(Kind::Control).unwrap();
    let order = Carry {
        migration: "0badf00d".to_owned(),
        from: "host-a".to_owned(),
        target: Target::Port(port(Side::B) + 1).into(),
        terms: Default::default(),
        audit: AuditOrder::On,
        hashes: Vec::new(),
        sharing: None,
    };
    say(&mut control, &ToDestination::Carry(Box::new(order)));
    let Some(ToSource::Carrying(carrying)) = hear(&mut control) else { panic!("not carried") };
    assert!(carrying.relays_by_lanes);
    let token = u128::from_str_radix(&carrying.token, 16).unwrap();
    (control, Token(token.to_be_bytes()))
}

fn begin(control: &mut Connection) {
    say(control, &ToDestination::RelayBegins);
    let Some(ToSource::DiskRoom { batches: 16 }) = hear(control) else { panic!("no room") };
}

/// What a peer sends on its control connection, and on a lane.
type Script<'s> = dyn Fn(&mut Connection, &mut Connection) + 's;

#[test]
fn only_what_was_sent_is_relayed() {
    let mut world = World::new(Link::unshaped());
    carrying(&mut world);
    let caller = Caller::new(&world, "host-a", Security::Plaintext);
    let wrong = |piece: Piece<'static>| {
        move |control: &mut Connection, lane: &mut Connection| {
            begin(control);
            piece.send(lane);
        }
    };
    let scripts: [(&Script<'_>, &str); 12] = [
        (
            &|control, _| frame(control, &Frame::Tail(b"x".to_vec())),
            "the tail of the stream arrived before its head",
        ),
        (&|control, _| say(control, &ToDestination::RelayEnds { bytes: 0 }), "had not started"),
        (
            &|control, _| {
                begin(control);
                say(control, &ToDestination::RelayBegins);
            },
            "out of turn",
        ),
        (
            &|control, _| {
                begin(control);
                frame(control, &Frame::Whole(b"x".to_vec()));
            },
            "on the control connection",
        ),
        (
            &|control, _| {
                begin(control);
                let blocks = vec![block("pc.ram", 64 << 20)];
                say(control, &ToDestination::Blocks { blocks, ram_section: 2, footers: true });
                frame(control, &Frame::Head(b"QEVM\0\0\0\x03".to_vec()));
            },
            "out of turn",
        ),
        (&|_, lane| GOOD.send(lane), "announced no disks"),
        (&wrong(Piece { disk: 1, ..GOOD }), "not part of the relayed stream"),
        (&wrong(Piece { extent: 1 << 31 | 9, payload: &[], ..GOOD }), "not part of"),
        (&wrong(Piece { sequence: 16, ..GOOD }), "than there is room for"),
        (&wrong(Piece { sequence: u64::MAX, ..GOOD }), "than there is room for"),
        (&wrong(Piece { offset: 1, ..GOOD }), "out of order"),
        (
            &|control, lane| {
                begin(control);
                say(control, &ToDestination::RelayEnds { bytes: 1 });
                GOOD.send(lane);
            },
            "more than it announced",
        ),
    ];
    for (talk, reason) in scripts {
        let waits = waits(&world);
        let (mut control, token) = carried(&caller);
        let mut lane = caller.call(Kind::Lane { number: 0, token }).unwrap();
        talk(&mut control, &mut lane);
        let why = ending(&mut control);
        assert!(why.contains(reason), "{reason:?} is not in: {why}");
        let got = waits.join().unwrap();
        assert!(got.is_empty() || got == SAID, "{reason}: {got:?}");
    }

    // Pages don't belong here: they wait, and end with the connection.
    let waiting = waits(&world);
    let (mut control, token) = carried(&caller);
    let mut lane = caller.call(Kind::Lane { number: 0, token }).unwrap();
    begin(&mut control);
    Pages { encoding: 0, block: 0, pages: &[], fills: &[(0, 1)], payload: &[] }.send(&mut lane);
    drop((control, lane));
    assert_eq!(waiting.join().unwrap(), b"");

    // A peer that keeps to the rules, with two lanes, the later piece first and twice.
    let waiting = waits(&world);
    let (mut control, token) = carried(&caller);
    begin(&mut control);
    let later = Piece { sequence: 1, offset: 13, ..GOOD };
    for (number, pieces) in [(0, [later, later]), (1, [GOOD, later])] {
        let mut lane = caller.call(Kind::Lane { number, token }).unwrap();
        pieces.iter().for_each(|piece| piece.send(&mut lane));
    }
    say(&mut control, &ToDestination::RelayEnds { bytes: 26 });
    assert_eq!(waiting.join().unwrap(), [SAID, SAID].concat());
}
