//! A guest that writes faster than the link is throttled just enough, and is always released.

use std::fs;

use api::{Outcome, Prediction, Report};
use end_to_end::{MIB, Side, World, assert_fits_goal, fits_goal_bytes, guest, until};
use lab::guest::{GuestSpec, System};
use lab::hosts::Link;
use marks::runs;

/// Rate of the link, in Mbit/s; and of a guest that writes two and a half times as fast.
const LINK: u32 = 100;
const HARD: u64 = 30_000_000;
/// With a fifth of its CPU time, a writer that sleeps between its pages writes more than a fifth.
const LOW: [&str; 2] = ["--throttle-floor", "5"];

fn writer(name: &str, rate: u64) -> GuestSpec {
    let mut spec = guest("192M", rate);
    spec.name = name.to_owned();
    // What it rewrites matters.
    (spec.orders.random_bytes, spec.orders.text_bytes) = (2 * MIB, 2 * MIB);
    spec.orders.working_set_bytes = 32 * MIB;
    // As evenly as it can, so that its CPU time limits its rate.
    spec.orders.write_step_ms = 0;
    spec
}

/// The same without an operating system, which takes so little CPU time that a small share of a
/// core may not slow it: for all that needs no convergence by shares.
fn bare_writer(rate: u64) -> GuestSpec {
    GuestSpec { system: System::Bare, ..writer("web1", rate) }
}

/// A link of half the rate.
const HALF_LINK: u32 = LINK / 2;

/// For that link, a guest with half as much to write, for what lasts until there is no progress.
fn half_a_writer() -> GuestSpec {
    let mut spec = bare_writer(HARD / 2);
    spec.orders.working_set_bytes /= 2;
    spec
}

/// The cgroups of a VM's threads, an entry for each thread.
fn groups(pid: u32) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let group = |dir: std::path::PathBuf| fs::read_to_string(dir.join("cgroup")).ok();
    threads.filter_map(|thread| group(thread.unwrap().path())).collect()
}

fn is_slow(pid: u32) -> bool {
    groups(pid).iter().any(|groups| groups.contains("droveway-slow"))
}

/// Asserts that it was throttled and met its goal; `link` is the most that it may have had, in
/// Mbit/s.
fn assert_followed(report: &Report, link: u32) {
    let slowed = report.slowed.as_ref().expect("it could not be followed otherwise");
    assert!((0.05..1.0).contains(&slowed.lowest_share), "{slowed:?}");
    assert!(slowed.vcpus >= 1 && slowed.lost_s > 0.0, "{slowed:?}");
    assert!(slowed.to_s > slowed.from_s && slowed.to_s <= report.total_s, "{slowed:?}");
    assert_fits_goal(report, link);
    let first = report.samples.iter().position(|sample| sample.share < 1.0).unwrap();
    assert!(report.samples[first..].iter().any(|sample| sample.dirty_bytes_per_s > 0.0));
}

#[runs(alone, promised)]
#[test]
fn a_guest_that_is_faster_than_the_link_comes_within_the_goal() {
    let world = World::new(Link::one(LINK));
    let guest = world.boot(&writer("web1", HARD));
    let report = world.migrate(&guest, Side::A, &LOW);
    assert_eq!(report.slowed.as_ref().unwrap().by[..8], *"cgroup v");
    assert_followed(&report, LINK);
    let pid = world.vm(Side::B, "web1").unwrap().pid;
    assert!(!is_slow(pid));
}

#[runs(alone)]
#[test]
fn a_guest_that_can_be_followed_is_left_alone() {
    let world = World::new(Link::one(LINK));
    let guest = world.boot(&bare_writer(2_000_000));
    let report = world.migrate(&guest, Side::A, &[]);
    assert_eq!(report.slowed, None);
    assert!(report.samples.iter().all(|sample| sample.share == 1.0));
}

/// The VM that arrives last has the whole link when it is stopped.
#[runs(alone)]
#[test]
fn two_at_once() {
    let world = World::new(Link::one(2 * LINK));
    let guests = ["web1", "web2"].map(|name| world.boot(&writer(name, HARD)));
    let moving = guests.each_ref().map(|guest| world.begin(guest, Side::A, &LOW));
    for (guest, moving) in guests.iter().zip(moving) {
        let ended = moving.wait();
        assert_eq!(ended.report.outcome, Outcome::Done, "{}", ended.said);
        assert_followed(&ended.report, 2 * LINK);
        world.assert_intact(guest);
    }
}

#[runs(alone)]
#[test]
fn a_guest_that_may_not_be_slowed_is_not() {
    let world = World::new(Link::one(LINK));
    let guest = world.boot(&bare_writer(HARD));
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let mut moving = world.begin(&guest, Side::A, &["--throttle", "off"]);
    moving.wait_pass(4);
    assert!(!is_slow(pid));
    moving.interrupt();
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
    assert_eq!(ended.report.slowed, None);
    world.assert_stayed(&guest, Side::A, pid);
}

/// The operator cancels: the guest is released at once.
#[runs(promised)]
#[test]
fn a_migration_that_is_cancelled_leaves_nobody_slow() {
    let world = World::new(Link::one(LINK));
    let guest = world.boot(&bare_writer(HARD));
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_line("throttled to");
    assert!(is_slow(pid));
    moving.interrupt();
    assert_eq!(moving.wait().report.outcome, Outcome::Cancelled);
    assert!(!is_slow(pid));
    world.assert_stayed(&guest, Side::A, pid);
}

#[test]
fn a_destination_that_dies_leaves_nobody_slow() {
    let mut world = World::new(Link::one(LINK));
    let guest = world.boot(&bare_writer(HARD));
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_line("throttled to");
    world.kill_agent(Side::B);
    assert!(matches!(moving.wait().report.outcome, Outcome::Failed(_)));
    assert!(!is_slow(pid));
    world.start_agent(Side::B);
    world.assert_stayed(&guest, Side::A, pid);
}

