//! Disks of a host's own go with their VM: every byte, no more space than they
//! had, and nothing of it is left where the VM is not.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use api::{Phase, Report};
use end_to_end::{MIB, Side, World, guest};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Link, RUN_DIR};

/// What the guest fills and rewrites, of a disk sixteen times as large.
const WRITTEN: u64 = 32 * MIB;
const DISK_BYTES: u64 = 16 * WRITTEN;

fn image(world: &World, side: Side) -> PathBuf {
    world.host(side).run_dir.join("disk.img")
}

fn qemu_img(args: &[&str]) {
    let output = Command::new("qemu-img").args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A guest that writes to a disk of `format` that only host A has.
fn with_disk(world: &World, format: &str, rate: u64) -> GuestSpec {
    let path = image(world, Side::A).display().to_string();
    qemu_img(&["create", "-q", "-f", format, &path, &DISK_BYTES.to_string()]);
    let mut spec = guest("256M", 2_000_000);
    spec.orders.disk_bytes = WRITTEN;
    spec.orders.disk_rate = rate;
    let drive = format!("file={RUN_DIR}/disk.img,format={format},if=none,id=data,discard=unmap");
    let device = "virtio-blk-pci,drive=data,id=vda".to_owned();
    spec.extra.extend(["-drive".to_owned(), drive, "-device".to_owned(), device]);
    spec
}

fn assert_disk_intact(guest: &Guest) {
    let checked = guest.check_disk().unwrap();
    assert_eq!((checked.pages, checked.wrong), (WRITTEN / 4096, 0), "{checked:?}");
}

/// The image takes what was written, and not the disk's size.
fn assert_sparse(world: &World, side: Side) {
    let allocated = fs::metadata(image(world, side)).unwrap().blocks() * 512;
    assert!((WRITTEN..2 * WRITTEN).contains(&allocated), "{allocated} bytes allocated");
}

fn assert_moved_once(report: &Report) {
    let [disk] = report.disks.as_slice() else { panic!("{:?}", report.disks) };
    assert_eq!((disk.name.as_str(), disk.bytes), ("data", DISK_BYTES));
    assert!((WRITTEN..3 * WRITTEN).contains(&disk.data_bytes), "{disk:?}");
}

fn there_and_back(format: &str) {
    let world = World::new(Link::one(1000));
    let guest = world.boot(&with_disk(&world, format, 1_000_000));
    assert_disk_intact(&guest);
    let moved = world.migrate(&guest, Side::A, &["--disks", "all", "--create-disks"]);
    assert_moved_once(&moved);
    assert_disk_intact(&guest);
    assert_sparse(&world, Side::B);
    // What stayed behind holds old data: it is not overwritten by accident.
    let said = world.refuses(Side::B, &["migrate", "web1", "host-a", "--disks", "data"]);
    assert!(said.contains("--overwrite-disks"), "{said}");
    let args = ["--disks", "data", "--overwrite-disks"];
    assert_moved_once(&world.migrate(&guest, Side::B, &args));
    assert_disk_intact(&guest);
    assert_sparse(&world, Side::A);
}

#[test]
fn raw_there_and_back_under_writes() {
    there_and_back("raw");
}

#[test]
fn qcow2_there_and_back_under_writes() {
    there_and_back("qcow2");
}

/// A guest that writes faster than the link carries: its writes are made to
/// wait at the end, and that is said.
#[test]
fn of_a_guest_that_writes_faster_than_the_link() {
    let world = World::new(Link::one(100));
    let guest = world.boot(&with_disk(&world, "raw", 30_000_000));
    let moved = world.migrate(&guest, Side::A, &["--disks", "all", "--create-disks"]);
    assert!(moved.disks[0].changed_s.is_some(), "{:?}", moved.disks);
    assert!(moved.notes.iter().any(|note| note.contains("disk data")), "{:?}", moved.notes);
    assert_disk_intact(&guest);
}

/// The guest goes on with its own disk, and what was made for it is gone.
#[test]
fn stay_with_a_vm_that_stays() {
    let world = World::new(Link::one(100));
    let guest = world.boot(&with_disk(&world, "raw", 1_000_000));
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

/// What can't be done is said, with what to do, and nothing has changed.
#[test]
fn that_cannot_move_are_refused() {
    let world = World::new(Link::one(1000));
    let guest = world.boot(&with_disk(&world, "raw", 1_000_000));
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
    assert_disk_intact(&guest);
}
