//! A host's own disks move with their VM: every byte, with no more space than before, and nothing
//! of them is left where the VM is not.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use api::{Outcome, Phase, Report, VmStatus};
use end_to_end::disk::{
    DISK_BYTES, allocated_bytes, assert_disk_intact, assert_still, image, qemu_io, with_disk,
    with_still_disk,
};
use end_to_end::{MIB, Side, World, own_qmp_argument, until};
use lab::guest::GuestSpec;
use lab::hosts::{Link, RUN_DIR};
use marks::runs;
use rustix::fs::{FallocateFlags, fallocate};
use serde_json::json;

/// What guests write whose disk need not take long.
const WRITTEN: u64 = 16 * MIB;

/// A guest with such a disk, to which it writes slowly.
fn with_small_disk(world: &World, format: &str) -> GuestSpec {
    let mut spec = with_disk(world, format, 500_000);
    spec.orders.disk_bytes = WRITTEN;
    spec
}

/// Asserts that the image takes the space of what was written, not the disk's size.
fn assert_sparse(world: &World, side: Side) {
    let allocated = allocated_bytes(world, side);
    assert!((WRITTEN..2 * WRITTEN).contains(&allocated), "{allocated} bytes allocated");
}

fn assert_moved_once(report: &Report) {
    let [disk] = report.disks.as_slice() else { panic!("{:?}", report.disks) };
    assert_eq!((disk.name.as_str(), disk.bytes), ("data", DISK_BYTES));
    assert!((WRITTEN..3 * WRITTEN).contains(&disk.data_bytes), "{disk:?}");
}

fn there_and_back(format: &str) {
    let world = World::new(Link::one(1000));
    let guest = world.boot(&with_small_disk(&world, format));
    let moved = world.migrate(&guest, Side::A, &["--disks", "all", "--create-disks"]);
    assert_moved_once(&moved);
    assert_disk_intact(&guest);
    assert_sparse(&world, Side::B);
    // The image left behind holds old data: it is not overwritten by accident.
    let said = world.refuses(Side::B, &["migrate", "web1", "host-a", "--disks", "data"]);
    assert!(said.contains("--overwrite-disks"), "{said}");
    let args = ["--disks", "data", "--overwrite-disks"];
    assert_moved_once(&world.migrate(&guest, Side::B, &args));
    assert_disk_intact(&guest);
    assert_sparse(&world, Side::A);
}

#[runs(promised)]
#[test]
fn raw_there_and_back_under_writes() {
    there_and_back("raw");
}

#[runs(promised)]
#[test]
fn qcow2_there_and_back_under_writes() {
    there_and_back("qcow2");
}

/// A guest that writes faster than the link carries: its writes are delayed at the end, and the
/// report says so.
#[test]
fn of_a_guest_that_writes_faster_than_the_link() {
    let world = World::new(Link::one(100));
    let mut spec = with_small_disk(&world, "raw");
    spec.orders.disk_rate = 20_000_000;
    // Single pages at this rate would take an emulated guest all of its time.
    spec.orders.disk_run = 16;
    let guest = world.boot(&spec);
    let moved = world.migrate(&guest, Side::A, &["--disks", "all", "--create-disks"]);
    assert!(moved.disks[0].changed_s.is_some(), "{:?}", moved.disks);
    assert!(moved.notes.iter().any(|note| note.contains("disk data")), "{:?}", moved.notes);
    assert_disk_intact(&guest);
}

/// The guest goes on with its own disk, and the image that was made for it is gone.
#[test]
fn stay_with_a_vm_that_stays() {
    let world = World::new(Link::one(100));
    let guest = world.boot(&with_small_disk(&world, "raw"));
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let args = ["--disks", "all", "--create-disks"];
    let mut moving = world.begin(&guest, Side::A, &args);
    moving.wait_for(Phase::FirstPass);
    moving.interrupt();
    assert!(!moving.wait().success);
    world.assert_stayed(&guest, Side::A, pid);
    assert_disk_intact(&guest);
    assert!(!image(&world, Side::B).exists(), "an image that was made for nothing");
    drop(world.migrate(&guest, Side::A, &args));
    assert_disk_intact(&guest);
}

/// What can't be done is refused with advice, and nothing has changed.
#[test]
fn that_cannot_move_are_refused() {
    let world = World::new(Link::one(1000));
    let guest = world.boot(&with_still_disk(&world, WRITTEN));
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let refuses = |args: &[&str], words: &[&str]| {
        let all: Vec<&str> = ["migrate", "web1", "host-b"].iter().chain(args).copied().collect();
        let said = world.refuses(Side::A, &all);
        for word in words {
            assert!(said.contains(word), "{args:?}: no `{word}` in: {said}");
        }
        world.assert_stayed(&guest, Side::A, pid);
    };
    refuses(&["--disks", "sda"], &["no disk `sda`", "`data`"]);
    refuses(&["--disks", "all"], &["disk.img", "--create-disks"]);
    File::create(image(&world, Side::B)).unwrap().set_len(DISK_BYTES / 2).unwrap();
    refuses(&["--disks", "all", "--create-disks"], &["disk.img"]);
    assert_eq!(fs::metadata(image(&world, Side::B)).unwrap().len(), DISK_BYTES / 2);
    assert_still(&image(&world, Side::A), WRITTEN);
}

