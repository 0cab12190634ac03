//! Lanes do for a VM that others command all that they do for one of the agents' own.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use api::{Audited, Outcome, Progress, Report};
use end_to_end::commander::{Commander, carrying, port};
use end_to_end::disk::{assert_still, image, noise, with_still_disk};
use end_to_end::{MIB, Side, World, assert_intact, bare, twin, until};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;
use lab::libvirt::WAITS_AT;
use lab::setup;
use marks::runs;

const TWO_NICS: Link = Link { nics: 2, mbit_per_s: Some(200) };

fn usual_qemu() -> std::path::PathBuf {
    setup::ensure().unwrap().qemu
}

/// Bytes that each of A's NICs has sent.
fn sent(world: &World) -> Vec<u64> {
    let host = world.host(Side::A);
    (0..host.addresses.len()).map(|nic| host.sent_by(nic).unwrap().bytes).collect()
}

fn assert_by_both(world: &World, before: &[u64], least: u64) {
    for (nic, (before, after)) in before.iter().zip(sent(world)).enumerate() {
        assert!(after - before >= least, "NIC {nic} has sent {} bytes", after - before);
    }
}

/// With TLS, and with RAM read back at the destination.
#[runs(fills)]
#[test]
fn a_disk_and_memory_by_all_nics() {
    let (world, _certificates) = World::secured(TWO_NICS);
    let written = 48 * MIB;
    let spec = with_still_disk(&world, written);
    let carry = "audit = \"deep\"\ncompress = \"off\"";
    let mut commander = Commander::with(world, spec, &usual_qemu(), ["", carry]);
    let before = sent(&commander.world);
    let mut way = commander.way(Side::A, false, 4);
    way.disk = true;
    let report = commander.migrate(Side::A, &way);
    assert_still(&image(&commander.world, Side::B), written);
    assert_deep(&report);
    assert_by_both(&commander.world, &before, 20 * MIB);
}

fn assert_deep(report: &Report) {
    let Audited::Same { pages, reread_pages, .. } = report.audit else { panic!("{report:#?}") };
    assert!(pages > 0 && reread_pages > 0, "{pages} pages, {reread_pages} read again");
    assert_eq!(report.placement, "mapped");
}

/// Bytes of the same incompressible content in each VM.
const COMMON: u64 = 48 * MIB;
const SCAN: &str = "scan-cpu = \"50%\"";

fn common(name: &str) -> GuestSpec {
    twin(name, "160M", COMMON, 0)
}

/// Moves one of the agents' own VMs.
fn move_own(world: &World, guest: &Guest, from: Side, share: &str) -> Report {
    let ended = world.begin(guest, from, &["--share", share]).wait();
    assert_eq!(ended.report.outcome, Outcome::Done, "{}", ended.said);
    ended.report
}

/// Moves one of the agents' own VMs to B again and again, until its content in common with others
/// is found there.
fn assert_found(world: &World, guest: &Guest) {
    until("what it has in common with others is found", || {
        let there = move_own(world, guest, Side::A, "host");
        let back = move_own(world, guest, Side::B, "off");
        println!("{} by name, back {}", there.named_bytes, back.named_bytes);
        there.named_bytes >= COMMON
    });
    world.assert_intact(guest);
}

#[runs(fills)]
#[test]
fn what_vms_there_have_is_not_sent() {
    let (world, _certificates) = World::secured(Link::one(500));
    let mut commander = Commander::with(world, common("web1"), &usual_qemu(), [SCAN, ""]);
    let [first, last] = [common("own1"), common("own2")].map(|own| commander.world.boot(&own));
    let sent = move_own(&commander.world, &first, Side::A, "host");
    assert!(sent.named_bytes < COMMON / 2, "{}", sent.named_bytes);
    let way = commander.way(Side::A, false, 4);
    let carried = commander.migrate(Side::A, &way);
    assert!(carried.named_bytes >= COMMON, "{carried:#?}");
    assert!(matches!(carried.audit, Audited::Same { .. }), "{:?}", carried.audit);
    assert!(carried.wire_bytes < sent.wire_bytes / 2, "{} bytes", carried.wire_bytes);
    // Other VMs find its content, also when the first one is gone.
    commander.world.says(Side::B, &["stop", "own1", "--force"]);
    assert_found(&commander.world, &last);
    assert_intact(&commander.guest);
}

/// When it begins, there is nothing to be found; then another VM arrives.
#[runs(fills)]
#[test]
fn what_comes_with_another_one_is_sent_once() {
    // Slow enough that most of one is not sent when the other begins.
    let world = World::new(Link::one(50));
    let mut commander = Commander::with(world, common("web1"), &usual_qemu(), ["", ""]);
    let own = commander.world.boot(&common("own1"));
    let way = commander.way(Side::A, false, 4);
    commander.begin(Side::A, &way);
    let moving = commander.world.begin(&own, Side::A, &["--share", "host"]);
    assert_eq!(commander.follow(Side::A), "completed", "{}", commander.logs());
    let carried = commander.arrive(Side::A);
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Done, "{}", ended.said);
    let (with, by) = (carried.named_bytes, ended.report.named_bytes);
    println!("{with} and {by} by name");
    assert!(with + by >= COMMON / 4, "{with} and {by}");
    assert!(matches!(carried.audit, Audited::Same { .. }), "{:?}", carried.audit);
    assert_intact(&own);
}

