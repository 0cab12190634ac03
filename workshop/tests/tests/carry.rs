//! Migrations that another program commands, as libvirt does: carried by two agents between QEMUs
//! that they have not started, whatever breaks.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::thread;

use api::{Audited, Event, Happening, Outcome, Progress, Report};
use end_to_end::commander::{Commander, carrying, port};
use end_to_end::{MIB, Side, World, bare, note, until};
use lab::hosts::Link;
use lab::libvirt::WAITS_AT;
use lab::setup::{self, Qemu};
use marks::runs;
use qemu::lost_writes::WHY;
use serde_json::json;

/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const MAPPED: &str = "262296k";
/// Blocks below 24 MiB are placed inline.
const INLINE: &str = "20632k";
const RATE: u64 = 2_000_000;
/// A machine type whose RAM sections each end an epoch, and QEMU's newest, which marks epochs.
const OLD: &str = "pc-q35-7.2";
const NEW: &str = "q35";

fn commander(link: u32, memory: &str, qemu: &Qemu, machine: &str) -> Commander {
    let mut spec = bare(memory, RATE);
    machine.clone_into(&mut spec.machine);
    if memory == INLINE {
        (spec.orders.random_bytes, spec.orders.text_bytes) = (2 * MIB, 2 * MIB);
        spec.orders.working_set_bytes = 4 * MIB;
    }
    Commander::new(World::new(Link::one(link)), spec, &qemu.program)
}

/// From the oldest to the newest.
fn qemus() -> Vec<Qemu> {
    setup::qemus(&setup::ensure().unwrap()).unwrap()
}

/// The lab's usual QEMU.
fn usual() -> Qemu {
    let kit = setup::ensure().unwrap();
    Qemu { program: kit.qemu, version: kit.qemu_version }
}

fn assert_carried(report: &Report, tap: &str, placement: &str) {
    assert_eq!(
        (report.tap.as_str(), report.placement.as_str()),
        (tap, placement),
        "{:?}",
        report.notes
    );
    assert_eq!(report.vm, "web1");
    assert!(matches!(report.audit, Audited::Same { .. }), "{:?}", report.audit);
    assert!(report.body_bytes >= 8 * MIB, "{}", report.body_bytes);
}

/// Whether a move goes by a path or by ports, and its channels: both kinds of stream, in both ways.
const WAYS: [(bool, u8); 4] = [(false, 0), (true, 4), (true, 0), (false, 4)];

/// There and back, in these ways.
fn everywhere(memory: &str, qemu: &Qemu, machine: &str, ways: &[(bool, u8)]) {
    let mut commander = commander(1000, memory, qemu, machine);
    let placement = if memory == MAPPED { "mapped" } else { "inline" };
    let sides = [Side::A, Side::B].into_iter().cycle();
    let loses = commander.world.kit.loses_writes(qemu);
    for (from, &(by_path, channels)) in sides.zip(ways) {
        let way = commander.way(from, by_path, channels);
        let report = commander.migrate(from, &way);
        assert_carried(&report, if channels > 0 { "multifd" } else { "classic" }, placement);
        let notes = report.notes.iter().any(|note| note == WHY);
        assert_eq!(notes, loses, "{:?}", report.notes);
    }
}

#[test]
fn with_the_oldest_qemu() {
    everywhere(MAPPED, &qemus()[0], OLD, &WAYS[..2]);
}

#[runs(promised)]
#[test]
fn with_the_usual_qemu() {
    everywhere(MAPPED, &usual(), NEW, &WAYS);
}

#[runs(promised)]
#[test]
fn with_the_newest_qemu() {
    everywhere(MAPPED, qemus().last().unwrap(), OLD, &WAYS[..2]);
}

#[test]
fn inline_with_the_oldest_qemu() {
    everywhere(INLINE, &qemus()[0], OLD, &WAYS[..2]);
}

#[test]
fn inline_with_the_usual_qemu() {
    everywhere(INLINE, &usual(), OLD, &WAYS[..2]);
}

#[test]
fn inline_with_the_newest_qemu() {
    everywhere(INLINE, qemus().last().unwrap(), NEW, &WAYS[..2]);
}

/// What libvirt sets at both ends from 9.6 on: QEMU stops no running VM before the destination
/// permits it.
const WAITS: [&str; 1] = ["switchover-ack"];

fn says_that_it_waited(report: &Report) -> bool {
    report.notes.iter().any(|note| note.contains("switchover-ack"))
}

