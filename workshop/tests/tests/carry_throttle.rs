//! A carried VM that writes faster than the link is throttled like the agent's own VMs, by its
//! vCPUs' cgroups, and is always released. QEMU is not asked to throttle it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use api::{Audited, Outcome, Progress};
use end_to_end::commander::Commander;
use end_to_end::{MIB, Side, World, bare, guest, until};
use lab::guest::GuestSpec;
use lab::hosts::Link;
use lab::setup;
use marks::runs;
use qemu::commanded::vcpu_threads;
use serde_json::json;

/// Rate of the link, in Mbit/s; and of a guest that writes two and a half times as fast.
const LINK: u32 = 100;
const HARD: u64 = 30_000_000;
/// With a fifth of its CPU time, a writer that sleeps between its pages writes more than a fifth.
const LOW: [&str; 2] = ["", "throttle-floor = 5"];
/// The first pass, and those after it until it is known that they don't shrink.
const PASSES_MAX: Duration = Duration::from_secs(100);
/// A machine type whose RAM sections each end an epoch, and QEMU's newest, which marks epochs.
const OLD: &str = "pc-q35-7.2";
const NEW: &str = "q35";

fn commander(machine: &str, agent: [&str; 2]) -> Commander {
    let mut spec = guest("192M", HARD);
    machine.clone_into(&mut spec.machine);
    of_guest(spec, agent)
}

/// The same without an operating system, which takes so little CPU time that neither a small share
/// of a core nor a busy machine slows it: for all that needs no convergence.
fn bare_commander(agent: [&str; 2]) -> Commander {
    of_guest(bare("192M", HARD), agent)
}

fn of_guest(mut spec: GuestSpec, agent: [&str; 2]) -> Commander {
    // What it rewrites matters.
    (spec.orders.random_bytes, spec.orders.text_bytes) = (2 * MIB, 2 * MIB);
    spec.orders.working_set_bytes = 32 * MIB;
    // As evenly as it can, so that its CPU time limits its rate.
    spec.orders.write_step_ms = 0;
    let program = setup::ensure().unwrap().qemu;
    Commander::with(World::new(Link::one(LINK)), spec, &program, agent)
}

/// A vCPU's thread in a cgroup of its own with a quota, as libvirt makes one for each.
struct Vcpu {
    pid: u32,
    thread: u32,
    dir: PathBuf,
    threads_above: PathBuf,
    quota: PathBuf,
    group: String,
    quota_before: String,
}

impl Vcpu {
    fn of(commander: &Commander) -> Self {
        Self::at(commander, Side::A)
    }

    fn at(commander: &Commander, side: Side) -> Self {
        let pid = commander.at(side).pid();
        let [thread] = vcpu_threads(pid)[..] else { panic!("it has one vCPU") };
        let groups = groups(pid, thread);
        let first = Path::new("/sys/fs/cgroup/cpu");
        let is_first = first.join("tasks").exists();
        let is_its = |line: &&str| {
            let controllers = line.split(':').nth(1).unwrap();
            if is_first {
                controllers.split(',').any(|it| it == "cpu")
            } else {
                controllers.is_empty()
            }
        };
        let own = groups.lines().find(is_its).and_then(|line| line.splitn(3, ':').nth(2)).unwrap();
        let root = if is_first { first } else { Path::new("/sys/fs/cgroup") };
        let parent = root.join(own.trim_start_matches('/'));
        let dir = parent.join(format!("vcpu-of-{pid}"));
        fs::create_dir(&dir).unwrap();
        let (threads, quota, text) = if is_first {
            ("tasks", "cpu.cfs_quota_us", "95000")
        } else {
            fs::write(dir.join("cgroup.type"), "threaded").unwrap();
            fs::write(parent.join("cgroup.subtree_control"), "+cpu").unwrap();
            ("cgroup.threads", "cpu.max", "95000 100000")
        };
        let quota = dir.join(quota);
        fs::write(&quota, text).unwrap();
        fs::write(dir.join(threads), thread.to_string()).unwrap();
        let quota_before = fs::read_to_string(&quota).unwrap();
        let group = self::groups(pid, thread);
        assert!(group.contains("vcpu-of-"), "{group}");
        let threads_above = parent.join(threads);
        Self { pid, thread, dir, threads_above, quota, group, quota_before }
    }

