//! Peers that break the rules: they send bytes of the protocol, combined as no agent would.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use identity::{Connection, Security};
use lab::guest::Guest;
use qemu::disks::Allowed;
use qemu::shape::{self, Shape};
use serde_json::Value;
use switchover::MigrationId;
use transport::{Endpoint, LaneError, connect};
use wire::{
    Announced, Frame, Kind, Preamble, Prepare, Prepared, Reply, ToDestination, ToSource, Token,
    Versions, read_frame, read_message,
};

use crate::{MIB, Side, World, own_qmp_argument};

/// Longest time for an agent to start a QEMU, or to give up a silent peer, on a busy machine too.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// An idle agent takes some 20 MiB; with a migration it also has its buffers.
const RSS_MAX: u64 = 400 * MIB;
/// The agents' port.
const PORT: u16 = 7800;
/// The name of VMs that never arrive.
const VM: &str = "evil";

/// A broken or compromised host that talks to the agent of host B.
pub struct Caller<'w> {
    world: &'w World,
    security: Security,
    from: String,
    shape: Shape,
}

/// A migration for which the agent has prepared.
pub struct Accepted {
    /// The control connection.
    pub control: Connection,
    /// The token that its lanes present.
    pub token: Token,
}

fn json(order: Prepare) -> Value {
    serde_json::to_value(ToDestination::Prepare(Box::new(order))).unwrap()
}

impl<'w> Caller<'w> {
    /// A caller with the name `from`. Makes a VM for a moment, to learn the shape that the agent
    /// expects.
    #[must_use]
    pub fn new(world: &'w World, from: &str, security: Security) -> Self {
        let mut run = vec!["run".to_owned(), "shape".to_owned(), "--".to_owned()];
        run.extend(argv(world));
        run.extend(own_qmp_argument("shape"));
        world.says(Side::A, &run.iter().map(String::as_str).collect::<Vec<_>>());
        let shape = shape::of(&world.own_qmp(Side::A, "shape")).unwrap();
        world.says(Side::A, &["stop", "shape", "--force"]);
        Self { world, security, from: from.to_owned(), shape }
    }

    fn endpoint(&self) -> Endpoint {
        let address = self.world.host(Side::B).addresses[0];
        Endpoint { local: None, remote: SocketAddr::new(address, PORT) }
    }

    /// Opens a connection of that kind.
    ///
    /// # Errors
    /// If it is refused.
    pub fn call(&self, kind: Kind) -> Result<Connection, LaneError> {
        let dial = || connect(self.endpoint(), "host-b", &self.security, kind);
        let mut connection = self.world.host(Side::A).within(dial)?;
        connection.set_read_deadline(Some(Instant::now() + ANSWER_MAX)).unwrap();
        Ok(connection)
    }

