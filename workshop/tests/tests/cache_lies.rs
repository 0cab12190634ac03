//! A liar in place of the guest's helper, or a helper that dies: each VM arrives as it was, and its
//! report says what is known of it.

use api::{Phase, Report};
use end_to_end::files::{assert_cached_files, assert_files, wait_helper, with_files};
use end_to_end::hostile::own_bytes;
use end_to_end::{MIB, Moving, Side, World, until};
use lab::guest::Guest;
use lab::hosts::Link;
use marks::runs;

const NAME: &str = "web1";
/// Most memory that an agent may use, without that of its VM.
const AGENT_BYTES_MAX: u64 = 250 * MIB;
const FROM_DISKS: [&str; 3] = ["--shared-disks", "--storage", "on"];

/// Its agents have small pools, so that most of memory waits for the helper's answer.
fn world(link: Link) -> World {
    let mut world = World::new(link);
    world.tell_agents(["--pool-mib", "16"].map(str::to_owned).to_vec());
    world
}

/// Asserts that agents use no more memory than they may.
fn assert_unharmed(world: &World) {
    for side in [Side::A, Side::B] {
        let bytes = own_bytes(world, side);
        assert!(bytes < AGENT_BYTES_MAX, "{}: {bytes} bytes", side.name());
    }
}

fn says(report: &Report, text: &str) -> bool {
    report.notes.iter().any(|note| note.contains(text))
}

/// No page, or only the pages that were reported by then.
const NOT_ALL: &str = "read from storage: ";
const NOT_THE_SAME: &str = "were something else there";

#[runs(fills)]
#[test]
fn lies_cost_only_time() {
    let world = world(Link::one(500));
    let guest = world.boot(&with_files(&world));
    cannot_answer(&world, &guest);
    wrong_places(&world, &guest);
    nonsense_is_refused(&world, &guest);
    assert_cached_files(&guest);
}

/// From host B and back to it.
fn wrong_places(world: &World, guest: &Guest) {
    let cached = 2 * guest.spec.orders.files_bytes;
    let mut from = Side::B;
    for lie in ["everything", "spoiled"] {
        let report = told(world, guest, from, lie);
        from = from.other();
        println!("{lie}: {} {} {:?}", report.stored_bytes, report.storage_read_bytes, report.notes);
        assert!(report.storage_read_bytes > 0, "{lie}: {:?}", report.notes);
        assert!(says(&report, NOT_THE_SAME), "{lie}: {:?}", report.notes);
        if lie == "spoiled" {
            assert!(report.stored_bytes > 0, "{:?}", report.notes);
        } else {
            assert!(report.stored_bytes < cached / 10, "{lie}: {} bytes", report.stored_bytes);
        }
        assert_unharmed(world);
    }
    // As they are in memory; and on disk, once the liar has restored it. A wrong page would have
    // stayed wrong.
    guest.ask("helper-kill").unwrap();
    assert_files(guest);
}

/// Begins to move it, and lets nearly nothing of it pass.
fn begin_slowly(world: &World, guest: &Guest, from: Side, more: &[&str]) -> (Moving, String) {
    let args = [&FROM_DISKS[..], &["--limit", "2M"], more].concat();
    let mut moving = world.begin(guest, from, &args);
    moving.wait_for(Phase::FirstPass);
    let id = world.vm(from, NAME).unwrap().migration.expect("it moves");
    (moving, id)
}

/// Moves it, with a liar that tells this lie while most of the VM's memory waits.
fn told(world: &World, guest: &Guest, from: Side, lie: &str) -> Report {
    guest.ask(&format!("helper-lie {lie}")).unwrap();
    // What is missing is given up then.
    let is_waited_for = lie == "silent";
    let budget = if is_waited_for { &["--helper-budget", "time=4s"][..] } else { &[] };
    let (moving, id) = begin_slowly(world, guest, from, budget);
    guest.ask("helper-told").unwrap();
    if is_waited_for {
        wait_noted(world, from, &id);
    }
    unlimited(world, from, &id);
    world.arrive(guest, from, moving)
}