#[test]
fn an_agent_that_was_killed_lets_go_what_it_slowed_when_it_starts_again() {
    let mut world = World::new(Link::one(LINK));
    let guest = world.boot(&bare_writer(HARD));
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let before = groups(pid);
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_line("throttled to");
    world.kill_agent(Side::A);
    assert!(is_slow(pid), "nobody is there to let it go");
    drop(moving.wait_any());
    world.start_agent(Side::A);
    assert!(!is_slow(pid));
    until("its threads are where they were", || groups(pid) == before);
    world.assert_stayed(&guest, Side::A, pid);
    guest.ask("rate 1000000").unwrap();
    drop(world.migrate(&guest, Side::A, &[]));
}

/// The operator decides what to do then.
#[runs(alone)]
#[test]
fn a_guest_that_can_not_be_followed_even_at_its_floor() {
    let world = World::new(Link::one(HALF_LINK));
    let guest = world.boot(&half_a_writer());
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let floor = ["--throttle-floor", "80"];
    let ended = world.begin(&guest, Side::A, &floor).wait();
    let Outcome::Failed(why) = &ended.report.outcome else { panic!("{}", ended.said) };
    for part in ["with 80 % of its CPU time", "MiB/s are delivered", "--throttle-floor"] {
        assert!(why.contains(part), "{why}");
    }
    world.assert_stayed(&guest, Side::A, pid);
    let report = world.migrate(&guest, Side::A, &[&floor[..], &["--on-stall", "stop"]].concat());
    assert!(report.stopped_bytes > fits_goal_bytes(&report, HALF_LINK), "{report:?}");
    assert!(report.notes.iter().any(|note| note.contains("longer downtime")), "{:?}", report.notes);
}

/// The operator forbids cgroups: it keeps all of its CPU time, and the report has the reason.
#[runs(alone)]
#[test]
fn a_guest_that_can_not_be_throttled_stays() {
    let mut world = World::new(Link::one(HALF_LINK));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("agent.toml");
    fs::write(&file, "cgroups = false\n").unwrap();
    world.restart_agents_with(&["--config", file.to_str().unwrap()]);
    let guest = world.boot(&half_a_writer());
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let ended = world.begin(&guest, Side::A, &[]).wait();
    let Outcome::Failed(why) = &ended.report.outcome else { panic!("{}", ended.said) };
    assert!(why.contains("with 100 % of its CPU time"), "{why}");
    let notes = &ended.report.notes;
    assert!(notes.iter().any(|note| note.contains("not to use cgroups")), "{notes:?}");
    assert_eq!(ended.report.slowed, None);
    world.assert_stayed(&guest, Side::A, pid);
    let doctor = world.tells(Side::A, &["doctor"]);
    assert!(doctor.contains("`cgroups = false`"), "{doctor}");
}

/// The prediction before a move has the same figures as the report after it.
#[runs(alone)]
#[test]
fn a_migration_is_predicted() {
    let world = World::new(Link::one(LINK));
    let guest = world.boot(&bare_writer(HARD));
    let rate = format!("{LINK}M");
    let ask = ["predict", "web1", "host-b", "--rate", &rate, "--json"];
    let hard: Prediction = serde_json::from_str(&world.tells(Side::A, &ask)).unwrap();
    assert!(!hard.free.met && hard.slowed.met && hard.share < 1.0, "{hard:?}");
    assert!(hard.dirty_bytes_per_s > hard.delivered_bytes_per_s, "{hard:?}");
    let needed = hard.needed_bytes_per_s.expect("it has to be throttled");
    assert!(needed > hard.delivered_bytes_per_s, "{hard:?}");
    assert!(hard.working_set_bytes.is_none_or(|set| set < 192 * MIB), "{hard:?}");
    guest.ask("rate 0").unwrap();
    let calm: Prediction = serde_json::from_str(&world.tells(Side::A, &ask)).unwrap();
    assert!(calm.free.met && calm.share == 1.0, "{calm:?}");
    assert_eq!(calm.needed_bytes_per_s, None);
    let said = world.refuses(Side::A, &["predict", "web1", "host-c"]);
    assert!(said.contains("no host `host-c`"), "{said}");
    world.assert_intact(&guest);
}

/// Only one of two vCPUs writes: the idle one is not throttled.
#[runs(alone)]
#[test]
fn a_vcpu_that_idles_is_left_alone() {
    let world = World::new(Link::one(LINK));
    let mut spec = writer("web1", HARD);
    spec.vcpus = 2;
    spec.orders.writer_cpu = 1;
    spec.orders.burn = true;
    let guest = world.boot(&spec);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let mut moving = world.begin(&guest, Side::A, &LOW);
    moving.wait_line("throttled to");
    let slow = groups(pid).iter().filter(|groups| groups.contains("droveway-slow")).count();
    let report = world.arrive(&guest, Side::A, moving);
    assert_followed(&report, LINK);
    // Later the other one may be throttled, too: it spins while it waits for the slow one, or the
    // guest moves its work there.
    assert_eq!(slow, 1);
}

#[test]
fn a_deadline_that_can_not_be_met_is_said_to_be() {
    let world = World::new(Link::one(LINK));
    let guest = world.boot(&writer("web1", HARD));
    let report = world.migrate(&guest, Side::A, &["--deadline", "5", LOW[0], LOW[1]]);
    assert!(report.total_s > 5.0, "{}", report.total_s);
    let late = report.notes.iter().filter(|note| note.contains("the deadline of 5 s")).count();
    assert_eq!(late, 1, "{:?}", report.notes);
}
