//! Broken or compromised hosts talk to an agent: it goes on, in bounded memory, its other VM
//! notices nothing, and it still works with peers that keep to the rules.

use std::io::Write;
use std::thread;
use std::time::Duration;

use end_to_end::hostile::{
    Caller, Pages, RAM_BYTES, block, ending, false_destination, frame, hear_out, own_bytes,
    prepared, rss_bytes, say,
};
use end_to_end::{MIB, Side, World, bare, own_qmp_argument, until};
use identity::{Connection, Security};
use lab::guest::Guest;
use lab::hosts::{Link, RUN_DIR};
use serde_json::json;
use switchover::{Envelope, MigrationId};
use wire::{
    Frame, Inquiry, Kind, Order, Prepare, SwitchoverMessage, ToDestination, ToSource, Token, gang,
    read_frame, read_message,
};

const RATE: u64 = 2_000_000;

/// A guest that has moved to host B by an honest migration.
fn guest_at_b(world: &World) -> Guest {
    let mut spec = bare("192M", RATE);
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot(&spec);
    drop(world.migrate(&guest, Side::A, &[]));
    guest
}

#[test]
fn invalid_orders_are_refused() {
    let world = World::new(Link::unshaped());
    let guest = guest_at_b(&world);
    let caller = Caller::new(&world, "host-a", Security::Plaintext);
    let refused = |change: &dyn Fn(&mut Prepare), reason: &str| {
        let mut order = caller.order();
        change(&mut order);
        let why = caller.refused(order);
        assert!(!why.is_empty() && why.contains(reason), "{reason:?} is not in: {why}");
        assert!(why.len() < 20_000, "{} letters", why.len());
    };
    for name in ["", "../web1", "a/b", "a\0b", ".", &"x".repeat(1 << 20)] {
        refused(&|order| order.vm = name.to_owned(), "is not a name");
        refused(&|order| order.from = name.to_owned(), "is not a name");
    }
    refused(&|order| order.vm = "web1".to_owned(), "there is already a VM `web1` there");
    refused(&|order| order.cwd = "tmp".to_owned(), "not absolute");
    refused(&|order| order.argv.clear(), "");
    refused(&|order| order.argv = vec!["-m".to_owned(); 60_000], "");
    refused(&|order| order.argv[0] = "/bin/true".to_owned(), "");
    refused(&|order| order.share_domain.0 = "../a".to_owned(), "a sharing domain has at most");
    refused(&|order| order.share_domain.0 = "a".repeat(1 << 20), "a sharing domain has at most");
    let mut large = serde_json::to_value(caller.order().shape).unwrap();
    large["ram_bytes"] = json!(u64::MAX);
    for (part, said, reason) in [
        ("shape", json!({ "machine": [] }), "the VM is made of can't be read"),
        ("disks", json!(7), "the VM's disks can't be read"),
        ("shape", large, ""),
    ] {
        let why = caller.refused_with(part, said);
        assert!(!why.is_empty() && why.contains(reason), "{part}: {why}");
    }
    // Another VM's QEMU that runs, or waits for another source, is left alone.
    let others = format!("{RUN_DIR}/web1.own");
    refused(&|order| order.incoming_qmp = Some(others.clone()), "already runs the VM web1 here");
    refused(&|order| order.incoming_qmp = Some("/dev/zero".to_owned()), "");
    // Short on the wire, and large in memory.
    let bomb = serde_json::Value::Array(vec![json!(0); 900_000]);
    assert_eq!(caller.refused_with("shape", bomb), "", "it closes the connection");
    caller.assert_unharmed(&guest);
    drop(world.migrate(&guest, Side::B, &[]));
}

