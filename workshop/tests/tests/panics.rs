//! A data thread of an agent panics, at either end. The migration ends with that reason, the VM
//! stays, and the agent can move it again.

use std::fs;

use api::Outcome;
use end_to_end::disk::{assert_still, image, with_still_disk};
use end_to_end::files::{Export, Reached, assert_cached_files, export, with_files_by};
use end_to_end::{MIB, Side, World, bare};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Link, RUN_DIR};
use marks::runs;

/// Agents whose threads can be made to panic, and a guest.
struct Faulty {
    world: World,
    guest: Guest,
    _export: Option<Export>,
}

impl Faulty {
    fn new(prepare: impl Fn(&World) -> (GuestSpec, Option<Export>)) -> Self {
        let mut world = World::new(Link::one(150));
        world.start_agents_by(&["env", &format!("DROVEWAY_PANIC_FILE={RUN_DIR}/panic")]);
        for side in [Side::A, Side::B] {
            world.kill_agent(side);
            world.start_agent(side);
        }
        let (spec, export) = prepare(&world);
        let guest = world.boot(&spec);
        Self { world, guest, _export: export }
    }

    /// Has the next thread at `side` with this prefix panic when it has something to do.
    fn panics(&self, side: Side, thread: &str, says: &[&str], args: &[&str]) {
        let Self { world, guest, .. } = self;
        let pid = world.vm(Side::A, "web1").unwrap().pid;
        let file = world.host(side).inside("panic");
        fs::write(&file, thread).unwrap();
        let ended = world.begin(guest, Side::A, args).wait();
        assert!(!file.exists(), "no {thread} came by: {}", ended.said);
        let Outcome::Failed(why) = &ended.report.outcome else {
            panic!("{thread}: {}", ended.said)
        };
        let log = world.agent(side).log_text();
        let is_said = says.iter().any(|text| why.contains(text));
        assert!(is_said, "{thread}: {why}\n{log}");
        assert!(why.contains("The VM stays where it was"), "{why}");
        world.assert_stayed(guest, Side::A, pid);
        world.assert_nothing_left(Side::B);
    }
}

fn panicked(thread: &str) -> String {
    format!("its thread {thread}")
}

#[runs(fills)]
#[test]
fn of_threads_that_carry_pages() {
    let faulty = Faulty::new(|_| (bare("128M", 1_000_000), None));
    for (side, thread) in [
        (Side::B, "feeder"),
        (Side::A, "tap-"),
        (Side::A, "sampler"),
        (Side::A, "lane-0-send"),
        (Side::A, "lane-0-ack"),
        (Side::B, "peer-"),
    ] {
        faulty.panics(side, thread, &[&panicked(thread)], &[]);
    }
    drop(faulty.world.migrate(&faulty.guest, Side::A, &[]));
}

#[runs(fills)]
#[test]
fn of_threads_that_read_pages_from_disks() {
    let faulty = Faulty::new(|world| {
        let spec = with_files_by(world, Reached::Nbd);
        (spec, Some(export(world)))
    });
    let args = ["--shared-disks", "--share", "host", "--storage", "auto"];
    for (side, thread) in [(Side::A, "ahead"), (Side::B, "storage-"), (Side::B, "late")] {
        faulty.panics(side, thread, &[&panicked(thread)], &args);
    }
    drop(faulty.world.migrate(&faulty.guest, Side::A, &args));
    assert_cached_files(&faulty.guest);
}

#[runs(fills)]
#[test]
fn of_threads_that_carry_disks() {
    // It is copied once for each thread.
    let written = 8 * MIB;
    let faulty = Faulty::new(|world| (with_still_disk(world, written), None));
    let args = ["--disks", "all", "--create-disks"];
    for (side, thread) in [
        (Side::A, "disk-tap-"),
        (Side::A, "disk-mirrors"),
        (Side::A, "disk-settle"),
        (Side::B, "disk-sink-"),
        (Side::B, "disk-room"),
        (Side::B, "disk-flush"),
    ] {
        faulty.panics(side, thread, &[&panicked(thread)], &args);
    }
    // It has the end of its connection to the disk's server reported too; either may come first.
    let thread = "disk-data";
    faulty.panics(Side::B, thread, &["disk data cannot be written", &panicked(thread)], &args);
    drop(faulty.world.migrate(&faulty.guest, Side::A, &args));
    assert_still(&image(&faulty.world, Side::B), written);
}
