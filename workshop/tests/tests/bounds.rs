//! What a migration may use is bounded from outside, and changed while it runs: its share of the
//! network, its threads' priority and their CPUs.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use api::{Phase, Priority};
use end_to_end::{MIB, Moving, Side, World, bare, until};
use lab::guest::Guest;
use lab::hosts::Link;
use marks::runs;

/// A guest that takes a while at 40 Mbit/s.
fn large(world: &World) -> Guest {
    let mut spec = bare("384M", 100_000);
    spec.orders.random_bytes = 160 * MIB;
    world.boot(&spec)
}

fn fly(world: &World, guest: &Guest, args: &[&str]) -> (Moving, String) {
    let mut moving = world.begin(guest, Side::A, args);
    moving.wait_for(Phase::FirstPass);
    let id = world.vm(Side::A, "web1").and_then(|vm| vm.migration).expect("it moves");
    (moving, id)
}

/// Mbit/s that A sends on the wire over a second. Both figures are counters, of the interface and
/// of the clock. If this thread has to wait for a core, the result is too low, never too high.
fn sent_mbit_per_s(world: &World) -> f64 {
    let begun = Instant::now();
    let before = world.hosts.a.sent().unwrap().bytes;
    sleep(Duration::from_secs(1));
    let bytes = world.hosts.a.sent().unwrap().bytes - before;
    bytes as f64 * 8e-6 / begun.elapsed().as_secs_f64()
}

/// Asserts that it sends no more than its limit; on a busy machine it may send less.
fn assert_below(world: &World, limit: f64) {
    for _ in 0..3 {
        let sent = sent_mbit_per_s(world);
        println!("limit {limit}: {sent:.2} Mbit/s on the wire");
        assert!(sent <= limit * 1.05, "{sent:.2} Mbit/s instead of {limit}");
    }
}

/// Waits until it sends more than that, since nothing limits it any more.
fn wait_above(world: &World, limit: f64) {
    until(&format!("it sends more than {limit} Mbit/s"), || sent_mbit_per_s(world) > limit * 1.05);
}

#[runs(promised)]
#[test]
fn the_network() {
    let world = World::new(Link::one(200));
    let guest = large(&world);
    let (mut moving, id) = fly(&world, &guest, &["--limit", "40M", "--compress", "off"]);
    moving.wait_line("limited by --limit");
    assert_below(&world, 40.0);
    let said = world.tells(Side::A, &["set", &id, "--limit", "80M"]);
    assert!(said.contains("limit 80Mbit/s"), "{said}");
    wait_above(&world, 40.0);
    assert_below(&world, 80.0);
    world.says(Side::A, &["set", &id, "--limit", "none"]);
    wait_above(&world, 80.0);
    let report = world.arrive(&guest, Side::A, moving);
    let limits: Vec<_> =
        report.bounds_changes.iter().map(|change| change.bounds.limit_bits_per_s).collect();
    assert_eq!(limits, ["80M".parse().ok(), None]);
    assert_eq!(report.bounds.limit_bits_per_s, None);
}

/// An agent's threads: their names, nice values and CPUs.
fn threads(world: &World, side: Side) -> Vec<(String, i32, String)> {
    let tasks = format!("/proc/{}/task", world.agent(side).pid());
    let read = |task: &fs::DirEntry| {
        let file = |name: &str| fs::read_to_string(task.path().join(name)).ok();
        let (stat, status) = (file("stat")?, file("status")?);
        let (_, fields) = stat.rsplit_once(") ")?;
        // Field 19 of all; the first one here is the third.
        let nice = fields.split(' ').nth(16)?.parse().ok()?;
        let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        Some((file("comm")?.trim().to_owned(), nice, cpus.trim().to_owned()))
    };
    fs::read_dir(tasks).unwrap().filter_map(|task| read(&task.unwrap())).collect()
}

/// Whether all data threads of a side, and no others, have this nice value and these CPUs.
fn have(world: &World, side: Side, nice: i32, cpus: &str, all: &str) -> bool {
    let threads = threads(world, side);
    let mut carry = 0;
    let as_they_should = threads.iter().all(|(name, its_nice, its_cpus)| {
        let like_data = *its_nice == nice && its_cpus == cpus;
        // The scanner always hashes with the lowest priority, whatever a migration's bounds.
        let others = if name == "scan-hash" { 19 } else { 0 };
        let like_others = *its_nice == others && its_cpus == all;
        let is_data = match name.split_once('-') {
            Some(("lane", _)) => true,
            Some(("tap", number)) => number != "accept",
            // The leading thread has the same name.
            Some(("peer", _)) => like_data,
            _ => false,
        };
        carry += usize::from(is_data);
        if is_data { like_data } else { like_others }
    });
    // Two lanes at each end, and a tap at the source.
    as_they_should && carry >= if side == Side::A { 5 } else { 2 }
}

#[test]
fn the_cpus() {
    let world = World::new(Link::one(200));
    let guest = large(&world);
    let all = threads(&world, Side::A)[0].2.clone();
    let (moving, id) = fly(&world, &guest, &["--lanes", "2", "--limit", "20M", "--cpus", "0"]);
    let are = |nice: i32, cpus: &str| {
        for side in [Side::A, Side::B] {
            let what = format!("nice {nice} and CPUs {cpus} at {}", side.name());
            until(&what, || have(&world, side, nice, cpus, &all));
        }
    };
    are(5, "0");
    world.says(Side::A, &["set", &id, "--priority", "normal", "--cpus", "all"]);
    are(0, &all);
    // Tests run as root, which may do that.
    world.says(Side::A, &["set", &id, "--priority", "high"]);
    are(-5, &all);
    world.says(Side::A, &["set", &id, "--priority", "low", "--limit", "none"]);
    let report = world.arrive(&guest, Side::A, moving);
    assert_eq!((report.bounds.priority, report.bounds.cpus), (Priority::Low, None));
    assert_eq!(report.bounds_changes.len(), 3);
    // Others may say that a busy machine makes downtime long.
    let refused = report.notes.iter().any(|note| note.contains("not used"));
    assert!(!refused, "{:?}", report.notes);
}

#[test]
fn wishes_that_cannot_be_met() {
    let world = World::new(Link::one(1000));
    let guest = world.boot(&bare("256M", 1_000_000));
    let report = world.migrate(&guest, Side::A, &["--cpus", "1000"]);
    for words in ["CPUs 1000 are not used", "at the destination CPUs 1000 are not used"] {
        assert!(report.notes.iter().any(|note| note.starts_with(words)), "{:?}", report.notes);
    }
    let ended = world.refuses(Side::A, &["set", &report.id, "--limit", "10M"]);
    assert!(ended.contains("has ended"), "{ended}");
    let unknown = world.refuses(Side::A, &["set", "deadbeef", "--limit", "10M"]);
    assert!(unknown.contains("no migration `deadbeef`"), "{unknown}");
}