#[test]
fn silence_and_words_out_of_turn() {
    let world = World::new(Link::unshaped());
    let guest = guest_at_b(&world);
    let caller = Caller::new(&world, "host-a", Security::Plaintext);
    let first = |first: Frame| {
        let mut control = caller.call(Kind::Control).unwrap();
        frame(&mut control, &first);
        ending(&mut control)
    };
    let out_of_turn = "an order to prepare was expected first";
    assert_eq!(first(Frame::Tail(vec![0; 1 << 20])), out_of_turn);
    assert_eq!(first(Frame::Head(vec![0; 4 << 20])), out_of_turn);
    assert_eq!(
        first(
            Frame::message(&ToDestination::Complete { residue_bytes: 1, audit: Vec::new() })
                .unwrap()
        ),
        out_of_turn
    );
    assert_eq!(first(Frame::Message(b"{".to_vec())), "");
    assert_eq!(first(Frame::Message("[".repeat(2 << 20).into_bytes())), "");
    let mut control = caller.call(Kind::Control).unwrap();
    // A frame of 4 GiB, and a frame of an unknown kind.
    let _ = control.write_all(&[0xff, 0xff, 0xff, 0xff, 1]);
    assert_eq!(ending(&mut control), "");
    let mut control = caller.call(Kind::Control).unwrap();
    let _ = control.write_all(&[0, 0, 0, 0, 9]);
    assert_eq!(ending(&mut control), "");
    // Lanes without a migration.
    for token in [Token::default(), Token([7; 16])] {
        assert!(caller.call(Kind::Lane { number: 0, token }).is_err());
    }
    // A message about an unknown switchover.
    let mut asking = caller.call(Kind::Inquiry).unwrap();
    let migration = MigrationId::random().unwrap();
    let said = Envelope { migration, message: switchover::ToDestination::Go { run: true } };
    let inquiry =
        Inquiry { from: "host-a".to_owned(), message: SwitchoverMessage::ToDestination(said) };
    Frame::message(&inquiry).unwrap().write_to(&mut asking).unwrap();
    let Some(Frame::Message(json)) = read_frame(&mut asking).unwrap() else { panic!() };
    let SwitchoverMessage::ToSource(said) = read_message::<SwitchoverMessage>(&json).unwrap()
    else {
        panic!()
    };
    assert_eq!(said.message, switchover::ToSource::Unknown);
    caller.assert_unharmed(&guest);

    // Many that send nothing, a byte, or half of a message: they are closed after a time.
    let mut silent: Vec<_> = (0..1500).map(|_| caller.dial()).collect();
    for stream in silent.iter_mut().step_by(2) {
        let _ = stream.write_all(b"D");
    }
    let halves: Vec<_> = (0..200)
        .filter_map(|_| {
            let mut control = caller.call(Kind::Control).ok()?;
            let _ = control.write_all(&[0, 0, 1, 0, 0, b'{']);
            Some(control)
        })
        .collect();
    let open = || std::fs::read_dir(format!("/proc/{}/fd", world.agent(Side::B).pid()));
    assert!(open().unwrap().count() < 1100);
    assert!(rss_bytes(&world, Side::B) < 200 * MIB);
    until("silent ones are let go of", || open().unwrap().count() < 60);
    drop((silent, halves));
    caller.assert_unharmed(&guest);
    drop(world.migrate(&guest, Side::B, &[]));
}

/// A host keeps an arrival's resources only while something of its VM is placed, whatever it sends:
/// a lane with a byte, messages, and a tail byte by byte are nothing.
#[test]
fn an_arrival_of_which_nothing_is_placed_ends() {
    let mut world = World::new(Link::unshaped());
    let config = world.host(Side::B).run_dir.join("agent.toml");
    std::fs::write(config, "[waits]\nstall = 5\n").unwrap();
    world.restart_agent_with(Side::B, &["--config", &format!("{RUN_DIR}/agent.toml")]);
    let caller = Caller::new(&world, "host-a", Security::Plaintext);
    let (mut accepted, mut lane) = caller.streaming();
    lane.write_all(&[0xb1]).unwrap();
    assert!(world.vm(Side::B, "evil").is_some());
    until("it has ended", || {
        say(&mut accepted.control, &ToDestination::Spare { pages: 1 });
        frame(&mut accepted.control, &Frame::Tail(vec![0]));
        world.vm(Side::B, "evil").is_none()
    });
    let log = world.agent(Side::B).log_text();
    assert!(log.contains("nothing of the VM has arrived for 10 s"), "{log}");
    world.assert_only(Side::B, &[]);
}