/// Waits until the agent has given up the rest of a helper's answer: with a silent helper, that
/// takes until its time is over. For a VM that has left by then, the agent doesn't wait, and notes
/// nothing.
fn wait_noted(world: &World, from: Side, id: &str) {
    until("what is missing is noted", || {
        let running = world.migrations(from);
        let ours = running.iter().find(|one| one.id == id);
        ours.is_some_and(|ours| ours.notes.iter().any(|note| note.contains(NOT_ALL)))
    });
}

fn unlimited(world: &World, from: Side, id: &str) {
    world.says(from, &["set", id, "--limit", "none"]);
}

/// The map is outdated: before anything is read, the guest writes to its files, past its cache, to
/// disk, and into memory alone.
#[runs(fills)]
#[test]
fn what_is_written_after_the_map_is_not_lost() {
    let world = world(Link::one(500));
    let guest = world.boot(&with_files(&world));
    guest.ask("helper-lie late").unwrap();
    let (moving, id) = begin_slowly(&world, &guest, Side::A, &["--helper-budget", "time=60s"]);
    guest.ask("helper-asked").unwrap();
    guest.ask("files-change 0 300").unwrap();
    guest.ask("files-sync").unwrap();
    guest.ask("files-direct 300 300").unwrap();
    guest.ask("files-change 600 300").unwrap();
    guest.ask("helper-go").unwrap();
    guest.ask("helper-told").unwrap();
    unlimited(&world, Side::A, &id);
    let report = world.arrive(&guest, Side::A, moving);
    println!("{} {:?}", report.stored_bytes, report.notes);
    assert!(report.stored_bytes > 0, "{:?}", report.notes);
    assert!(says(&report, NOT_THE_SAME), "{:?}", report.notes);
    assert_files(&guest);
    killed(&world, &guest, Side::B);
}

/// In the middle of its answer; and a helper that may take no time.
fn killed(world: &World, guest: &Guest, from: Side) {
    guest.ask("helper-start").unwrap();
    wait_helper(world, from, NAME);
    // A hundredth of a CPU, so that it takes long.
    let budget = ["--helper-budget", "cpu=1%,time=8s"];
    let (moving, id) = begin_slowly(world, guest, from, &budget);
    until("it is at work", || guest.ask("helper-works").unwrap() == "true");
    guest.ask("helper-kill").unwrap();
    wait_noted(world, from, &id);
    unlimited(world, from, &id);
    let report = world.arrive(guest, from, moving);
    println!("{:?}", report.notes);
    assert!(says(&report, NOT_ALL), "{:?}", report.notes);
    guest.ask("helper-start").unwrap();
    wait_helper(world, from.other(), NAME);
    let budget = [&FROM_DISKS[..], &["--helper-budget", "time=1ms"]].concat();
    let report = world.migrate(guest, from.other(), &budget);
    println!("{:?}", report.notes);
    assert!(says(&report, "--helper-budget"), "{:?}", report.notes);
    assert_cached_files(guest);
}

/// Without an end, without sense, or none; one that is cut is that of a helper that dies
/// ([`killed`]). Other answers that are refused: `page_cache::of_a_liar_is_refused`, and for what
/// QEMU has as disks `crates/qemu/src/guest_disks`.
fn nonsense_is_refused(world: &World, guest: &Guest) {
    let mut from = Side::B;
    for (lie, text) in [
        ("unknown", "QEMU has no virtio disk with the serial number files-ext4-not"),
        ("endless", "the guest's helper names more than"),
        ("silent", "no page is read from storage: "),
    ] {
        let report = told(world, guest, from, lie);
        from = from.other();
        println!("{lie}: {} {:?}", own_bytes(world, from), report.notes);
        // Pages that were reported before the lie showed may have been read.
        if lie != "endless" {
            assert_eq!((report.stored_bytes, report.storage_read_bytes), (0, 0), "{lie}");
        }
        assert!(says(&report, text), "{lie}: {:?}", report.notes);
        assert_unharmed(world);
    }
}

/// The report says why a helper can't answer also where nobody asked for pages from storage.
fn cannot_answer(world: &World, guest: &Guest) {
    guest.ask("helper-lie unable").unwrap();
    let report = world.migrate(guest, Side::A, &["--shared-disks"]);
    let why = "the guest's helper reports an error: the system refuses openat2";
    assert!(says(&report, why), "{:?}", report.notes);
}