    /// A connection that has sent nothing yet.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn dial(&self) -> TcpStream {
        self.world.host(Side::A).within(|| TcpStream::connect(self.endpoint().remote)).unwrap()
    }

    /// A valid order.
    #[must_use]
    pub fn order(&self) -> Prepare {
        Prepare {
            migration: "0badf00d".to_owned(),
            switchover: MigrationId::random().unwrap(),
            agent_port: PORT,
            from: self.from.clone(),
            vm: VM.to_owned(),
            argv: argv(self.world),
            cwd: "/".to_owned(),
            overrides: Vec::new(),
            qemu: "10.0.0".to_owned(),
            shape: self.shape.clone().into(),
            disks: Vec::new().into(),
            shared_disks: false,
            moving: Vec::new().into(),
            allowed: Allowed { create: true, overwrite: true }.into(),
            incoming_qmp: None,
            overcommit: false,
            accept_missing_taps: false,
            terms: Default::default(),
            sharing: None,
            storage: None,
            share_domain: Default::default(),
            guest_port: true,
            audit: Default::default(),
            hashes: Vec::new(),
        }
    }

    /// The reason why an order is refused.
    #[must_use]
    pub fn refused(&self, order: Prepare) -> String {
        self.refused_json(&json(order))
    }

    /// The reason why an order with an invalid part is refused.
    #[must_use]
    pub fn refused_with(&self, part: &str, said: Value) -> String {
        let mut order = json(self.order());
        order[part] = said;
        self.refused_json(&order)
    }

    fn refused_json(&self, order: &Value) -> String {
        let mut control = self.call(Kind::Control).unwrap();
        say(&mut control, order);
        ending(&mut control)
    }

    /// Sends an order that is followed: a QEMU waits.
    ///
    /// # Panics
    /// If it isn't.
    #[must_use]
    pub fn accepted(&self) -> Accepted {
        let mut control = self.call(Kind::Control).unwrap();
        say(&mut control, &ToDestination::Prepare(Box::new(self.order())));
        match hear(&mut control) {
            Some(ToSource::Prepared(prepared)) => {
                let token = u128::from_str_radix(&prepared.token, 16).unwrap();
                Accepted { control, token: Token(token.to_be_bytes()) }
            }
            other => panic!("not prepared: {other:?}"),
        }
    }

    /// The same, with its RAM announced as it is, so that a lane can send pages.
    #[must_use]
    pub fn streaming(&self) -> (Accepted, Connection) {
        let mut accepted = self.accepted();
        accepted.announce(vec![block("pc.ram", RAM_BYTES), block("rom", 8192)]);
        let lane = self.call(Kind::Lane { number: 0, token: accepted.token }).unwrap();
        (accepted, lane)
    }

    /// Asserts that the agent runs, uses no more memory than it may, keeps nothing of VMs that
    /// never arrived, and that the guest on its host is intact.
    ///
    /// # Panics
    /// If anything is wrong.
    pub fn assert_unharmed(&self, guest: &Guest) {
        let world = self.world;
        let vm = world.vm(Side::B, &guest.spec.name).expect("it was there before");
        world.assert_only(Side::B, &[vm.pid]);
        crate::until("the name is free", || world.vm(Side::B, VM).is_none());
        assert!(rss_bytes(world, Side::B) < RSS_MAX, "{} bytes", rss_bytes(world, Side::B));
        world.assert_intact(guest);
    }
}

/// RAM of a [`Caller`]'s VMs.
pub const RAM_BYTES: u64 = 64 * MIB;

/// The command line of a QEMU without a guest.
fn argv(world: &World) -> Vec<String> {
    let rest = "-machine q35,accel=tcg -m 64 -nodefaults -no-user-config -display none -S";
    let qemu = world.kit.qemu.display().to_string();
    std::iter::once(qemu).chain(rest.split(' ').map(str::to_owned)).collect()
}

/// A RAM block as a source announces it.
#[must_use]
pub fn block(name: &str, bytes: u64) -> Announced {
    Announced { name: name.to_owned(), bytes }
}

impl Accepted {
    /// Announces these RAM blocks, and sends the beginning of a head; QEMU waits for the rest.
    pub fn announce(&mut self, blocks: Vec<Announced>) {
        say(&mut self.control, &ToDestination::Blocks { blocks, ram_section: 2, footers: true });
        frame(&mut self.control, &Frame::Head(b"QEVM\0\0\0\x03".to_vec()));
    }

    /// The reason with which it ends.
    #[must_use]
    pub fn ending(mut self) -> String {
        ending(&mut self.control)
    }
}

/// Sends a message over control. An agent that has hung up is no error.
pub fn say(control: &mut Connection, message: &impl serde::Serialize) {
    frame(control, &Frame::message(message).unwrap());
}

/// The same with any frame.
pub fn frame(control: &mut Connection, frame: &Frame) {
    let _ = frame.write_to(control);
}

/// The agent's own next message; none if it has hung up.
#[must_use]
pub fn hear(control: &mut Connection) -> Option<ToSource> {
    loop {
        match read_frame(control) {
            Ok(Some(Frame::Message(json))) => return Some(read_message(&json).unwrap()),
            Ok(Some(Frame::Back(_))) => {}
            Ok(Some(other)) => panic!("an agent says {other:?}"),
            Ok(None) | Err(_) => return None,
        }
    }
}

/// The reason with which it ends a migration; empty if it just hangs up.
///
/// # Panics
/// If it does not end it in time.
#[must_use]
pub fn ending(control: &mut Connection) -> String {
    let began = Instant::now();
    let mut reason = String::new();
    while let Some(said) = hear(control) {
        match said {
            ToSource::Refused { reason: why } => reason = why,
            ToSource::Switchover { said } => match said.message {
                switchover::ToSource::Refused { reason: why } => reason = why.into(),
                other => panic!("{other:?}"),
            },
            _ => {}
        }
    }
    assert!(began.elapsed() < ANSWER_MAX, "it goes on");
    reason
}