/// There and back, with both kinds of stream. QEMU 11.1 gets no permission, and waits for none.
fn waiting(qemu: &Qemu, waits: bool) {
    let mut commander = commander(200, MAPPED, qemu, NEW);
    for (from, channels) in [(Side::A, 0), (Side::B, 4)] {
        let mut way = commander.way(from, false, channels);
        way.more = WAITS.to_vec();
        let report = commander.migrate(from, &way);
        assert_carried(&report, if channels > 0 { "multifd" } else { "classic" }, "mapped");
        assert_eq!(says_that_it_waited(&report), waits, "{:?}", report.notes);
    }
}

#[test]
fn a_qemu_that_waits_is_told_when_it_may_stop_the_vm() {
    waiting(&usual(), true);
}

#[test]
fn a_newer_qemu_waits_for_nothing() {
    waiting(qemus().last().unwrap(), false);
}

/// QEMU doesn't wait for a paused VM, and would get the permission after the end.
#[test]
fn a_vm_that_is_paused_is_not_waited_for() {
    let mut commander = commander(200, MAPPED, &usual(), NEW);
    let mut way = commander.way(Side::A, false, 4);
    way.more = WAITS.to_vec();
    commander.at(Side::A).qmp.execute("stop", json!({})).unwrap();
    let report = commander.migrate(Side::A, &way);
    assert_carried(&report, "multifd", "mapped");
}

#[test]
fn cancelled_while_qemu_waits() {
    broken(Fault::Cancel, 4, &WAITS);
}

#[test]
fn the_sources_agent_dies_while_qemu_waits() {
    broken(Fault::Agent(Side::A), 0, &WAITS);
}

/// What breaks, or is cancelled.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Cancel,
    CancelHere,
    Agent(Side),
    DestinationQemu,
}

/// The VM stays, whatever breaks in the middle; and moves after that.
fn broken_by(fault: Fault, channels: u8) {
    broken(fault, channels, &[]);
}

