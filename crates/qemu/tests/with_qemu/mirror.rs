//! Disks mirrored from a VM straight into the exports of the QEMU that waits
//! for it: as between agents, but without lanes.

mod hangs;
mod listed;
mod moves;
mod refused;
mod undone;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use qemu::disks::{self, Allowed, Disk, Prepared, Promises, QemuImg, WhichDisks};
use qemu::export::Exports;
use qemu::incoming::Incoming;
use qemu::mirror::{Mirrors, Target};
use qemu::outgoing::{Outgoing, Status, StreamKind};
use qemu::qmp::{Qmp, RunState};
use qemu::rendezvous::Rendezvous;
use qemu::shape;
use serde_json::json;

use crate::migrate::{PLAIN, TYPE, carry, socket};
use crate::{Vm, try_start, wait_for};

const WAIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const FORMATS: [&str; 2] = ["raw", "qcow2"];

/// Runs one of QEMU's tools, which must succeed.
fn tool(program: &str, arguments: &[&str]) {
    let done = Command::new(program).args(arguments).output().unwrap();
    assert!(done.status.success(), "{program} {arguments:?}: {done:?}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Makes QEMU write through the guest's device, as the guest would.
fn write(qmp: &Qmp, device: &str, pattern: u8, at: &str, length: &str) {
    let line = format!("qemu-io {device} \"write -P {pattern} {at} {length}\"");
    let said = qmp.execute_within("human-monitor-command", json!({"command-line": line}), WAIT);
    // On success QEMU prints to its stdout.
    assert_eq!(said.unwrap(), "", "{line}");
}

/// Whether QEMU stops the VM in time, and then waits for its disks to be drained.
fn pauses(outgoing: &Outgoing, within: Duration) -> bool {
    let deadline = Instant::now() + within;
    while Instant::now() < deadline {
        if outgoing.progress().is_ok_and(|progress| progress.status == Status::PreSwitchover) {
            return true;
        }
        thread::sleep(Duration::from_millis(1));
    }
    false
}

fn same(format: &str, one: &Path, other: &Path) -> bool {
    let done = Command::new("qemu-img")
        .args(["compare", "-q", "-U", "-f", format, "-F", format, text(one), text(other)])
        .status()
        .unwrap();
    assert!(done.code().is_some_and(|code| code < 2));
    done.success()
}

fn taken(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

/// A VM with two disks, `d0` (raw) and `d1` (qcow2), each of 256 MiB with
/// 20 MiB of content and 8 MiB of allocated zeros.
struct Source {
    vm: Vm,
    cache: &'static str,
    images: tempfile::TempDir,
}

fn drives(dir: &Path) -> String {
    drives_with(dir, "writeback")
}

fn drives_with(dir: &Path, cache: &str) -> String {
    let dir = dir.display();
    format!(
        "{PLAIN} -drive if=none,id=d0,format=raw,cache={cache},file={dir}/raw \
         -device virtio-blk-pci,drive=d0 \
         -drive if=none,id=d1,format=qcow2,cache={cache},file={dir}/qcow2 \
         -device virtio-blk-pci,drive=d1,id=disk1"
    )
}

impl Source {
    fn start() -> Self {
        Self::start_with("writeback")
    }

    fn start_with(cache: &'static str) -> Self {
        let images = tempfile::tempdir().unwrap();
        for format in FORMATS {
            let path = images.path().join(format);
            tool("qemu-img", &["create", "-q", "-f", format, text(&path), "256M"]);
            let writes = ["write -P 7 10M 20M", "write -P 0 100M 8M"];
            tool("qemu-io", &["-f", format, "-c", writes[0], "-c", writes[1], text(&path)]);
            let before = images.path().join(format!("{format}.before"));
            // `fs::copy` would write what is missing in the image as zeros.
            tool("cp", &["--sparse=always", text(&path), text(&before)]);
        }
        let dir = tempfile::tempdir().unwrap();
        let machine = try_start(&drives_with(images.path(), cache), dir.path()).unwrap();
        Self { vm: Vm { machine: Some(machine), dir }, cache, images }
    }

    fn disks(&self) -> Vec<Disk> {
        let shape = shape::of(&self.vm.qmp).unwrap();
        let listed = disks::disks(&self.vm.qmp, &shape).unwrap();
        disks::choose(&listed, &WhichDisks::All).unwrap().moving
    }

    fn path(&self, format: &str) -> PathBuf {
        self.images.path().join(format)
    }

    /// Checks that the VM runs from unmodified images, and that nothing of the agent
    /// is left in QEMU.
    fn is_unhurt(&self) {
        let qmp = &self.vm.qmp;
        assert_eq!(qmp.run_state().unwrap(), RunState::Running);
        for format in FORMATS {
            let before = self.path(&format!("{format}.before"));
            assert!(same(format, &self.path(format), &before), "{format}");
        }
        let all = ["query-block-jobs", "query-named-block-nodes", "query-block"];
        for command in all {
            let said = qmp.execute(command, json!({})).unwrap().to_string();
            assert!(!said.contains("droveway-"), "{command}: {said}");
        }
        write(qmp, "d0", 1, "0", "64k");
    }
}

/// A QEMU that waits for that VM, with images created for it.
struct Destination {
    vm: Vm,
    incoming: Incoming,
    images: tempfile::TempDir,
    prepared: Prepared,
    exports: Exports,
}

fn prepared(source: &Source, disks: &[Disk], there: &Path) -> Prepared {
    let shape = shape::of(&source.vm.qmp).unwrap();
    let (moving, _cleanup) = disks::moving(disks, shape.pid, "m1");
    let overrides = [(source.images.path().display().to_string(), there.display().to_string())];
    let allowed = Allowed { create: true, overwrite: false };
    let img = QemuImg::new("qemu-img".into(), None);
    let promises = Promises::default();
    disks::prepare(&moving, &overrides, Path::new("/"), allowed, &img, &promises).unwrap()
}

impl Destination {
    fn of(source: &Source, disks: &[Disk]) -> Self {
        Self::in_directory(source, disks, tempfile::tempdir().unwrap())
    }

    fn in_directory(source: &Source, disks: &[Disk], images: tempfile::TempDir) -> Self {
        let prepared = prepared(source, disks, images.path());
        let vm = wait_for(&drives_with(images.path(), source.cache), TYPE);
        let incoming = Incoming::of(&vm).unwrap();
        let nbd = vm.dir.path().join("nbd");
        let exports = Exports::start(Arc::clone(&vm.qmp), &nbd, prepared.images()).unwrap();
        Self { vm, incoming, images, prepared, exports }
    }

    fn targets(&self, disks: &[Disk], socket: &Path) -> Vec<Target> {
        let of = |disk: &Disk| {
            let export = self.exports.exports().iter().find(|one| one.disk == disk.name).unwrap();
            let (socket, export) = (socket.to_owned(), export.name.clone());
            Target { disk: disk.clone(), socket, export }
        };
        disks.iter().map(of).collect()
    }

    fn mirrors(&self, source: &Source, disks: &[Disk]) -> Mirrors {
        let targets = self.targets(disks, self.exports.socket());
        Mirrors::start(Arc::clone(&source.vm.qmp), &targets).unwrap()
    }

    /// Starts the VM's migration to here, up to the point where its disks are drained.
    fn migrate(&self, source: &Source) -> (Outgoing, Rendezvous) {
        let stream = self.incoming.open().unwrap();
        let (at, listener) = socket(&source.vm);
        let outgoing = Outgoing::pausing(&source.vm, StreamKind::Classic, at.path()).unwrap();
        // The thread ends with the sockets.
        drop(carry(&outgoing, &listener, stream));
        outgoing.allow(1 << 30, 300).unwrap();
        (outgoing, at)
    }
}