/// A batch of pages on a lane, with arbitrary numbers.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'p> {
    /// 0 raw, 1 lz4, 2 zstd.
    pub encoding: u8,
    /// The block's number.
    pub block: u16,
    /// The bodies' pages.
    pub pages: &'p [u32],
    /// Runs: the first page, and the number of pages.
    pub fills: &'p [(u32, u32)],
    /// The payload, whose length is announced as it is.
    pub payload: &'p [u8],
}

impl Pages<'_> {
    /// Sends it. An agent that has hung up is no error.
    pub fn send(&self, lane: &mut Connection) {
        let _ = lane.write_all(&self.bytes());
    }

    /// Its bytes on a lane.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0xb1, 0xd7, self.encoding, 0];
        let count = |of: usize| u16::try_from(of).unwrap().to_le_bytes();
        bytes.extend(self.block.to_le_bytes());
        bytes.extend(count(self.pages.len()));
        bytes.extend(count(self.fills.len()));
        bytes.extend([0; 2]);
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend(u32::try_from(self.payload.len()).unwrap().to_le_bytes());
        bytes.extend(self.pages.iter().flat_map(|page| page.to_le_bytes()));
        for (first, count) in self.fills {
            bytes.extend(first.to_le_bytes());
            bytes.extend(count.to_le_bytes());
            bytes.push(7);
        }
        bytes.extend(self.payload);
        bytes
    }
}

/// Resident memory of a host's agent.
///
/// # Panics
/// If the agent has ended.
#[must_use]
pub fn rss_bytes(world: &World, side: Side) -> u64 {
    memory_bytes(world, side, "VmRSS:")
}

/// The same without the memory of VMs, which it shares.
///
/// # Panics
/// If the agent has ended.
#[must_use]
pub fn own_bytes(world: &World, side: Side) -> u64 {
    memory_bytes(world, side, "RssAnon:")
}

fn memory_bytes(world: &World, side: Side, kind: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", world.agent(side).pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(kind)).unwrap();
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    kib << 10
}

/// What a false agent does with an incoming migration, from its control connection on.
pub type Script = fn(Connection);

/// A false agent of host B, whose own was killed. It speaks plaintext, takes one migration, and
/// sends `acks` as acknowledgements on each of its lanes. Ends when `script` does.
/// `script` does.
///
/// # Panics
/// If it can't listen.
pub fn false_destination(world: &World, acks: &[u64], script: Script) -> thread::JoinHandle<()> {
    let acks: Vec<u8> = acks.iter().flat_map(|ack| wire::Ack { placed: *ack }.to_bytes()).collect();
    let address = SocketAddr::new(world.host(Side::B).addresses[0], PORT);
    let listener = world.host(Side::B).within(|| TcpListener::bind(address)).unwrap();
    thread::spawn(move || {
        let Some((control, _)) = greeted(&listener) else { return };
        thread::scope(|scope| {
            scope.spawn(|| {
                while let Some((mut lane, true)) = greeted(&listener) {
                    let acks = &acks;
                    scope.spawn(move || {
                        let _ = lane.write_all(acks);
                        // Keeps reading, like a destination that takes all.
                        hear_out(lane);
                    });
                }
            });
            script(control);
            // Wakes the thread that accepts.
            let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Both);
        });
    })
}

/// The next connection, once it is greeted, and whether it is a lane.
fn greeted(listener: &TcpListener) -> Option<(Connection, bool)> {
    let (stream, _) = listener.accept().ok()?;
    let mut connection = Connection::plain(stream);
    let mut bytes = [0; Preamble::BYTES];
    connection.read_exact(&mut bytes).ok()?;
    let kind = Preamble::parse(&bytes, Versions::SPOKEN).ok()?.0;
    connection.write_all(&Reply::Welcome.to_bytes(wire::VERSION)).ok()?;
    Some((connection, matches!(kind, Kind::Lane { .. })))
}

/// An honest destination's answer to an order.
#[must_use]
pub fn prepared() -> ToSource {
    let token = "0123456789abcdef0123456789abcdef".to_owned();
    ToSource::Prepared(Prepared {
        token,
        qemu: "10.0.0".to_owned(),
        notes: Vec::new(),
        sharing: false,
        storage_notes: Vec::new(),
        storage: Vec::new(),
        hash: None,
        deltas: false,
        names_with_bodies: false,
    })
}

/// Reads until the source hangs up.
pub fn hear_out(mut control: Connection) {
    let _ = std::io::copy(&mut control, &mut std::io::sink());
}
