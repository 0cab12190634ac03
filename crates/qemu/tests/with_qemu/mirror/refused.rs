//! Images that can't be written, or must not be.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use qemu::disks::{self, Allowed, Promises, QemuImg};
use qemu::export::{ExportError, Exports};
use qemu::mirror::{MirrorError, Mirrors};
use qemu::shape;

use super::{Destination, FORMATS, MIB, Source, WAIT, drives, prepared, text, tool};
use crate::migrate::{PLAIN, TYPE};
use crate::{Vm, try_start, wait_for};

/// A file system of a few MiB, unmounted with the test.
struct Small(tempfile::TempDir);

impl Small {
    fn mount(bytes: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={bytes}");
        tool("mount", &["-t", "tmpfs", "-o", &size, "droveway-test", text(dir.path())]);
        Self(dir)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_file_system_is_reported_with_its_disk() {
    let source = Source::start();
    let mut disks = source.disks();
    // As if the guest had written everything after the disks were examined.
    disks.iter_mut().for_each(|disk| disk.allocated_bytes = 0);
    let small = Small::mount(4 * MIB);
    let images = tempfile::tempdir_in(small.0.path()).unwrap();
    let there = Destination::in_directory(&source, &disks, images);
    let mirrors = there.mirrors(&source, &disks);
    let failed = mirrors.wait_ready(WAIT).unwrap_err();
    let text = failed.to_string();
    let MirrorError::Failed { disk, .. } = failed else { panic!("{text}") };
    assert_eq!(
        text,
        format!(
            "disk `{disk}` can't move: it can't be written at the destination: \
             No space left on device"
        )
    );
    mirrors.undo().unwrap();
    source.is_unhurt();
    drop(there);
}

#[test]
fn images_are_exported_only_where_they_are_what_was_prepared() {
    let source = Source::start();
    let disks = source.disks();
    let (mine, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let prepared = prepared(&source, &disks, mine.path());
    for format in FORMATS {
        fs::copy(mine.path().join(format), other.path().join(format)).unwrap();
    }
    let refused = |vm: &Vm| {
        let nbd = vm.dir.path().join("nbd");
        let error =
            Exports::start(Arc::clone(&vm.qmp), &nbd, prepared.images()).map(drop).unwrap_err();
        assert!(!nbd.exists());
        error
    };
    let elsewhere = wait_for(&drives(other.path()), TYPE);
    let error = refused(&elsewhere).to_string();
    assert!(error.contains("d0") && error.contains("was prepared"), "{error}");
    let without = wait_for(PLAIN, TYPE);
    assert!(matches!(refused(&without), ExportError::Unknown { .. }));
    assert!(matches!(refused(&source.vm), ExportError::NotWaiting { .. }));

    // An image that another program has locked.
    let waits = wait_for(&drives(mine.path()), TYPE);
    let dir = tempfile::tempdir().unwrap();
    let machine = try_start(&drives(mine.path()), dir.path()).unwrap();
    let user = Vm { machine: Some(machine), dir };
    let error = refused(&waits).to_string();
    assert!(error.starts_with("disk `d0` can't be written") && error.contains("lock"), "{error}");
    let shape = shape::of(&source.vm.qmp).unwrap();
    let (moving, _cleanup) = disks::moving(&disks, shape.pid, "m2");
    let overrides =
        [(source.images.path().display().to_string(), mine.path().display().to_string())];
    let img = QemuImg::new("qemu-img".into(), None);
    let (allowed, promises) = (Allowed::default(), Promises::default());
    let used = disks::prepare(&moving, &overrides, Path::new("/"), allowed, &img, &promises);
    let error = used.unwrap_err().to_string();
    assert!(error.contains("it is in use: "), "{error}");
    drop(user);
    let nbd = waits.dir.path().join("nbd");
    let exports = Exports::start(Arc::clone(&waits.qmp), &nbd, prepared.images()).unwrap();
    exports.stop().unwrap();
    exports.stop().unwrap();
}

#[test]
fn a_disk_is_never_copied_onto_itself() {
    let source = Source::start();
    let shape = shape::of(&source.vm.qmp).unwrap();
    let (moving, cleanup) = disks::moving(&source.disks(), shape.pid, "m1");
    let allowed = Allowed { create: true, overwrite: true };
    let img = QemuImg::new("qemu-img".into(), None);
    let promises = Promises::default();
    let refused = disks::prepare(&moving, &[], Path::new("/"), allowed, &img, &promises);
    let refused = refused.unwrap_err();
    assert!(refused.to_string().contains("the source's own image"), "{refused}");
    drop(cleanup);
    source.is_unhurt();
}

#[test]
fn an_export_of_another_size_is_refused() {
    let source = Source::start();
    let disks = source.disks();
    let there = Destination::of(&source, &disks);
    let mut targets = there.targets(&disks, there.exports.socket());
    targets[1].disk.bytes += 512;
    let refused = Mirrors::start(Arc::clone(&source.vm.qmp), &targets).unwrap_err();
    assert!(matches!(refused, MirrorError::Size { .. }), "{refused}");
    targets[1].export = "nothing".to_owned();
    let refused = Mirrors::start(Arc::clone(&source.vm.qmp), &targets).unwrap_err();
    assert!(refused.to_string().starts_with("disk `d1` can't move: "), "{refused}");
    source.is_unhurt();
}