/// Each of them ends its own migration, with a reason.
#[test]
fn invalid_pages_end_their_migration() {
    let world = World::new(Link::unshaped());
    let guest = guest_at_b(&world);
    let caller = Caller::new(&world, "host-a", Security::Plaintext);
    let page = [5; 4096];
    let two = [5; 8192];
    let sound = Pages { encoding: 0, block: 0, pages: &[1], fills: &[], payload: &page };
    let last = u32::try_from(RAM_BYTES / 4096).unwrap();
    let zstd = zstd_of_much();
    let batches = [
        (Pages { block: 2, ..sound }, "but announced 2 blocks"),
        (Pages { pages: &[last], ..sound }, "pages from"),
        (Pages { pages: &[u32::MAX], ..sound }, "pages from"),
        (Pages { block: 1, pages: &[2], ..sound }, "of RAM block rom, which has 2 pages"),
        (Pages { pages: &[9, 9], payload: &two, ..sound }, "twice in one batch"),
        (Pages { fills: &[(0, last + 1)], ..sound }, "pages from"),
        (Pages { fills: &[(u32::MAX, u32::MAX)], ..sound }, "pages from"),
        (Pages { payload: &two, ..sound }, "a payload"),
        (Pages { payload: &page[..4095], ..sound }, "cannot be decoded"),
        (Pages { encoding: 9, ..sound }, "encoding 9, which this version does not know"),
        (Pages { encoding: 1, ..sound }, "cannot be decoded"),
        (Pages { encoding: 2, payload: &zstd, ..sound }, "cannot be decoded"),
    ];
    for (batch, reason) in batches {
        let (accepted, mut lane) = caller.streaming();
        batch.send(&mut lane);
        let why = accepted.ending();
        assert!(why.contains(reason), "{reason:?} is not in: {why}");
    }
    // Blocks of a disk, where none were announced; and bytes that are no batch.
    let mut blocks = vec![0xb2, 0xd7, 0, 0, 0, 0, 1, 0];
    blocks.extend([0; 12]);
    // Names that were not agreed on.
    let mut names = vec![0xb3, 0xd7];
    names.extend([0; 18]);
    let mut with_bodies = vec![0xb1, 0xd7, 0, 2];
    with_bodies.extend([0; 16]);
    for (bytes, reason) in [
        (blocks, "announced no disks"),
        (names, "by name, which was not agreed on"),
        (with_bodies, "by name, which was not agreed on"),
        (vec![0xff; 64], "unknown"),
    ] {
        let (accepted, mut lane) = caller.streaming();
        let _ = lane.write_all(&bytes);
        let why = accepted.ending();
        assert!(why.contains(reason), "{reason:?} is not in: {why}");
    }
    caller.assert_unharmed(&guest);
    drop(world.migrate(&guest, Side::B, &[]));
}

/// Messages on the control connection.
type Talk<'t> = dyn Fn(&mut Connection) + 't;

