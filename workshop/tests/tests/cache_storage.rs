//! Storage with other content than it should have, or that stops answering, while pages of a moving
//! VM are read from it.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use api::{Outcome, Report};
use cachemap::{CacheMap, PAGE_BYTES, SECTOR_BYTES};
use end_to_end::files::{
    MANY_FILES_BYTES, Reached, SERIALS, ample, asked, assert_cached_files, export, image,
    twin_with_files, wait_helper, with_files_by,
};
use end_to_end::{Frozen, Side, World, until};
use lab::guest::Guest;
use lab::hosts::Link;
use marks::runs;

const NAME: &str = "web1";
// On a busy machine the helper, which gives way to others in its guest, gets little CPU time.
const FROM_DISKS: [&str; 5] = ["--shared-disks", "--storage", "on", "--helper-budget", "time=60s"];

/// Inverts on disk each page of the second half of a map; a second call restores them.
fn invert(world: &World, map: &CacheMap) {
    let mut page = [0; 4096];
    let half = map.runs().len() / 2;
    for run in &map.runs()[half..] {
        let serial = &map.devices()[usize::from(run.device)].serial;
        let disk = OpenOptions::new().read(true).write(true).open(image(world, serial)).unwrap();
        for nth in 0..u64::from(run.pages) {
            let at = run.sector * SECTOR_BYTES + nth * PAGE_BYTES;
            disk.read_exact_at(&mut page, at).unwrap();
            page.iter_mut().for_each(|byte| *byte = !*byte);
            disk.write_all_at(&page, at).unwrap();
        }
    }
}

/// A server of disks with other content in half of all places.
#[runs(fills, promised)]
#[test]
fn a_server_with_other_content_costs_only_time() {
    let world = World::new(Link::one(150));
    let spec = with_files_by(&world, Reached::Nbd);
    let _export = export(&world);
    let guest = world.boot(&spec);
    let map = asked(&world, Side::A, NAME, ample()).unwrap();
    let pages = |runs: &[cachemap::Run]| runs.iter().map(|run| u64::from(run.pages)).sum::<u64>();
    let same = pages(&map.runs()[..map.runs().len() / 2]);
    assert!(same > 0 && same < map.pages(), "{same} of {}", map.pages());
    invert(&world, &map);
    let report = world.migrate(&guest, Side::A, &FROM_DISKS);
    println!("{same} of {}: {} {:?}", map.pages(), report.stored_bytes, report.notes);
    assert!(report.stored_bytes > 0, "{:?}", report.notes);
    assert!(report.stored_bytes <= same * PAGE_BYTES, "{} bytes", report.stored_bytes);
    let is_said = |note: &String| note.contains("were something else there");
    assert!(report.notes.iter().any(is_said), "{:?}", report.notes);
    invert(&world, &map);
    assert_cached_files(&guest);
}

/// The programs with which a host's agent reads images in formats.
fn readers(world: &World, side: Side) -> Vec<u32> {
    let mut pids = world.host(side).processes().unwrap();
    let is_one = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name.trim() == "qemu-nbd")
    };
    pids.retain(is_one);
    pids
}

/// Bytes that a process has read so far.
fn read_bytes(pid: u32) -> u64 {
    let path = format!("/proc/{pid}/io");
    let text = fs::read_to_string(Path::new(&path)).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("rchar: "));
    line.map_or(0, |number| number.parse().unwrap())
}

/// Waits until pages are read, then freezes these processes.
fn freeze_at_work(pids: &[u32]) -> Vec<Frozen> {
    let before: Vec<u64> = pids.iter().map(|pid| read_bytes(*pid)).collect();
    until("pages are read", || {
        let read = pids.iter().zip(&before).map(|(pid, before)| read_bytes(*pid) - before);
        read.sum::<u64>() > 256 << 10
    });
    pids.iter().map(|pid| Frozen::new(*pid)).collect()
}

fn is_said(note: &str) -> bool {
    note.contains("the storage did not answer")
}

/// The destination's readers of formatted images freeze in the middle.
#[runs(fills)]
#[test]
fn that_stalls_costs_only_time() {
    let world = World::new(Link::one(200));
    let guest = world.boot(&with_files_by(&world, Reached::Qcow2));
    wait_helper(&world, Side::A, NAME);
    // So slow that there is always much left to read.
    let slow = ["--limit", "60M", "--storage-limit", "8M"];
    let moving = world.begin(&guest, Side::A, &[&FROM_DISKS[..], &slow].concat());
    let mut pids = Vec::new();
    until("each image is being read", || {
        pids = readers(&world, Side::B);
        pids.len() == SERIALS.len()
    });
    let frozen = freeze_at_work(&pids);
    let report = world.arrive(&guest, Side::A, moving);
    drop(frozen);
    println!("{} {:?}", report.stored_bytes, report.notes);
    assert!(report.stored_bytes > 0, "{:?}", report.notes);
    assert!(report.notes.iter().any(|note| is_said(note)), "{:?}", report.notes);
    assert_cached_files(&guest);
}

/// VMs that move together, each with the same files on disks of its own: the others get what one of
/// them has read.
#[runs(alone)]
#[test]
fn is_read_once_for_all_vms_of_a_host() {
    let world = World::new(Link::one(200));
    let names = ["web1", "web2"];
    let specs = names.map(|name| {
        let mut spec = twin_with_files(&world, name);
        spec.orders.files_bytes = MANY_FILES_BYTES;
        // Both boot at the same time.
        world.run(&spec, &world.kit.qemu, &[]);
        spec
    });
    let guests = specs.map(|spec| Guest::listen(spec, &world.hosts.a).unwrap());
    guests.iter().for_each(|guest| guest.wait_boot(&world.hosts.a).unwrap());
    names.iter().for_each(|name| wait_helper(&world, Side::A, name));
    let files = 2 * guests[0].spec.orders.files_bytes;
    // All that disks have is read from them, if it is not there already.
    let shared = ["--share", "host", "--storage-share", "100"];
    let arguments = [&FROM_DISKS[..], &shared].concat();
    let moving = guests.each_ref().map(|guest| world.begin(guest, Side::A, &arguments));
    let reports: Vec<Report> = moving.map(|moving| moving.wait().report).into();
    assert!(reports.iter().all(|report| report.outcome == Outcome::Done), "{reports:?}");
    guests.iter().for_each(|guest| world.assert_intact(guest));
    let sum = |each: fn(&Report) -> u64| reports.iter().map(each).sum::<u64>();
    let (read, stored) = (sum(|one| one.storage_read_bytes), sum(|one| one.stored_bytes));
    let named = sum(|one| one.named_bytes);
    println!("{files} in files: {read} read, {stored} placed; {named} by name");
    // How much storage provides before the network does depends on what else the machine does.
    assert!(stored > 0);
    // Each by itself would read all files. Their programs are on the disk, too.
    assert!(read <= files * 5 / 4, "{read} of {files}");
    assert!(named > stored, "{named} by name, {stored} of it from disks: the twin had no part");
    guests.iter().for_each(assert_cached_files);
}
