//! A disk that only one host has, and that a guest writes to.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use lab::guest::{Guest, GuestSpec};
use lab::hosts::RUN_DIR;
use qemu::mirror;
use qemu::qmp::Qmp;
use serde_json::{Value, json};

use crate::{MIB, Side, World, assert_no_page_is_wrong, guest};

/// Bytes that the guest fills and rewrites, of a disk sixteen times as large.
pub const WRITTEN: u64 = 32 * MIB;
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
    let drive = format!("file={RUN_DIR}/disk.img,format={format},if=none,id=data,discard=unmap");
    let device = "virtio-blk-pci,drive=data,id=vda".to_owned();
    spec.extra.extend(["-drive".to_owned(), drive, "-device".to_owned(), device]);
    spec
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