/// Another VM runs from the image that is to be overwritten.
#[test]
fn to_an_image_that_is_in_use_are_refused() {
    let world = World::new(Link::one(1000));
    let guest = world.boot(&with_still_disk(&world, WRITTEN));
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let theirs = vec![7; 8 << 20];
    fs::write(image(&world, Side::B), &theirs).unwrap();
    File::options().write(true).open(image(&world, Side::B)).unwrap().set_len(DISK_BYTES).unwrap();
    let qemu = world.kit.qemu.display().to_string();
    let drive = format!("file={RUN_DIR}/disk.img,format=raw,if=virtio");
    let other = ["run", "other", "--", &qemu, "-S", "-m", "64", "-nodefaults", "-display", "none"];
    world.says(Side::B, &[&other[..], &["-drive", &drive]].concat());
    let args = ["--disks", "all", "--overwrite-disks"];
    let said = world.refuses(Side::A, &[&["migrate", "web1", "host-b"][..], &args].concat());
    assert!(said.contains("disk `data`") && said.contains("in use"), "{said}");
    world.says(Side::B, &["stop", "other", "--force"]);
    world.assert_stayed(&guest, Side::A, pid);
    let mut held = vec![0; theirs.len()];
    File::open(image(&world, Side::B)).unwrap().read_exact_at(&mut held, 0).unwrap();
    assert!(held == theirs, "what the other VM has is as it was");
    drop(world.migrate(&guest, Side::A, &args));
    assert_still(&image(&world, Side::B), WRITTEN);
}

/// Besides other data, the image holds three parts of the same size: a hole that its host
/// made, a part that the guest discards before the move, and a part that the guest zeroes after it
/// was copied. (While a disk is mirrored, QEMU leaves what a guest discards as it is.)
#[test]
fn with_holes_old_and_new() {
    const PART: u64 = 2 * MIB;
    const AT: u64 = DISK_BYTES / 2;
    let world = World::new(Link::one(200));
    let mut spec = with_still_disk(&world, 2 * PART);
    spec.orders.random_bytes = 64 * MIB;
    spec.extra.extend(own_qmp_argument(&spec.name));
    let part = vec![0x55; usize::try_from(3 * PART).unwrap()];
    {
        let file = File::options().write(true).open(image(&world, Side::A)).unwrap();
        file.write_all_at(&part, AT).unwrap();
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, punch, AT, PART).unwrap();
    }
    let guest = world.boot(&spec);
    let owners = world.own_qmp(Side::A, "web1");
    qemu_io(&owners, &format!("discard {} {PART}", AT + PART));
    let slow = ["--disks", "all", "--create-disks", "--compress", "off", "--limit", "40M"];
    let mut moving = world.begin(&guest, Side::A, &slow);
    moving.wait_for(Phase::FirstPass);
    let id = world.vm(Side::A, "web1").unwrap().migration.unwrap();
    let holds = |at: u64| {
        let mut byte = [0];
        let file = File::open(image(&world, Side::B)).unwrap();
        file.read_exact_at(&mut byte, at).unwrap();
        byte[0]
    };
    let last = AT + 2 * PART;
    until("the last was copied", || [last, last + PART - 1].map(holds) == [0x55; 2]);
    qemu_io(&owners, &format!("write -z {last} {PART}"));
    world.says(Side::A, &["set", &id, "--limit", "none"]);
    drop(world.arrive(&guest, Side::A, moving));
    assert_still(&image(&world, Side::B), 2 * PART);
    for side in [Side::A, Side::B] {
        let mut held = vec![1; part.len()];
        File::open(image(&world, side)).unwrap().read_exact_at(&mut held, AT).unwrap();
        let wrong = held.iter().filter(|byte| **byte != 0).count();
        let first = held.iter().position(|byte| *byte != 0);
        assert_eq!((wrong, first), (0, None), "at {}", side.name());
    }
    let allocated = allocated_bytes(&world, Side::B);
    assert!(allocated < 3 * PART, "{allocated} bytes allocated");
}

/// QEMU doesn't hold a VM that its owner has paused: its memory follows its disks, and copying
/// these takes as long as it takes.
#[test]
fn of_a_paused_vm_take_longer_than_a_running_vms_drain_may() {
    let mut world = World::new(Link::one(50));
    let file = world.hosts.a.run_dir.join("short.toml");
    fs::write(&file, "[waits]\ndrain = 2\n").unwrap();
    world.restart_agents_with(&["--config", file.to_str().unwrap()]);
    let mut spec = with_still_disk(&world, 2 * WRITTEN);
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot(&spec);
    world.own_qmp(Side::A, "web1").execute("stop", json!({})).unwrap();
    guest.expect_on(&world.hosts.b).unwrap();
    let ended = world.begin(&guest, Side::A, &["--disks", "all", "--create-disks"]).wait();
    assert_eq!(ended.report.outcome, Outcome::Done, "{}", ended.said);
    assert_eq!(world.vm(Side::B, "web1").unwrap().status, VmStatus::Paused);
    world.own_qmp(Side::B, "web1").execute("cont", json!({})).unwrap();
    world.assert_intact(&guest);
    assert_still(&image(&world, Side::B), 2 * WRITTEN);
}