/// The same with more capabilities.
fn broken(fault: Fault, channels: u8, more: &[&'static str]) {
    let mut commander = commander(48, MAPPED, &usual(), NEW);
    let mut way = commander.way(Side::A, false, channels);
    way.more = more.to_vec();
    commander.begin(Side::A, &way);
    let on_its_way = || commander.progress(Side::A).is_some_and(|one| one.percent > 5.0);
    end_to_end::until("pages come", on_its_way);
    match fault {
        Fault::Cancel => drop(commander.at(Side::A).qmp.execute("migrate_cancel", json!({}))),
        Fault::CancelHere => {
            let text = commander.world.tells(Side::A, &["list", "--migrations", "--json"]);
            let listed: Vec<api::Progress> = serde_json::from_str(&text).unwrap();
            commander.world.says(Side::A, &["cancel", &listed[0].id]);
        }
        Fault::Agent(side) => commander.world.kill_agent(side),
        Fault::DestinationQemu => {
            commander.qemus[Side::B as usize].as_mut().unwrap().end();
        }
    }
    let ended = commander.follow(Side::A);
    // QEMU shuts its socket down before it reports that it is cancelling, and may report that as a
    // failure first.
    let expected = ended == "failed" || matches!(fault, Fault::Cancel) && ended == "cancelled";
    assert!(expected, "{ended}: {}", commander.logs());
    commander.assert_stayed(Side::A);
    match fault {
        Fault::Agent(side) => commander.world.start_agent(side),
        Fault::CancelHere => assert_eq!(commander.report(Side::A).outcome, Outcome::Cancelled),
        _ => {
            let outcome = commander.report(Side::A).outcome;
            assert!(matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
        }
    }
    // It writes as fast as the link carries.
    commander.guest.ask("rate 100000").unwrap();
    drop(commander.migrate(Side::A, &way));
}

#[test]
fn cancelled_by_the_commander() {
    broken_by(Fault::Cancel, 0);
}

#[test]
fn cancelled_by_the_commander_with_multifd() {
    broken_by(Fault::Cancel, 4);
}

#[test]
fn cancelled_at_the_agent() {
    broken_by(Fault::CancelHere, 4);
}

#[test]
fn the_sources_agent_dies() {
    broken_by(Fault::Agent(Side::A), 4);
}

#[test]
fn the_destinations_agent_dies() {
    broken_by(Fault::Agent(Side::B), 4);
}

#[test]
fn the_destinations_agent_dies_with_a_classic_stream() {
    broken_by(Fault::Agent(Side::B), 0);
}

#[test]
fn the_destinations_qemu_dies() {
    broken_by(Fault::DestinationQemu, 0);
}

#[test]
fn the_destinations_qemu_dies_with_multifd() {
    broken_by(Fault::DestinationQemu, 4);
}

/// Without an agent there, and without a QEMU that waits there.
#[test]
fn without_a_recipient_the_vm_stays() {
    let mut commander = commander(1000, MAPPED, &usual(), NEW);
    let way = commander.way(Side::A, false, 4);
    let mut elsewhere = way.clone();
    elsewhere.uris[0] = elsewhere.uris[0].replace("49216", "49219");
    commander.begin(Side::A, &elsewhere);
    assert_eq!(commander.follow(Side::A), "failed", "{}", commander.logs());
    commander.qemus[Side::B as usize] = None;
    commander.world.kill_agent(Side::B);
    commander.begin(Side::A, &way);
    assert_eq!(commander.follow(Side::A), "failed", "{}", commander.logs());
    commander.qemus[Side::B as usize] = None;
    end_to_end::assert_intact(&commander.guest);
    commander.world.start_agent(Side::B);
    drop(commander.migrate(Side::A, &way));
}

/// As where a migration was given the port of another VM.
#[test]
fn a_qemu_that_waits_for_another_vm_does_not_get_this_one() {
    let mut commander = commander(1000, MAPPED, &usual(), NEW);
    let way = commander.way(Side::A, false, 0);
    commander.uuid = "4dea22b3-1d52-d8f3-2516-782e98ab3fa1";
    commander.expect(Side::A, &way);
    drop(commander.refused(Side::A, &way));
    let log = commander.world.agent(Side::A).log_text();
    assert!(log.contains("the QEMU that waits at host-b is for another one, web1"), "{log}");
}

/// A stream that may switch to post-copy is passed through as it is.
#[test]
fn a_stream_that_may_turn_to_postcopy_is_relayed() {
    let mut commander = commander(1000, MAPPED, &usual(), NEW);
    let mut way = commander.way(Side::A, true, 0);
    way.more = vec!["postcopy-ram"];
    let report = commander.migrate(Side::A, &way);
    assert_eq!(report.tap, "relayed");
    assert!(report.notes.iter().any(|note| note.contains("post-copy")), "{:?}", report.notes);
}

/// From 7.1 on QEMU can have a connection for urgent pages of a post-copy. With QEMU 7.x, and with
/// machine types up to 7.2, it connects when the migration begins, and says nothing until it turns
/// to post-copy.
#[test]
fn a_connection_for_post_copy_may_be_silent() {
    let mut commander = commander(1000, MAPPED, &usual(), OLD);
    let mut way = commander.way(Side::A, false, 0);
    way.more = vec!["postcopy-ram", "postcopy-preempt"];
    assert_eq!(commander.migrate(Side::A, &way).tap, "relayed");
}

/// The newest QEMU, if it has multifd with post-copy: from 10.1 on.
fn with_both() -> Option<Qemu> {
    let newest = qemus().pop().unwrap();
    if (newest.version.major, newest.version.minor) < (10, 1) {
        note("no QEMU here has multifd with post-copy: agents were not tried with both");
        return None;
    }
    Some(newest)
}

/// All migrations that host A's agent lists.
fn listed(commander: &Commander) -> Vec<Progress> {
    let listed = commander.world.tells(Side::A, &["list", "--migrations", "--json"]);
    serde_json::from_str(&listed).unwrap()
}

/// Follows the events of host A from now on.
fn follow_events(commander: &Commander) -> Child {
    let world = &commander.world;
    let mut command = world.agent(Side::A).command(world.host(Side::A), &["events", "--json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("following"), "{line}");
    child
}

/// Its channels are passed through one by one.
#[test]
fn a_stream_with_channels_that_may_turn_to_postcopy_is_relayed() {
    let Some(newest) = with_both() else { return };
    let mut commander = commander(1000, MAPPED, &newest, NEW);
    let mut way = commander.way(Side::A, false, 4);
    way.more = vec!["postcopy-ram"];
    let mut events = follow_events(&commander);
    drop(commander.migrate(Side::A, &way));
    until("all of its connections are over", || {
        let listed = listed(&commander);
        assert_eq!(listed.len(), 5, "{listed:?}");
        assert!(listed.iter().all(|one| one.vm == "web1"), "{listed:?}");
        listed.iter().all(|one| one.outcome == Some(Outcome::Done))
    });

    // Only the migration has events.
    let mut main = None;
    for line in BufReader::new(events.stdout.take().unwrap()).lines() {
        match serde_json::from_str::<Event>(&line.unwrap()).unwrap().what {
            Happening::MigrationBegan { migration, .. } => {
                assert_eq!(main.replace(migration), None, "it began twice");
            }
            Happening::MigrationPhase { migration, .. } => assert_eq!(main, Some(migration)),
            Happening::MigrationEnded { .. } => break,
            _ => {}
        }
    }
    events.kill().unwrap();
    events.wait().unwrap();
}

/// QEMU, which may wait for ever if it loses a channel before its main connection, loses only that.
#[test]
fn the_destinations_agent_dies_with_channels_that_are_relayed() {
    let Some(newest) = with_both() else { return };
    let mut commander = commander(48, MAPPED, &newest, NEW);
    let mut way = commander.way(Side::A, false, 4);
    way.more = vec!["postcopy-ram"];
    commander.begin(Side::A, &way);
    until("all of its connections are carried", || listed(&commander).len() == 5);
    commander.world.kill_agent(Side::B);
    assert_eq!(commander.follow(Side::A), "failed", "{}", commander.logs());
    commander.assert_stayed(Side::A);
    commander.world.start_agent(Side::B);
    commander.guest.ask("rate 100000").unwrap();
    drop(commander.migrate(Side::A, &way));
}

/// Without a return path, QEMU completes before it is known whether the VM was loaded, so lanes and
/// pools must not hold any of it back.
#[test]
fn a_stream_that_nobody_answers_is_relayed() {
    let mut commander = commander(1000, MAPPED, &usual(), NEW);
    let mut way = commander.way(Side::A, true, 0);
    way.without = vec!["return-path"];
    let report = commander.migrate(Side::A, &way);
    assert_eq!(report.tap, "relayed");
    assert!(report.notes.iter().any(|note| note.contains("return-path")), "{:?}", report.notes);
}

/// Pages that QEMU compresses itself, from the second time on that it sends a page, are passed on
/// as they are: by then most pages have gone by lanes.
#[test]
fn pages_that_come_as_differences_are_passed_on() {
    let mut commander = commander(48, MAPPED, &usual(), NEW);
    let mut way = commander.way(Side::A, false, 0);
    way.more = vec!["xbzrle"];
    let report = commander.migrate(Side::A, &way);
    assert_carried(&report, "classic", "mapped");
    assert!(report.notes.iter().any(|note| note.contains("xbzrle")), "{:?}", report.notes);
}

/// QEMU before 9.1 can compress all pages itself, but for the first of each block.
#[test]
fn pages_that_qemu_compresses_are_passed_on() {
    let qemus = qemus();
    let oldest = &qemus[0];
    if (oldest.version.major, oldest.version.minor) >= (9, 1) {
        note("no QEMU here compresses its stream: agents were not tried with that");
        return;
    }
    let mut commander = commander(200, MAPPED, oldest, OLD);
    let mut way = commander.way(Side::A, false, 0);
    way.more = vec!["compress"];
    let report = commander.migrate(Side::A, &way);
    assert_eq!(report.tap, "classic", "{:?}", report.notes);
    let says_so = |note: &String| note.contains("capability compress");
    assert!(report.notes.iter().any(says_so), "{:?}", report.notes);
}

/// A disk server greets its client, and both send much at the same time. When one closes, the other
/// sees it.
#[test]
fn what_a_disk_server_and_its_client_say_is_passed_on() {
    const GREETING: &[u8] = b"NBDMAGICIHAVEOPT";
    const BYTES: usize = 4 << 20;
    let mut world = World::new(Link::one(1000));
    carrying(&mut world);
    let there = (WAITS_AT, port(Side::B) + 1);
    let listener = world.host(Side::B).within(|| TcpListener::bind(there).unwrap());
    let server = thread::spawn(move || {
        for _ in 0..2 {
            let (mut disk, _) = listener.accept().unwrap();
            disk.write_all(GREETING).unwrap();
            let mut asked = Vec::new();
            disk.read_to_end(&mut asked).unwrap();
            asked.reverse();
            disk.write_all(&asked).unwrap();
        }
    });
    let here = ("127.7.0.2", port(Side::B) + 1);
    // One after the other, on the same port.
    for seed in [1u8, 2] {
        let mut client = world.host(Side::A).within(|| TcpStream::connect(here).unwrap());
        let mut greeting = [0; GREETING.len()];
        client.read_exact(&mut greeting).unwrap();
        assert_eq!(greeting, GREETING);
        let mut said: Vec<u8> = (0..BYTES).map(|at| at.to_le_bytes()[1] ^ seed).collect();
        client.write_all(&said).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).unwrap();
        said.reverse();
        assert!(answer == said, "{} bytes came back", answer.len());
    }
    server.join().unwrap();
}

/// A user who may not connect is turned away before anything is carried.
#[test]
fn only_root_and_the_user_of_qemus_may_connect() {
    let mut world = World::new(Link::one(1000));
    carrying(&mut world);
    let script = format!(
        "exec 3<>/dev/tcp/127.7.0.2/{}; echo QEVM >&3; read -r line <&3; echo \"over $?\"",
        port(Side::B)
    );
    let mut command = world.host(Side::A).command("setpriv");
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups", "bash", "-c", &script];
    let output = command.args(nobody).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("over 1"), "{output:?}");
    // One line for all who are waiting, after they were closed.
    let log = || world.agent(Side::A).log_text();
    until("the log has the rejection", || log().contains("rejected a connection"));
}