    fn is_slow(&self) -> bool {
        let groups = groups(self.pid, self.thread);
        let ours = format!("vcpu-of-{0}/droveway-slow-{0}", self.pid);
        assert!(groups == self.group || groups.contains(&ours), "{groups}");
        groups.contains(&ours)
    }

    /// The agent may learn of the migration's end after this test.
    fn assert_as_before(&self) {
        until("it is let go", || groups(self.pid, self.thread) == self.group);
        until("our group is gone", || {
            !self.dir.join(format!("droveway-slow-{}", self.pid)).exists()
        });
        assert_eq!(fs::read_to_string(&self.quota).unwrap(), self.quota_before);
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        // The thread may have ended with its QEMU.
        let _ = fs::write(&self.threads_above, self.thread.to_string());
        let _ = fs::remove_dir(&self.dir);
    }
}

fn groups(pid: u32, thread: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/task/{thread}/cgroup")).unwrap()
}

/// Waits until the agent reports this of its migration: after the first pass, and some more.
fn wait_for(commander: &Commander, what: &str, is_so: impl Fn(&Progress) -> bool) {
    let end = Instant::now() + PASSES_MAX;
    loop {
        let progress = commander.progress(Side::A);
        if progress.as_ref().is_some_and(&is_so) {
            return;
        }
        let goes_on = progress.as_ref().is_none_or(|progress| progress.outcome.is_none());
        assert!(
            goes_on && Instant::now() < end,
            "not until it ended, or for {PASSES_MAX:?}: {what}: {progress:?}\n{}",
            commander.logs()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn wait_throttled(commander: &Commander, vcpu: &Vcpu) {
    wait_for(commander, "it is throttled", |progress| progress.share < 1.0);
    until("its vCPU is in our group", || vcpu.is_slow());
}

/// Moves it, with these capabilities besides the usual ones.
fn converges(commander: &mut Commander, from: Side, channels: u8, more: &[&'static str]) {
    let vcpu = Vcpu::at(commander, from);
    let mut way = commander.way(from, false, channels);
    way.more = more.to_vec();
    // If QEMU measured a high rate for a moment, it could otherwise stop the VM with all that it
    // writes left.
    let limit = json!({ "downtime-limit": 100 });
    commander.at(from).qmp.execute("migrate-set-parameters", limit).unwrap();
    commander.begin(from, &way);
    let ended = commander.follow(from);
    assert_eq!(ended, "completed", "{}", commander.logs());
    vcpu.assert_as_before();
    let report = commander.arrive(from);
    let slowed = report.slowed.as_ref().unwrap_or_else(|| {
        panic!("it could not be followed otherwise: {:#?}\n{}", report, commander.logs())
    });
    assert_eq!(slowed.by[..8], *"cgroup v");
    assert!((0.05..1.0).contains(&slowed.lowest_share), "{slowed:?}");
    assert!(slowed.vcpus == 1 && slowed.lost_s > 0.0, "{slowed:?}");
    assert!(slowed.to_s > slowed.from_s && slowed.to_s <= report.total_s, "{slowed:?}");
    assert!(matches!(report.audit, Audited::Same { .. }), "{:?}", report.audit);
    let counted = report.samples.iter().filter(|sample| sample.dirty_bytes_per_s > 0.0).count();
    assert!(counted > 0 && report.passes > 2, "{} {counted}", report.passes);
}

#[runs(alone, promised)]
#[test]
fn with_multifd_it_converges() {
    converges(&mut commander(NEW, LOW), Side::A, 4, &[]);
}

#[runs(alone)]
#[test]
fn with_multifd_whose_epochs_are_sections_it_converges() {
    converges(&mut commander(OLD, LOW), Side::A, 4, &[]);
}

/// And back with a QEMU that waits until it is told that it may stop the VM.
#[runs(alone)]
#[test]
fn with_a_classic_stream_it_converges() {
    let mut commander = commander(NEW, LOW);
    converges(&mut commander, Side::A, 0, &[]);
    converges(&mut commander, Side::B, 4, &["switchover-ack"]);
}

/// QEMU then decides, as without the agents.
#[runs(alone)]
#[test]
fn one_whose_qemu_waits_in_vain_is_told_that_it_may_stop_the_vm() {
    let mut commander = bare_commander(["", "throttle = \"off\""]);
    let mut way = commander.way(Side::A, false, 4);
    way.more.push("switchover-ack");
    commander.begin(Side::A, &way);
    wait_for(&commander, "it may stop the VM", |progress| {
        progress.notes.iter().any(|note| note.contains("QEMU waited"))
    });
    drop(commander.at(Side::A).qmp.execute("migrate_cancel", json!({})));
    assert_ne!(commander.follow(Side::A), "completed");
    commander.assert_stayed(Side::A);
}

#[runs(alone)]
#[test]
fn one_that_is_cancelled_is_not_left_slow() {
    let mut commander = bare_commander(LOW);
    let vcpu = Vcpu::of(&commander);
    let way = commander.way(Side::A, false, 4);
    commander.begin(Side::A, &way);
    wait_throttled(&commander, &vcpu);
    drop(commander.at(Side::A).qmp.execute("migrate_cancel", json!({})));
    // QEMU may report its own cancelling as a failure first.
    assert_ne!(commander.follow(Side::A), "completed");
    let report = commander.report(Side::A);
    assert!(matches!(report.outcome, Outcome::Failed(_)), "{:?}", report.outcome);
    assert!(report.slowed.is_some());
    vcpu.assert_as_before();
    commander.assert_stayed(Side::A);
}

#[runs(alone)]
#[test]
fn an_agent_that_was_killed_lets_it_go_when_it_starts_again() {
    let mut commander = bare_commander(LOW);
    let vcpu = Vcpu::of(&commander);
    let way = commander.way(Side::A, false, 0);
    commander.begin(Side::A, &way);
    wait_throttled(&commander, &vcpu);
    commander.world.kill_agent(Side::A);
    assert_eq!(commander.follow(Side::A), "failed");
    assert!(vcpu.is_slow(), "nobody is there to let it go");
    commander.world.start_agent(Side::A);
    vcpu.assert_as_before();
    commander.assert_stayed(Side::A);
}

/// The agent's file forbids it, in either of two ways, and the report says so.
#[runs(alone)]
#[test]
fn one_that_may_not_be_throttled_is_not() {
    for (agent, why) in [
        (["", "throttle = \"off\""], "`throttle` is off under [carry]"),
        (["cgroups = false", ""], "configured not to use cgroups"),
    ] {
        let mut commander = bare_commander(agent);
        let vcpu = Vcpu::of(&commander);
        let way = commander.way(Side::A, false, 0);
        commander.begin(Side::A, &way);
        wait_for(&commander, "why it is not throttled", |progress| {
            assert!(!vcpu.is_slow());
            progress.notes.iter().any(|note| note.contains(why))
        });
        drop(commander.at(Side::A).qmp.execute("migrate_cancel", json!({})));
        assert_ne!(commander.follow(Side::A), "completed");
        let report = commander.report(Side::A);
        assert_eq!(report.slowed, None);
        assert!(report.samples.iter().all(|sample| sample.share == 1.0));
        vcpu.assert_as_before();
        commander.assert_stayed(Side::A);
    }
}