/// Moves a VM of this QEMU between hosts of one rack, where another VM has the same content.
fn shares_with_the_rack(qemu: &std::path::Path, ways: &[(Side, u8)]) {
    let mut world = World::new(Link::one(500));
    world.share_a_rack();
    // Of this size QEMU 7.2 loses no pages under TCG: no multiple of 256 KiB.
    let spec = GuestSpec { memory: "163848k".to_owned(), ..common("web1") };
    let mut commander = Commander::with(world, spec, qemu, [SCAN, ""]);
    let resident = commander.world.boot(&common("own1"));
    commander.world.wait_looked_at(Side::A, "own1");
    for (from, channels) in ways {
        let way = commander.way(*from, false, *channels);
        let carried = commander.migrate(*from, &way);
        println!("{} by name, {} from the mate", carried.named_bytes, carried.peer_bytes);
        let found = if *from == Side::A { carried.peer_bytes } else { carried.named_bytes };
        assert!(found >= COMMON * 9 / 10, "{carried:#?}");
        assert!(matches!(carried.audit, Audited::Same { .. }), "{:?}", carried.audit);
    }
    assert_intact(&resident);
}

/// The source keeps bodies meanwhile, and doesn't hold QEMU for it.
#[runs(fills)]
#[test]
fn what_another_host_of_the_rack_has_comes_from_there() {
    shares_with_the_rack(&usual_qemu(), &[(Side::A, 4)]);
}

/// With it, sections end epochs.
#[runs(fills)]
#[test]
fn with_the_oldest_qemu_what_is_there_is_not_sent() {
    let oldest = setup::ensure().unwrap().qemu_system;
    shares_with_the_rack(&oldest, &[(Side::A, 4), (Side::B, 0)]);
}

/// There was nothing to be found when it arrived, so nothing of it had a name.
#[runs(fills)]
#[test]
fn content_of_a_carried_vm_is_not_sent_again() {
    let world = World::new(Link::one(500));
    let mut commander = Commander::with(world, common("web1"), &usual_qemu(), [SCAN, ""]);
    let own = commander.world.boot(&common("own1"));
    let way = commander.way(Side::A, false, 0);
    let carried = commander.migrate(Side::A, &way);
    assert_eq!(carried.named_bytes, 0);
    assert_found(&commander.world, &own);
    assert_intact(&commander.guest);
}

/// A disk server at B that answers with what it received, reversed.
fn server(world: &World) -> JoinHandle<()> {
    let there = (WAITS_AT, port(Side::B) + 1);
    let listener = world.host(Side::B).within(|| TcpListener::bind(there).unwrap());
    thread::spawn(move || {
        let (mut disk, _) = listener.accept().unwrap();
        disk.write_all(b"NBDMAGIC").unwrap();
        let mut asked = Vec::new();
        disk.read_to_end(&mut asked).unwrap();
        asked.reverse();
        disk.write_all(&asked).unwrap();
    })
}

/// The only migration that A's agent lists.
fn only_one(world: &World) -> Progress {
    let listed = world.tells(Side::A, &["list", "--migrations", "--json"]);
    let [one] = &serde_json::from_str::<Vec<Progress>>(&listed).unwrap()[..] else {
        panic!("{listed}")
    };
    one.clone()
}

/// What was in flight on the cut lane goes by the other one, and all arrives in order. The copy is
/// listed and limited like a migration.
#[runs(fills)]
#[test]
fn a_lane_is_cut_while_a_disk_is_copied() {
    let mut world = World::new(TWO_NICS);
    carrying(&mut world);
    let server = server(&world);
    let here = ("127.7.0.2", port(Side::B) + 1);
    let mut client = world.host(Side::A).within(|| TcpStream::connect(here).unwrap());
    client.read_exact(&mut [0; 8]).unwrap();
    let before = sent(&world);
    let mut said = noise(48 << 20);
    let writer = thread::spawn({
        let (mut client, said) = (client.try_clone().unwrap(), said.clone());
        move || {
            client.write_all(&said).unwrap();
            client.shutdown(Shutdown::Write).unwrap();
        }
    });
    until("it flies", || sent(&world)[1] > before[1] + 4 * MIB);
    let disk = only_one(&world);
    assert_eq!((disk.vm.as_str(), disk.to.as_str()), ("unnamed (disk)", "host-b"));
    world.says(Side::A, &["set", &disk.id, "--limit", "900M"]);
    let cut = ["-Kt", "state", "established", "src", "10.77.1.1"];
    let output = world.host(Side::A).command("ss").args(cut).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).unwrap();
    writer.join().unwrap();
    server.join().unwrap();
    said.reverse();
    assert!(answer == said, "{} of {} bytes came back, or others", answer.len(), said.len());
    assert_by_both(&world, &before, 8 * MIB);
    let log = world.agent(Side::A).log_text();
    assert!(log.contains("lane down"), "{log}");
    until("it is over", || only_one(&world).outcome.is_some());
    let report = world.tells(Side::A, &["report", &disk.id, "--json"]);
    let report: Report = serde_json::from_str(&report).unwrap();
    assert_eq!((report.tap.as_str(), &report.outcome), ("disk", &Outcome::Done), "{report:?}");
    assert!(report.wire_bytes >= 48 << 20 && report.lanes.len() >= 2, "{report:?}");
    assert_eq!(report.bounds_changes.len(), 1);
}

