//! Disks mirrored from a VM straight into the exports of the QEMU that waits
//! for it, as the agents do with lanes between.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use qemu::disks::{self, Allowed, Disk, Prepared, QemuImg, WhichDisks};
use qemu::export::{ExportError, Exports};
use qemu::incoming::Incoming;
use qemu::mirror::{self, Late, MirrorError, Mirrors, Side, Target};
use qemu::outgoing::{Outgoing, StreamKind};
use qemu::qmp::{Qmp, RunState};
use qemu::rendezvous::Rendezvous;
use qemu::shape::Shape;
use serde_json::{Value, json};

use crate::migrate::{PLAIN, TYPE, carry, socket};
use crate::{Vm, try_start, wait_for};

const WAIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const FORMATS: [&str; 2] = ["raw", "qcow2"];

/// Runs a tool of QEMU's and wants it to succeed.
fn tool(program: &str, arguments: &[&str]) {
    let done = Command::new(program).args(arguments).output().unwrap();
    assert!(done.status.success(), "{program} {arguments:?}: {done:?}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Has QEMU write through the guest's device, as the guest would.
fn write(qmp: &Qmp, device: &str, pattern: u8, at: &str, length: &str) {
    let line = format!("qemu-io {device} \"write -P {pattern} {at} {length}\"");
    let said = qmp.execute_within("human-monitor-command", json!({"command-line": line}), WAIT);
    // What QEMU prints when it works goes to its stdout.
    assert_eq!(said.unwrap(), "", "{line}");
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
/// 20 MiB of content and 8 MiB of zeros that take up room.
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
            fs::copy(&path, images.path().join(format!("{format}.before"))).unwrap();
        }
        let dir = tempfile::tempdir().unwrap();
        let machine = try_start(&drives_with(images.path(), cache), dir.path()).unwrap();
        Self { vm: Vm { machine: Some(machine), dir }, cache, images }
    }

    fn disks(&self) -> Vec<Disk> {
        let shape = Shape::of(&self.vm.qmp).unwrap();
        let listed = disks::disks(&self.vm.qmp, &shape).unwrap();
        disks::choose(&listed, &WhichDisks::All).unwrap().moving
    }

    fn path(&self, format: &str) -> PathBuf {
        self.images.path().join(format)
    }

    /// The VM runs, from images that nobody else wrote to, and QEMU has
    /// nothing of ours.
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

/// What waits for that VM, with images made for it.
struct Destination {
    vm: Vm,
    incoming: Incoming,
    images: tempfile::TempDir,
    prepared: Prepared,
    exports: Exports,
}

fn prepared(source: &Source, disks: &[Disk], there: &Path) -> Prepared {
    let shape = Shape::of(&source.vm.qmp).unwrap();
    let (moving, _cleanup) = disks::moving(disks, shape.pid, "m1");
    let overrides = [(source.images.path().display().to_string(), there.display().to_string())];
    let allowed = Allowed { create: true, overwrite: false };
    let img = QemuImg::beside("qemu-system-x86_64");
    disks::prepare(&moving, &overrides, Path::new("/"), allowed, &img).unwrap()
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

    /// Starts the VM's migration to here, up to where its disks are drained.
    fn migrate(&self, source: &Source) -> (Outgoing, Rendezvous) {
        let stream = self.incoming.open().unwrap();
        let (at, listener) = socket(&source.vm);
        let outgoing = Outgoing::pausing(&source.vm, StreamKind::Classic, at.path()).unwrap();
        // It ends with the sockets.
        drop(carry(&outgoing, &listener, stream));
        outgoing.allow(1 << 30, 300).unwrap();
        (outgoing, at)
    }
}

#[test]
fn a_vm_moves_with_its_disks() {
    for cache in ["writeback", "none"] {
        moves_with_its_disks(&Source::start_with(cache));
    }
}

fn moves_with_its_disks(source: &Source) {
    let disks = source.disks();
    let names: Vec<&str> = disks.iter().map(|disk| disk.name.as_str()).collect();
    assert_eq!(names, ["d0", "d1"]);
    let mut there = Destination::of(source, &disks);
    let mirrors = there.mirrors(source, &disks);
    for round in 1..=20 {
        let (at, pattern) = (format!("{}M", 40 + round), 100 + round);
        write(&source.vm.qmp, "d0", pattern, &at, "1M");
        write(&source.vm.qmp, "d1", pattern, &at, "64k");
    }
    mirrors.wait_ready(WAIT).unwrap();
    assert!(mirrors.is_ready());
    let progress = mirrors.progress().unwrap();
    assert_eq!(progress.len(), 2);
    assert!(progress.iter().all(|disk| disk.ready && disk.total_bytes >= 20 * MIB));

    let running = mirrors.finish(WAIT).unwrap_err();
    assert!(matches!(running, MirrorError::Running), "{running}");
    let (outgoing, _at) = there.migrate(source);
    outgoing.wait_pre_switchover(WAIT).unwrap();
    // What the guest wrote last is not in the copies when they are drained.
    write(&source.vm.qmp, "d0", 201, "200M", "8M");
    write(&source.vm.qmp, "d1", 202, "200M", "8M");
    mirrors.finish(WAIT).unwrap();
    there.exports.stop().unwrap();
    outgoing.continue_switchover().unwrap();
    outgoing.wait_completed(WAIT).unwrap();
    there.incoming.wait_loaded(WAIT).unwrap();
    there.incoming.cont().unwrap();
    there.prepared.keep();
    assert_eq!(there.vm.qmp.run_state().unwrap(), RunState::Running);

    for format in FORMATS {
        let (from, to) = (source.path(format), there.images.path().join(format));
        assert!(same(format, &from, &to), "{format}");
        // 20 MiB from before, 20 and 1 and 8 from since, and qcow2's tables;
        // neither the holes nor the zeros.
        assert!(taken(&to) < 54 * MIB, "{format} takes {}", taken(&to));
    }
    write(&there.vm.qmp, "d0", 3, "1M", "1M");
    write(&there.vm.qmp, "d1", 3, "1M", "1M");
    assert!(!same("qcow2", &source.path("qcow2"), &there.images.path().join("qcow2")));
}

#[test]
fn undone_at_each_step_the_source_is_as_it_was() {
    for step in 0..5 {
        let source = Source::start();
        let disks = source.disks();
        let there = Destination::of(&source, &disks);
        let mirrors = there.mirrors(&source, &disks);
        if step >= 1 {
            mirrors.wait_ready(WAIT).unwrap();
        }
        if step >= 2 {
            for disk in &disks {
                let late = mirrors.converge(&disk.name, 4 * MIB).unwrap();
                let can_change = source.vm.qmp.version() >= (8, 2, 0);
                let throttled = Late::Throttled { bytes_per_s: 4 * MIB };
                assert_eq!(late, if can_change { Late::WriteBlocking } else { throttled });
                mirrors.slow(&disk.name, 2 * MIB).unwrap();
                mirrors.converge(&disk.name, MIB).unwrap();
            }
            assert!(mirrors.converge("d7", MIB).is_err());
        }
        let outgoing = (step >= 3).then(|| {
            let (outgoing, at) = there.migrate(&source);
            outgoing.wait_pre_switchover(WAIT).unwrap();
            (outgoing, at)
        });
        if step >= 4 {
            mirrors.finish(WAIT).unwrap();
        }
        if step == 0 {
            drop(mirrors);
        } else {
            mirrors.undo().unwrap();
        }
        if let Some((outgoing, _at)) = outgoing {
            outgoing.back_out(true).unwrap();
        }
        source.is_unhurt();
        let made: Vec<PathBuf> = there.prepared.created().map(Path::to_owned).collect();
        assert_eq!(made.len(), 2);
        drop(there);
        assert!(made.iter().all(|path| !path.exists()), "step {step}");
    }
}

#[test]
fn a_target_that_dies_is_told_with_the_disk_and_undone() {
    let source = Source::start();
    let disks = source.disks();
    let there = Destination::of(&source, &disks);
    let way = Way::to(there.exports.socket(), 6 * MIB, Hang::Full);
    let targets = there.targets(&disks, &way.path);
    let mirrors = Mirrors::start(Arc::clone(&source.vm.qmp), &targets).unwrap();
    way.wait_full();
    there.vm.process.kill().unwrap();
    way.cut();
    let failed = mirrors.wait_ready(WAIT).unwrap_err();
    let MirrorError::Failed { disk, side, .. } = &failed else { panic!("{failed}") };
    assert_eq!(*side, Side::Target);
    assert!(failed.to_string().contains(&format!("disk `{disk}` can't move: it can't be written")));
    assert!(mirrors.check().is_err(), "and it stays so");
    assert!(mirrors.finish(WAIT).is_err());
    mirrors.undo().unwrap();
    source.is_unhurt();
}

/// How a target can hang.
#[derive(Clone, Copy)]
enum Hang {
    /// It takes requests and never answers.
    Silent,
    /// It takes nothing any more, and is closed by whoever gives it up.
    Full,
}

#[test]
fn a_target_that_hangs_keeps_nobody() {
    for hang in [Hang::Silent, Hang::Full] {
        let source = Source::start();
        let disks = source.disks();
        let there = Destination::of(&source, &disks);
        let way = Way::to(there.exports.socket(), 6 * MIB, hang);
        let targets = there.targets(&disks, &way.path);
        let mirrors = Mirrors::start(Arc::clone(&source.vm.qmp), &targets).unwrap();
        way.wait_full();
        let late = mirrors.wait_ready(Duration::from_millis(100)).unwrap_err().to_string();
        assert!(late.starts_with("not ready after 0 s: disk d"), "{late}");
        let _silent = way.give_up(hang);
        mirrors.undo().unwrap();
        source.is_unhurt();
    }
}

#[test]
fn a_target_that_hangs_while_the_vm_is_stopped_keeps_nobody() {
    for hang in [Hang::Silent, Hang::Full] {
        let source = Source::start();
        let disks = source.disks();
        let there = Destination::of(&source, &disks);
        let way = Way::to(there.exports.socket(), 6 * MIB, hang);
        let targets = there.targets(&disks, &way.path);
        let mirrors = Mirrors::start(Arc::clone(&source.vm.qmp), &targets).unwrap();
        way.wait_full();
        let (outgoing, _at) = there.migrate(&source);
        // QEMU waits for its mirrors' requests there, and answers nothing.
        assert!(outgoing.wait_pre_switchover(Duration::from_secs(3)).is_err());
        let _silent = way.give_up(hang);
        mirrors.undo().unwrap();
        outgoing.back_out(true).unwrap();
        source.is_unhurt();
    }
}

#[test]
fn what_a_crashed_agent_left_is_removed_and_limits_are_as_their_owner_set_them() {
    let source = Source::start();
    let limits = json!({"id": "/machine/peripheral/disk1/virtio-backend", "bps": 0, "bps_rd": 0, "bps_wr": 50_000_000, "iops": 0,
        "iops_rd": 7000, "iops_wr": 0, "bps_wr_max": 60_000_000, "group": "theirs"});
    source.vm.qmp.execute("block_set_io_throttle", limits).unwrap();
    let shown = |qmp: &Qmp| -> Vec<Value> {
        let all = qmp.execute("query-block", json!({})).unwrap();
        let one = |drive: &Value| {
            let keys = ["bps", "bps_wr", "bps_wr_max", "iops_rd", "group"];
            keys.iter().map(|key| drive["inserted"][key].clone()).collect()
        };
        all.as_array().unwrap().iter().map(one).collect()
    };
    let before = shown(&source.vm.qmp);
    let disks = source.disks();
    let there = Destination::of(&source, &disks);
    let mirrors = there.mirrors(&source, &disks);
    mirrors.wait_ready(WAIT).unwrap();
    for disk in &disks {
        mirrors.slow(&disk.name, 3 * MIB).unwrap();
        mirrors.slow(&disk.name, 2 * MIB).unwrap();
    }
    let slowed = shown(&source.vm.qmp);
    assert!(slowed.iter().all(|drive| drive[1] == 2 * MIB), "{slowed:?}");

    // An agent that crashes undoes nothing.
    std::mem::forget(mirrors);
    let next = there.mirrors(&source, &disks);
    assert_eq!(shown(&source.vm.qmp), before, "the next begins with what the last one left");
    next.wait_ready(WAIT).unwrap();
    next.slow("d1", MIB).unwrap();
    std::mem::forget(next);
    assert!(mirror::remove_left(&source.vm.qmp).unwrap());
    assert_eq!(shown(&source.vm.qmp), before);
    assert!(!mirror::remove_left(&source.vm.qmp).unwrap(), "nothing is left");
    source.is_unhurt();
}

/// A file system of a few MiB, gone with the test.
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
fn a_full_file_system_is_told_with_the_disk() {
    let source = Source::start();
    let mut disks = source.disks();
    // As if the guest had written all of it since the disks were looked at.
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

    // Of another program, the image is locked.
    let waits = wait_for(&drives(mine.path()), TYPE);
    let dir = tempfile::tempdir().unwrap();
    let machine = try_start(&drives(mine.path()), dir.path()).unwrap();
    let user = Vm { machine: Some(machine), dir };
    let error = refused(&waits).to_string();
    assert!(error.starts_with("disk `d0` can't be written") && error.contains("lock"), "{error}");
    let shape = Shape::of(&source.vm.qmp).unwrap();
    let (moving, _cleanup) = disks::moving(&disks, shape.pid, "m2");
    let overrides =
        [(source.images.path().display().to_string(), mine.path().display().to_string())];
    let img = QemuImg::beside("qemu-system-x86_64");
    let used = disks::prepare(&moving, &overrides, Path::new("/"), Allowed::default(), &img);
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
    let shape = Shape::of(&source.vm.qmp).unwrap();
    let (moving, cleanup) = disks::moving(&source.disks(), shape.pid, "m1");
    let allowed = Allowed { create: true, overwrite: true };
    let img = QemuImg::beside("qemu-system-x86_64");
    let refused = disks::prepare(&moving, &[], Path::new("/"), allowed, &img).unwrap_err();
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

#[test]
fn disks_are_listed_as_their_owner_knows_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    for (name, format) in [("a", "raw"), ("base", "qcow2"), ("named-base", "raw"), ("cd", "raw")] {
        tool("qemu-img", &["create", "-q", "-f", format, text(&path(name)), "8M"]);
    }
    for (name, base, format) in [("top", "base", "qcow2"), ("named", "named-base", "raw")] {
        let base = path(base);
        let arguments = ["create", "-q", "-f", "qcow2", "-F", format, "-b", text(&base)];
        tool("qemu-img", &[&arguments[..], &[text(&path(name))]].concat());
    }
    tool("qemu-img", &["snapshot", "-c", "s1", text(&path("top"))]);
    let machine = try_start(
        "-machine q35 -m 64 -S -drive file=a,format=raw,if=virtio \
         -drive file=cd,format=raw,if=none,id=cd0,media=cdrom -device ide-cd,drive=cd0 \
         -device ide-cd,id=cd1,bus=ide.1 \
         -blockdev driver=file,node-name=f,filename=top \
         -blockdev driver=qcow2,node-name=n,file=f,lazy-refcounts=on \
         -device virtio-blk-pci,drive=n,id=disk1 \
         -blockdev driver=raw,node-name=b,file.driver=file,file.filename=named-base,read-only=on \
         -blockdev driver=qcow2,node-name=o,file.driver=file,file.filename=named,backing=b \
         -device virtio-blk-pci,drive=o,id=disk2 \
         -drive driver=null-co,size=8M,if=none,id=null -device virtio-blk-pci,drive=null",
        dir.path(),
    )
    .unwrap();
    let vm = Vm { machine: Some(machine), dir };
    let shape = Shape::of(&vm.qmp).unwrap();
    let listed = disks::disks(&vm.qmp, &shape).unwrap();
    let of = |name: &str| listed.iter().find(|disk| disk.name == name).unwrap();
    let reason = |name: &str| of(name).stays.as_ref().unwrap().reason().to_owned();
    assert_eq!(of("virtio0").stays, None);
    let disk1 = of("disk1");
    assert_eq!((disk1.stays.as_ref(), disk1.protocol.as_str()), (None, "file"));
    assert_eq!(disk1.other_names, ["n"]);
    assert_eq!((disk1.file.as_str(), disk1.backing.len()), ("top", 1));
    assert_eq!(disk1.notes.len(), 2, "{:?}", disk1.notes);
    assert!(reason("cd0").contains("can't write"), "{}", reason("cd0"));
    assert!(reason("cd1").contains("no medium"));
    assert!(reason("null").contains("no image of this host"));
    assert!(reason("disk2").contains("(node `b`)"), "{}", reason("disk2"));
    let named = |text: &str| disks::choose(&listed, &text.parse().unwrap());
    assert_eq!(named("virtio0,n").unwrap().moving.len(), 2);
    assert!(named("all").is_err());
    let there = disks::without_moving(&shape, &named("virtio0,n").unwrap().moving);
    let files: Vec<&str> = there.images.iter().map(|image| image.file.as_str()).collect();
    assert_eq!(&files[..3], ["cd", "named", "named-base"]);
}

/// A way to an NBD server that hangs once it has taken so much for the second
/// disk (to begin a disk's mirror QEMU waits for what those before it have
/// under way), and can be cut.
struct Way {
    path: PathBuf,
    _dir: tempfile::TempDir,
    full: Receiver<()>,
    ends: Arc<Mutex<Vec<UnixStream>>>,
    let_go: Sender<()>,
}

impl Way {
    fn to(server: &Path, bytes: u64, hang: Hang) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("way");
        let listener = UnixListener::bind(&path).unwrap();
        let (full, is_full) = bounded(64);
        let (let_go, held) = bounded(0);
        let ends = Arc::new(Mutex::new(Vec::new()));
        let (server, all) = (server.to_owned(), Arc::clone(&ends));
        std::thread::spawn(move || {
            for (nth, client) in listener.incoming().enumerate() {
                let (Ok(client), Ok(server)) = (client, UnixStream::connect(&server)) else {
                    continue;
                };
                let copies = || (client.try_clone().unwrap(), server.try_clone().unwrap());
                all.lock().unwrap().extend(<[UnixStream; 2]>::from(copies()));
                let back = copies();
                std::thread::spawn(move || copy((back.1, back.0)));
                if nth != 1 {
                    std::thread::spawn(move || copy((client, server)));
                    continue;
                }
                let (full, held) = (full.clone(), held.clone());
                std::thread::spawn(move || {
                    take(&client, &server, bytes);
                    let _ = full.send(());
                    if matches!(hang, Hang::Silent) {
                        let _ = io::copy(&mut &client, &mut io::sink());
                    }
                    let _: Result<(), _> = held.recv();
                });
            }
        });
        Self { path, _dir: dir, full: is_full, ends, let_go }
    }

    fn wait_full(&self) {
        self.full.recv_timeout(WAIT).unwrap();
    }

    /// As the agent does with a way that it closes by itself.
    fn give_up(self, hang: Hang) -> Option<Self> {
        match hang {
            Hang::Silent => Some(self),
            Hang::Full => {
                self.cut();
                None
            }
        }
    }

    /// Closes all of its connections.
    fn cut(self) {
        for end in self.ends.lock().unwrap().drain(..) {
            let _ = end.shutdown(std::net::Shutdown::Both);
        }
        drop(self.let_go);
    }
}

fn copy((mut from, mut to): (UnixStream, UnixStream)) {
    let _ = io::copy(&mut from, &mut to);
}

fn take(mut from: &UnixStream, mut to: &UnixStream, most: u64) {
    let (mut buffer, mut taken) = (vec![0; 64 << 10], 0);
    while taken < most {
        match from.read(&mut buffer) {
            Ok(count) if count > 0 && to.write_all(&buffer[..count]).is_ok() => {
                taken += count as u64;
            }
            _ => return,
        }
    }
}
