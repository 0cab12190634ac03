//! Memory that the guest reports as free, by a balloon that `droveway run` adds.

use api::{FreeMemory, Outcome, Phase, Prediction, Report};
use end_to_end::commander::Commander;
use end_to_end::{MIB, Side, World, guest, own_qmp_argument};
use lab::guest::GuestSpec;
use lab::hosts::Link;
use lab::setup;
use marks::runs;
use serde_json::json;

const FREED: u64 = 96 * MIB;
/// What the guest frees where little is enough.
const LITTLE: u64 = 48 * MIB;
const MEMORY: &str = "512M";
/// The least of which doctor says that all of it is read.
const LARGE: &str = "1G";

/// So much shared memory, as virtiofs and vhost-user need it, part of which was used once.
fn spec(memory: &str, freed: u64) -> GuestSpec {
    let mut spec = guest(memory, 1_000_000);
    spec.machine = "q35,memory-backend=ram".to_owned();
    let ram = format!("memory-backend-memfd,id=ram,size={memory},share=on");
    spec.extra.extend(["-object", &ram].map(str::to_owned));
    spec.kernel_words = "init_on_alloc=0";
    spec.orders.freed_bytes = freed;
    spec
}

fn predicted(world: &World) -> FreeMemory {
    let told = world.tells(Side::A, &["predict", "web1", "host-b", "--rate", "1G", "--json"]);
    let predicted: Prediction = serde_json::from_str(&told).unwrap();
    predicted.free_memory
}

/// Asserts that a report counts holes that were filled ahead of QEMU.
fn assert_ahead(report: &Report) {
    let said = report.notes.iter().find(|note| note.contains("were never used"));
    let said = said.unwrap_or_else(|| panic!("{:?}", report.notes));
    assert!(said.contains("allocated ahead of QEMU") && !said.contains(" 0 MiB"), "{said}");
}

/// There and back without the free memory. What QEMU sends before the guest reports it as free
/// can't be left out any more: on this link that is little, however slow the guest is.
#[runs(promised)]
#[test]
fn what_a_guest_has_freed_is_left_out() {
    let world = World::new(Link::one(100));
    let guest = world.boot_by(&spec(MEMORY, FREED), &world.kit.qemu, &["--free-page-hint"]);
    let shown = world.tells(Side::A, &["show", "web1"]);
    assert!(shown.contains("free-page-hint"), "{shown}");
    let free = predicted(&world);
    assert!(free.hinted && free.unused_shared_bytes == 0, "{free:?}");
    for from in [Side::A, Side::B] {
        let report = world.migrate(&guest, from, &[]);
        assert!(report.free_bytes >= FREED / 2, "{} are left out", report.free_bytes);
        assert!(!report.notes.iter().any(|note| note.contains("were never used")));
        assert!(world.shown(from.other(), "web1").free_page_hint);
    }
}

/// QEMU is held back while the guest says what is free, and not once the migration has ended.
#[test]
fn a_cancelled_migration_leaves_no_limit_in_qemu() {
    let world = World::new(Link::one(100));
    let mut spec = spec(MEMORY, LITTLE);
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot_by(&spec, &world.kit.qemu, &["--free-page-hint"]);
    let owners = world.own_qmp(Side::A, "web1");
    let limit = || {
        let parameters = owners.execute("query-migrate-parameters", json!({})).unwrap();
        parameters["max-bandwidth"].as_u64().unwrap()
    };
    let before = limit();
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::FirstPass);
    moving.interrupt();
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
    assert_eq!(limit(), before);
    // The destination ends its QEMU afterwards, and has the VM wait until it has.
    drop(world.migrate(&guest, Side::A, &[]));
}

/// Without it QEMU reads all memory, and doctor says so.
#[test]
fn without_a_balloon_all_is_read() {
    let world = World::new(Link::one(200));
    let guest = world.boot(&spec(LARGE, LITTLE));
    let doctor = world.tells(Side::A, &["doctor"]);
    assert!(doctor.contains("all 1024 MiB of its"), "{doctor}");
    let free = predicted(&world);
    assert!(!free.hinted && free.unused_shared_bytes > 200 * MIB, "{free:?}");
    assert!(free.reading_s > 0.0 && free.unused_shared_bytes < 1024 * MIB, "{free:?}");
    let report = world.migrate(&guest, Side::A, &[]);
    assert!(report.free_bytes < 16 * MIB, "{} are left out", report.free_bytes);
    assert_ahead(&report);
    let mut own = vec!["run", "web2", "--free-page-hint", "--", "qemu-system-x86_64"];
    own.extend(["-device", "virtio-balloon-pci"]);
    let refused = world.refuses(Side::A, &own);
    assert!(refused.contains("already has a balloon"), "{refused}");
}

/// While the link is busy, memory that QEMU has not reached yet is allocated, also of a VM that
/// others command, and with the classic stream.
#[test]
fn holes_are_filled_ahead_of_qemu() {
    let world = World::new(Link::one(200));
    let mut commander = Commander::new(world, spec(MEMORY, LITTLE), &setup::ensure().unwrap().qemu);
    let way = commander.way(Side::A, false, 0);
    assert_ahead(&commander.migrate(Side::A, &way));
}