/// The only network is silent until all lanes are given up: a QEMU's own connection would outlive
/// that.
fn outlives_a_silent_network(more: &[&'static str], tap: &str) {
    let world = World::new(Link::one(100));
    let mut spec = bare("384M", 200_000);
    spec.orders.random_bytes = 128 * MIB;
    let mut commander = Commander::with(world, spec, &usual_qemu(), ["", "compress = \"off\""]);
    let mut way = commander.way(Side::A, true, 0);
    way.more = more.to_vec();
    let before = sent(&commander.world)[0];
    commander.begin(Side::A, &way);
    until("it flies", || sent(&commander.world)[0] > before + 4 * MIB);
    commander.world.hosts.b.set_nic(0, false).unwrap();
    until("its lanes are given up", || {
        commander.world.agent(Side::A).log_text().contains("lane down")
    });
    commander.world.hosts.b.set_nic(0, true).unwrap();
    assert_eq!(commander.follow(Side::A), "completed", "{}", commander.logs());
    assert_eq!(commander.arrive(Side::A).tap, tap);
}

#[runs(fills)]
#[test]
fn a_silent_network_does_not_end_a_stream_that_is_split() {
    outlives_a_silent_network(&[], "classic");
}

#[runs(fills)]
#[test]
fn a_silent_network_does_not_end_a_stream_that_is_relayed() {
    outlives_a_silent_network(&["postcopy-ram"], "relayed");
}

/// The source's agent holds bytes that its client doesn't take, and heeds the operator all the same.
#[runs(fills)]
#[test]
fn a_disk_whose_client_reads_nothing_is_cancelled() {
    let mut world = World::new(Link::one(1000));
    carrying(&mut world);
    let there = (WAITS_AT, port(Side::B) + 1);
    let listener = world.host(Side::B).within(|| TcpListener::bind(there).unwrap());
    let written = Arc::<AtomicU64>::default();
    let server = thread::spawn({
        let written = Arc::clone(&written);
        move || {
            let (mut disk, _) = listener.accept().unwrap();
            while let Ok(count) = disk.write(&[7; 64 << 10]) {
                written.fetch_add(count as u64, Relaxed);
            }
        }
    });
    let here = ("127.7.0.2", port(Side::B) + 1);
    let client = world.host(Side::A).within(|| TcpStream::connect(here).unwrap());
    let mut before = 0;
    until("all buffers are full", || {
        thread::sleep(Duration::from_millis(500));
        let now = written.load(Relaxed);
        now > 0 && std::mem::replace(&mut before, now) == now
    });
    world.says(Side::A, &["cancel", &only_one(&world).id]);
    until("it is cancelled", || only_one(&world).outcome == Some(Outcome::Cancelled));
    server.join().unwrap();
    drop(client);
}

/// Both agents apply an operator's change in the middle of a migration.
#[runs(fills)]
#[test]
fn what_it_may_use_is_changed_while_it_moves() {
    let mut spec = bare("256M", 200_000);
    spec.orders.random_bytes = 96 * MIB;
    let world = World::new(Link::one(200));
    let mut commander = Commander::with(world, spec, &usual_qemu(), ["", "compress = \"off\""]);
    let way = commander.way(Side::A, false, 4);
    commander.begin(Side::A, &way);
    let mut id = String::new();
    until("it is carried", || {
        let progress = commander.progress(Side::A).filter(|one| one.wire_bytes_per_s > 0.0);
        id = progress.map(|one| one.id).unwrap_or_default();
        !id.is_empty()
    });
    let said = commander.world.tells(Side::A, &["set", &id, "--limit", "20M"]);
    assert!(said.contains("limit 20Mbit/s"), "{said}");
    until("it is held to that", || {
        commander.progress(Side::A).is_some_and(|one| one.limit == api::Limit::Bound)
    });
    commander.world.says(Side::A, &["set", &id, "--limit", "none"]);
    assert_eq!(commander.follow(Side::A), "completed", "{}", commander.logs());
    let report = commander.arrive(Side::A);
    let limits = report.bounds_changes.iter().map(|change| change.bounds.limit_bits_per_s);
    assert_eq!(limits.collect::<Vec<_>>(), ["20M".parse().ok(), None]);
}
