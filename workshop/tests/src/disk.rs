//! A disk that only one host has, and that a guest writes to; or, where its writes don't matter, one
//! that a guest without an operating system leaves alone.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use lab::fatal::{Kind, fatal};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::RUN_DIR;
use lab_guest::random::Random;
use qemu::mirror;
use qemu::qmp::Qmp;
use serde_json::{Value, json};

use crate::{MIB, Side, World, assert_no_page_is_wrong, bare, guest};

/// Bytes that the guest fills and rewrites, of a disk sixteen times as large.
const WRITTEN: u64 = 32 * MIB;
/// Size of the disk.
pub const DISK_BYTES: u64 = 16 * WRITTEN;

/// Path of the disk's image on a host, as seen from outside.
#[must_use]
pub fn image(world: &World, side: Side) -> PathBuf {
    world.host(side).run_dir.join("disk.img")
}

/// Bytes that an image takes up; 0 if it doesn't exist.
#[must_use]
pub fn allocated_bytes(world: &World, side: Side) -> u64 {
    fs::metadata(image(world, side)).map_or(0, |image| image.blocks() * 512)
}

/// A guest that writes `rate` bytes a second to a disk of `format` that only
/// host A has.
///
/// # Panics
/// If the image can't be made.
#[must_use]
pub fn with_disk(world: &World, format: &str, rate: u64) -> GuestSpec {
    let path = image(world, Side::A).display().to_string();
    let args = ["create", "-q", "-f", format, &path, &DISK_BYTES.to_string()];
    let output = Command::new("qemu-img").args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    let mut spec = guest("256M", 2_000_000);
    // It is the disk that matters.
    (spec.orders.random_bytes, spec.orders.text_bytes) = (2 * MIB, 2 * MIB);
    spec.orders.working_set_bytes = 4 * MIB;
    spec.orders.disk_bytes = WRITTEN;
    spec.orders.disk_rate = rate;
    spec.extra.extend(drive(format));
    spec
}

/// QEMU's arguments for it.
fn drive(format: &str) -> [String; 4] {
    let drive = format!("file={RUN_DIR}/disk.img,format={format},if=none,id=data,discard=unmap");
    let device = "virtio-blk-pci,drive=data,id=vda";
    ["-drive", &drive, "-device", device].map(str::to_owned)
}

/// A guest without an operating system, with a raw disk that only host A has. It begins with
/// `written` bytes of noise, and nothing else writes to it.
///
/// # Panics
/// If the image can't be made.
#[must_use]
pub fn with_still_disk(world: &World, written: u64) -> GuestSpec {
    make_still(&image(world, Side::A), written);
    let mut spec = bare("256M", 2_000_000);
    spec.extra.extend(drive("raw"));
    spec
}

/// Makes the image of a disk that begins with noise.
///
/// # Panics
/// If it can't be made.
pub fn make_still(image: &Path, written: u64) {
    fs::write(image, noise(written)).unwrap();
    File::options().write(true).open(image).unwrap().set_len(DISK_BYTES).unwrap();
}

/// Asserts that an image begins with what [`make_still`] wrote.
///
/// # Panics
/// If it does not; no repetition excuses that.
pub fn assert_still(image: &Path, written: u64) {
    let expected = noise(written);
    let mut held = vec![0; expected.len()];
    File::open(image).unwrap().read_exact_at(&mut held, 0).unwrap();
    if held != expected {
        fatal(Kind::WrongPage, format_args!("{} has other content", image.display()));
    }
}

/// Bytes that neither compress nor repeat, the same each time.
#[must_use]
pub fn noise(bytes: u64) -> Vec<u8> {
    let mut noise = vec![0; usize::try_from(bytes).unwrap()];
    Random::new(5, 5).fill(&mut noise);
    noise
}

/// Has QEMU do to a disk what a guest would request.
///
/// # Panics
/// If it refuses.
pub fn qemu_io(qmp: &Qmp, what: &str) {
    let line = format!("qemu-io data \"{what}\"");
    let said = qmp.execute("human-monitor-command", json!({ "command-line": line })).unwrap();
    // On success, the result is on QEMU's own standard output.
    assert_eq!(said, "", "{line}");
}

/// Asserts that the guest reads back all that it wrote to its disk.
///
/// # Panics
/// If it does not.
pub fn assert_disk_intact(guest: &Guest) {
    let checked = guest.check_disk().unwrap();
    let pages = guest.spec.orders.disk_bytes / 4096;
    assert_no_page_is_wrong(&checked);
    assert_eq!(checked.pages, pages, "{checked:?}");
}

/// Jobs and nodes of mirrors in a QEMU.
///
/// # Panics
/// If it doesn't answer.
#[must_use]
pub fn mirrors(qmp: &Qmp) -> Vec<String> {
    let named = |command: &str, key: &str| -> Vec<String> {
        let answer = qmp.execute(command, json!({})).unwrap();
        let names = answer.as_array().unwrap().iter().filter_map(|one: &Value| one[key].as_str());
        names.filter(|name| name.starts_with(mirror::PREFIX)).map(str::to_owned).collect()
    };
    let jobs = named("query-block-jobs", "device");
    jobs.into_iter().chain(named("query-named-block-nodes", "node-name")).collect()
}
