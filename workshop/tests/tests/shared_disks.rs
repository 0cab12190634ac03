//! A disk that both hosts see: the guest writes to it all the time, and the destination goes on
//! with every byte.

use std::fs::File;
use std::path::PathBuf;

use api::{Outcome, Phase};
use end_to_end::{MIB, Side, World, assert_no_page_is_wrong, guest, own_qmp_argument};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;
use marks::runs;
use serde_json::json;

const DISK_BYTES: u64 = 16 * MIB;

/// A guest with a disk at a path that both hosts see.
fn with_disk(world: &World) -> (GuestSpec, PathBuf) {
    // Host A's own directory, by the path that it has outside.
    let image = world.hosts.a.run_dir.join("disk.img");
    File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
    let mut spec = guest("256M", 2_000_000);
    // It is the disk that matters.
    (spec.orders.random_bytes, spec.orders.text_bytes) = (2 * MIB, 2 * MIB);
    spec.orders.working_set_bytes = 4 * MIB;
    spec.orders.disk_bytes = DISK_BYTES;
    spec.orders.disk_rate = 400_000;
    let drive = format!("file={},format=raw,if=virtio,id=data", image.display());
    spec.extra.extend(["-drive".to_owned(), drive]);
    (spec, image)
}

fn assert_disk_intact(guest: &Guest) {
    let checked = guest.check_disk().unwrap();
    assert_no_page_is_wrong(&checked);
    assert_eq!(checked.pages, DISK_BYTES / 4096, "{checked:?}");
}

fn written(guest: &Guest) -> u64 {
    let answer = guest.ask("check-disk").unwrap();
    let written = answer.split(' ').find_map(|word| word.strip_prefix("written="));
    written.unwrap().parse().unwrap()
}

/// That the storage is the same is detected, or given as an option.
#[runs(promised)]
#[test]
fn go_there_and_back_under_writes() {
    let world = World::new(Link::one(500));
    let (spec, image) = with_disk(&world);
    let guest = world.boot(&spec);
    let mut before = written(&guest);
    for (side, args) in [(Side::A, &[][..]), (Side::B, &["--shared-disks"])] {
        drop(world.migrate(&guest, side, args));
        assert_disk_intact(&guest);
        let now = written(&guest);
        assert!(now > before, "it writes on: {before} pages, {now} now");
        before = now;
    }
    let beside = std::fs::read_dir(image.parent().unwrap()).unwrap();
    let left = beside.filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    assert_eq!(left.filter(|name| name.starts_with(".droveway")).count(), 0);
}

/// The source reopens its disk, and a later move works. Then a snapshot is taken while the VM moves
/// back: the other host has the former image, in which all that the guest writes now is missing.
#[test]
fn stay_with_a_vm_that_is_cancelled_or_whose_owner_takes_a_snapshot() {
    let world = World::new(Link::one(200));
    let (mut spec, image) = with_disk(&world);
    spec.orders.random_bytes = 64 * MIB;
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot(&spec);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::FirstPass);
    moving.interrupt();
    assert!(!moving.wait().success);
    world.remove_own_sockets(Side::B, "web1");
    world.assert_stayed(&guest, Side::A, pid);
    assert_disk_intact(&guest);
    drop(world.migrate(&guest, Side::A, &[]));
    assert_disk_intact(&guest);

    let pid = world.vm(Side::B, "web1").unwrap().pid;
    let owners = world.own_qmp(Side::B, "web1");
    let mut moving = world.begin(&guest, Side::B, &[]);
    moving.wait_for(Phase::FirstPass);
    let file = image.with_file_name("files-snapshot.qcow2").display().to_string();
    let snapshot = json!({ "device": "data", "snapshot-file": file, "format": "qcow2" });
    owners.execute("blockdev-snapshot-sync", snapshot).unwrap();
    let before = written(&guest);
    let ended = moving.wait();
    let Outcome::Failed(why) = &ended.report.outcome else { panic!("{:?}", ended.report.outcome) };
    let expected =
        format!("drive `data` holds other files than when the move started ({file} now)");
    assert!(why.contains(&expected), "{why}");
    world.remove_own_sockets(Side::A, "web1");
    world.assert_stayed(&guest, Side::B, pid);
    assert_disk_intact(&guest);
    assert!(written(&guest) > before, "it writes on");
}
