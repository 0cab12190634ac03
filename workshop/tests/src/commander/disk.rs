//! A disk that moves with its VM, as with libvirt's `--copy-storage-all`: the destination's QEMU
//! exports it, and a mirror of the source's QEMU keeps it up to date until the VM is stopped.

use std::time::{Duration, Instant};

use lab::hosts::Host;
use lab::libvirt::WAITS_AT;
use serde_json::json;

use super::{Commanded, Way, port};
use crate::disk::DISK_BYTES;
use crate::{Side, until};

/// Name of the drive, and of its export.
const NAME: &str = "data";
/// Name of the copy's node and job in QEMU.
const COPY: &str = "copy";
/// Longest time to copy the whole disk.
const COPY_MAX: Duration = Duration::from_secs(120);

/// Makes an empty image for the incoming disk.
pub(super) fn make_image(host: &Host) {
    let image = host.run_dir.join("disk.img");
    std::fs::File::create(image).unwrap().set_len(DISK_BYTES).unwrap();
}

/// Has the destination's QEMU serve its image.
pub(super) fn export(host: &Host, way: &Way, destination: &Commanded) {
    let addr = match &way.disk_socket {
        Some(path) => json!({ "type": "unix", "data": { "path": path } }),
        None => {
            let to = if host.name.ends_with('a') { Side::A } else { Side::B };
            let port = (port(to) + 1).to_string();
            json!({ "type": "inet", "data": { "host": WAITS_AT, "port": port } })
        }
    };
    destination.do_it("nbd-server-start", json!({ "addr": addr }));
    let blocks = destination.do_it("query-block", json!({}));
    let drives = blocks.as_array().unwrap();
    let drive = drives.iter().find(|one| one["device"] == NAME).unwrap();
    let node = &drive["inserted"]["node-name"];
    let export = json!({
        "type": "nbd", "id": NAME, "name": NAME, "node-name": node, "writable": true,
    });
    destination.do_it("block-export-add", export);
}

/// Copies the disk to the export, and keeps the copy up to date.
pub(super) fn copy(from: Side, way: &Way, source: &Commanded) {
    let to = from.other();
    let server = match &way.disk_socket {
        Some(path) => json!({ "type": "unix", "path": path }),
        None => {
            let here = if to == Side::A { "127.7.0.1" } else { "127.7.0.2" };
            json!({ "type": "inet", "host": here, "port": (port(to) + 1).to_string() })
        }
    };
    let nbd = json!({ "node-name": COPY, "driver": "nbd", "server": server, "export": NAME });
    source.do_it("blockdev-add", nbd);
    let mirror = json!({ "job-id": COPY, "device": NAME, "target": COPY, "sync": "full" });
    source.do_it("blockdev-mirror", mirror);
    let end = Instant::now() + COPY_MAX;
    while !has_job(source, |job| job["ready"] == true) {
        assert!(has_job(source, |_| true) && Instant::now() < end, "the disk is not copied");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Ends the copy, which is identical once the VM is stopped. Does nothing without a copy.
pub(super) fn complete(source: &Commanded) {
    if !has_job(source, |_| true) {
        return;
    }
    // A mirror that is ready copies the last writes before it ends.
    source.do_it("block-job-cancel", json!({ "device": COPY }));
    until("the copy is complete", || !has_job(source, |_| true));
    source.do_it("blockdev-del", json!({ "node-name": COPY }));
}

/// Ends the export, so that only the destination's QEMU uses its disk.
pub(super) fn release(destination: &Commanded) {
    let exports = destination.do_it("query-block-exports", json!({}));
    if exports.as_array().is_some_and(|exports| !exports.is_empty()) {
        destination.do_it("nbd-server-stop", json!({}));
    }
}

fn has_job(source: &Commanded, is_so: impl Fn(&serde_json::Value) -> bool) -> bool {
    let jobs = source.do_it("query-block-jobs", json!({}));
    jobs.as_array().unwrap().iter().any(is_so)
}
