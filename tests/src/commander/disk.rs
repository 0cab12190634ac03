//! A disk that moves with its VM, as libvirt's `--copy-storage-all` has it: an export of
//! the destination's QEMU, and a mirror of the source's that is kept up to date until the
//! VM stands still.

use std::time::{Duration, Instant};

use lab::hosts::Host;
use serde_json::json;

use super::{Commanded, Way, port};
use crate::disk::DISK_BYTES;
use crate::{Side, until};

/// The drive, and all that is made for its copy.
const NAME: &str = "data";
/// The copy's place in QEMU.
const COPY: &str = "copy";
/// Of the whole disk.
const COPY_MAX: Duration = Duration::from_secs(120);

/// An empty image for the disk that comes.
pub(super) fn make_image(host: &Host) {
    let image = host.run_dir.join("disk.img");
    std::fs::File::create(image).unwrap().set_len(DISK_BYTES).unwrap();
}

/// Has the copy's QEMU serve it.
pub(super) fn export(host: &Host, way: &Way, destination: &Commanded) {
    let addr = match &way.disk_socket {
        Some(path) => json!({ "type": "unix", "data": { "path": path } }),
        None => {
            let to = if host.name.ends_with('a') { Side::A } else { Side::B };
            let (there, port) = (host.addresses[0].to_string(), (port(to) + 1).to_string());
            json!({ "type": "inet", "data": { "host": there, "port": port } })
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

/// Copies the disk to where that is served, and has the copy kept up to date.
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

/// The VM stands still: the copy is what the disk is. Nothing, if none is made.
pub(super) fn complete(source: &Commanded) {
    if !has_job(source, |_| true) {
        return;
    }
    // What was written last is copied before it ends.
    source.do_it("block-job-cancel", json!({ "device": COPY }));
    until("the copy is complete", || !has_job(source, |_| true));
    source.do_it("blockdev-del", json!({ "node-name": COPY }));
}

/// The destination's QEMU has its disk for itself.
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