#[test]
fn non_ram_streams_and_lanes_that_can_not_be() {
    let world = World::new(Link::unshaped());
    let guest = guest_at_b(&world);
    let caller = Caller::new(&world, "host-a", Security::Plaintext);
    // Block lists.
    let many = (0..20_000).map(|number| block(&format!("b{number}"), 4096)).collect();
    for (blocks, reason) in [
        (vec![block("pc.ram", RAM_BYTES * 2)], "bytes at the source"),
        (vec![block("pc.ram", RAM_BYTES); 9], "twice"),
        (vec![block("much", 1 << 60)], "takes at most"),
        (many, "20000 RAM blocks"),
    ] {
        let mut accepted = caller.accepted();
        accepted.announce(blocks);
        let why = accepted.ending();
        assert!(why.contains(reason), "{reason:?} is not in: {why}");
    }
    // The non-RAM stream.
    let before = rss_bytes(&world, Side::B);
    let scripts: [(&Talk<'_>, &str); 5] = [
        (&|control| frame(control, &Frame::Head(vec![0; 99])), "without its block list"),
        (
            &|control| {
                say(control, &ToDestination::Complete { residue_bytes: 1, audit: Vec::new() });
            },
            "1 were sent",
        ),
        (
            &|control| frame(control, &Frame::Tail(vec![0; 4 << 20])),
            "the tail of the stream arrived before its head",
        ),
        (
            &|control| say(control, &ToDestination::FlushDisk { ticket: 1, disk: 0 }),
            "no disk moves",
        ),
        (&|control| say(control, &ToDestination::Prepare(Box::new(caller.order()))), "out of turn"),
    ];
    for (talk, reason) in scripts {
        let mut accepted = caller.accepted();
        talk(&mut accepted.control);
        let why = accepted.ending();
        assert!(why.contains(reason), "{reason}: {why}");
    }
    let mut accepted = caller.accepted();
    accepted.announce(vec![block("pc.ram", RAM_BYTES)]);
    (0..99).for_each(|_| frame(&mut accepted.control, &Frame::Tail(vec![0; 4 << 20])));
    let why = accepted.ending();
    // A peer that goes on sending may find the connection broken before it reads the reason.
    assert!(why.contains("larger") || why.is_empty(), "{why}");
    assert!(rss_bytes(&world, Side::B) < before + 350 * MIB);
    caller.assert_unharmed(&guest);

    // Lanes that connect and disconnect, or stop in the middle of a batch.
    let (mut accepted, mut lane) = caller.streaming();
    let kind = Kind::Lane { number: 1, token: accepted.token };
    for _ in 0..300 {
        drop(caller.call(kind));
    }
    let open = || std::fs::read_dir(format!("/proc/{}/fd", world.agent(Side::B).pid()));
    until("lanes that went leave nothing", || open().unwrap().count() < 60);
    let open_lanes: Vec<_> = (0..200).map_while(|_| caller.call(kind).ok()).collect();
    assert!(open().unwrap().count() < 300);
    Pages { encoding: 0, block: 0, pages: &[1], fills: &[], payload: &[5; 99] }.send(&mut lane);
    say(&mut accepted.control, &ToDestination::Abort { reason: "as a test wants it".to_owned() });
    drop((accepted, open_lanes));
    caller.assert_unharmed(&guest);
    drop(world.migrate(&guest, Side::B, &[]));
}

/// All lanes that a migration may have send a batch, but for its last byte. They share buffers, and
/// another VM still arrives.
#[test]
fn lanes_that_stop_within_a_batch_have_bounded_memory() {
    const LANES: usize = 127;
    // Each batch has half a MiB.
    const ALL_BYTES_MAX: u64 = 48 * MIB;
    let (world, certificates) = World::secured(Link::unshaped());
    let guest = guest_at_b(&world);
    let security = Security::Tls(certificates.identity("host-a").unwrap().into());
    let caller = Caller::new(&world, "host-a", security);
    let (accepted, lane) = caller.streaming();
    let kind = Kind::Lane { number: 1, token: accepted.token };
    let before = own_bytes(&world, Side::B);
    let pages: Vec<u32> = (0..128).collect();
    let payload = vec![5; 500 << 10];
    let batch = Pages { encoding: 2, block: 0, pages: &pages, fills: &[], payload: &payload };
    let mut bytes = batch.bytes();
    bytes.pop();
    let lanes = std::iter::once(lane).chain((1..LANES).map(|_| caller.call(kind).unwrap()));
    // A lane that waits for buffers is not read.
    let writing: Vec<_> = lanes
        .map(|mut lane| {
            let bytes = bytes.clone();
            thread::spawn(move || {
                let _ = lane.write_all(&bytes);
                lane
            })
        })
        .collect();
    let grown = || own_bytes(&world, Side::B).saturating_sub(before);
    until("some of them have buffers", || grown() > 16 * MIB);
    until("all together have no more than that", || grown() < ALL_BYTES_MAX);
    for from in [Side::B, Side::A] {
        let ended = world.begin(&guest, from, &[]).wait();
        assert!(ended.success, "{}", ended.said);
        ended.assert_audited();
    }
    assert!(grown() < ALL_BYTES_MAX + 64 * MIB, "{} MiB", grown() / MIB);
    drop(accepted);
    writing.into_iter().for_each(|writing| drop(writing.join().unwrap()));
    caller.assert_unharmed(&guest);
}

/// 16 MiB of zeros, which is more than a batch may have.
fn zstd_of_much() -> Vec<u8> {
    // Magic, one segment with a length of four bytes, and blocks of one repeated byte: a block may
    // have at most 128 KiB.
    let blocks = 128_u32;
    let mut bytes = vec![0x28, 0xb5, 0x2f, 0xfd, 0xa0];
    bytes.extend((blocks << 17).to_le_bytes());
    for block in 1..=blocks {
        let header = (1 << 17 << 3) | (1 << 1) | u32::from(block == blocks);
        bytes.extend(&header.to_le_bytes()[..3]);
        bytes.push(0);
    }
    bytes
}

/// A host with a certificate of its own can't take part in others' migrations.
#[test]
fn another_hosts_migrations() {
    let (world, certificates) = World::secured(Link::unshaped());
    let guest = guest_at_b(&world);
    let tls = |name| Security::Tls(certificates.identity(name).unwrap().into());
    let honest = Caller::new(&world, "host-a", tls("host-a"));
    let other = Caller::new(&world, "host-c", tls("host-c"));
    let order = Prepare { from: "host-a".to_owned(), ..other.order() };
    assert!(other.refused(order).contains("the certificate of its sender is for host-c"));
    let why = other.refused(other.order());
    let stranger = "host-c is not in the peers file of host-b";
    assert!(why.contains(stranger), "{why}");
    // It orders no moves, and takes no part in a rack.
    let mut ordering = other.call(Kind::Orders).unwrap();
    let order = Order { from: "host-c".to_owned(), order: gang::Order::Census.into() };
    Frame::message(&order).unwrap().write_to(&mut ordering).unwrap();
    let Some(Frame::Message(json)) = read_frame(&mut ordering).unwrap() else { panic!() };
    let gang::Answer::Refused { reason, .. } = read_message(&json).unwrap() else { panic!() };
    assert!(reason.contains(stranger), "{reason}");
    for kind in [Kind::Directory, Kind::Content] {
        assert!(other.call(kind).is_err());
    }
    // There is no rack here, so the reply would be the same to a host that is listed.
    let log = || world.agent(Side::B).whole_log();
    let stranger = "it is host-c, which is not in the peers file of this host";
    until("the reason is logged", || log().matches(stranger).count() == 2);
    // It has even learned the token.
    let (accepted, mut lane) = honest.streaming();
    let kind = Kind::Lane { number: 0, token: accepted.token };
    assert!(other.call(kind).is_err());
    let page = [5; 4096];
    let batch = Pages { encoding: 0, block: 0, pages: &[1], fills: &[], payload: &page };
    batch.send(&mut lane);
    // An existing migration, in its own name and in another's.
    let asks = |caller: &Caller<'_>, from: &str, said: switchover::ToDestination| {
        let id = journal_at_b(&world);
        let message = SwitchoverMessage::ToDestination(Envelope { migration: id, message: said });
        let mut asking = caller.call(Kind::Inquiry).unwrap();
        let inquiry = Inquiry { from: from.to_owned(), message };
        Frame::message(&inquiry).unwrap().write_to(&mut asking).unwrap();
        read_frame(&mut asking).ok().flatten()
    };
    let aborted = || switchover::ToDestination::Aborted { reason: "by another".into() };
    for from in ["host-a", "host-c"] {
        assert_eq!(asks(&other, from, aborted()), None);
        assert_eq!(asks(&other, from, switchover::ToDestination::Go { run: true }), None);
    }
    // It still exists, and ends by its own host's message.
    batch.send(&mut lane);
    assert!(world.vm(Side::B, "evil").is_some());
    drop(accepted);
    honest.assert_unharmed(&guest);
    drop(world.migrate(&guest, Side::B, &[]));
}

/// The only migration of which host B has a journal.
fn journal_at_b(world: &World) -> MigrationId {
    let dir = world.host(Side::B).run_dir.join("state/journals");
    let mut files = std::fs::read_dir(dir).unwrap();
    let path = files.next().expect("there is a journal").unwrap().path();
    MigrationId::new(path.file_stem().unwrap().to_str().unwrap()).unwrap()
}

/// A destination that sends whatever it likes, whenever it likes: the VM stays where it is, and the
/// agent goes on.
#[test]
fn destinations_that_make_no_sense() {
    let mut world = World::new(Link::unshaped());
    let guest = world.boot(&bare("192M", RATE));
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    world.kill_agent(Side::B);
    let before = rss_bytes(&world, Side::A);
    let fails = |acks: &[u64], script: fn(Connection), reason: &str| {
        let destination = false_destination(&world, acks, script);
        let why = world.refuses(Side::A, &["migrate", "web1", "host-b", "--timeout", "8"]);
        destination.join().unwrap();
        assert!(why.contains(reason), "{reason:?} is not in: {why}");
        assert!(why.len() < 100_000, "{} letters", why.len());
    };
    fails(&[], hear_out, "not released within");
    fails(&[], drop, "host-b");
    fails(
        &[],
        |mut control| {
            say(&mut control, &ToSource::DiskRoom { batches: u64::MAX });
            say(&mut control, &ToSource::Placement { mapped: vec![], inline: vec![] });
            hear_out(control);
        },
        "out of turn",
    );
    fails(
        &[],
        |mut control| {
            say(&mut control, &ToSource::Refused { reason: "no ".repeat(600_000) });
            hear_out(control);
        },
        "no no",
    );
    fails(
        &[],
        |mut control| {
            frame(
                &mut control,
                &Frame::Message(format!("[{}0]", "0,".repeat(900_000)).into_bytes()),
            );
            hear_out(control);
        },
        "a number of values",
    );
    fails(
        &[],
        |mut control| {
            frame(&mut control, &Frame::Tail(vec![0; 1 << 20]));
            hear_out(control);
        },
        "only a source does",
    );
    fails(
        &[],
        |mut control| {
            let ToSource::Prepared(mut said) = prepared() else { return };
            said.token = "g".repeat(99);
            say(&mut control, &ToSource::Prepared(said));
            hear_out(control);
        },
        "cannot be read",
    );
    fails(
        &[],
        |mut control| {
            let ToSource::Prepared(mut said) = prepared() else { return };
            said.hash = Some("crc8".to_owned());
            say(&mut control, &ToSource::Prepared(said));
            hear_out(control);
        },
        "a hash for the audit that was not offered",
    );
    fails(
        &[],
        |mut control| {
            say(&mut control, &prepared());
            say(&mut control, &prepared());
            hear_out(control);
        },
        "out of turn",
    );
    // For another migration, before its time, or both.
    fails(
        &[],
        |mut control| {
            say(&mut control, &prepared());
            let migration = MigrationId::new("another").unwrap();
            let said = Envelope { migration, message: switchover::ToSource::Running };
            say(&mut control, &ToSource::Switchover { said });
            hear_out(control);
        },
        "which was not released to it",
    );
    fails(
        &[u64::MAX],
        |mut control| {
            say(&mut control, &prepared());
            hear_out(control);
        },
        "never sent",
    );
    fails(
        &[1, 1, 0],
        |mut control| {
            say(&mut control, &prepared());
            hear_out(control);
        },
        "took back",
    );
    // Without end.
    fails(
        &[],
        |mut control| {
            say(&mut control, &prepared());
            for number in 0..NOTES {
                let text = format!("{number} {}", "x".repeat(NOTE_BYTES));
                say(&mut control, &ToSource::Note { text });
                say(&mut control, &ToSource::DiskFlushed { ticket: number, error: None });
                say(&mut control, &ToSource::DiskRoom { batches: u64::MAX - number });
                let used = ToSource::NicUse(policy_of_nonsense());
                say(&mut control, &used);
            }
            std::thread::sleep(Duration::from_millis(1500));
        },
        "host-b",
    );
    let after = rss_bytes(&world, Side::A);
    let half = NOTES * NOTE_BYTES as u64 / 2;
    assert!(after < before + half, "{before} bytes, and then {after}");
    world.start_agent(Side::B);
    world.assert_stayed(&guest, Side::A, pid);
    drop(world.migrate(&guest, Side::A, &[]));
}

/// Messages, and what each of them has at least.
const NOTES: u64 = 250;
const NOTE_BYTES: usize = 512 << 10;

/// NICs that claim to be full, and lanes at NICs that don't exist.
fn policy_of_nonsense() -> policy::pace::DestinationUse {
    let nic = policy::pace::NicUse {
        speed_bytes_per_s: Some(u64::MAX),
        all_bytes_per_s: u64::MAX,
        content_bytes_per_s: 0,
        ours_bytes_per_s: u64::MAX,
        migrations: u32::MAX,
    };
    policy::pace::DestinationUse { nics: vec![nic; 200], lanes: vec![Some(u16::MAX); 5000] }
}
