use std::path::Path;
use std::time::Duration;

use qemu::shape::{self, Shape, differences};
use serde_json::json;

use crate::{start, wait_for};

const ANSWER: Duration = Duration::from_secs(10);

/// Both VMs open the same images, as a source and a destination do.
fn disks(dir: &Path) -> String {
    for name in ["a.img", "b.img", "c.iso"] {
        std::fs::File::create(dir.join(name)).unwrap().set_len(1 << 20).unwrap();
    }
    format!(
        "-machine pc-q35-7.2 -m 64 -S -smp 2 \
         -drive file={dir}/a.img,format=raw,if=virtio \
         -blockdev driver=file,filename={dir}/b.img,node-name=file0 \
         -blockdev driver=raw,file=file0,node-name=disk0 -device virtio-blk-pci,drive=disk0,id=blk0 \
         -drive file={dir}/c.iso,format=raw,if=none,id=cd,media=cdrom -device ide-cd,drive=cd,id=ide0 \
         -device virtio-net-pci,id=nic0 -device virtio-rng-pci",
        dir = dir.display()
    )
}

#[test]
fn a_vm_equals_the_one_that_waits_for_it_and_drift_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = disks(dir.path());
    let source = start(&arguments);
    let shape = shape::of(&source.qmp).unwrap();
    let waiting = wait_for(&arguments, &shape.machine);
    let other = shape::of(&waiting.qmp).unwrap();
    assert_eq!(differences(&shape, &other, &[]), Vec::<String>::new());
    assert!(shape.machine.starts_with("pc-q35-"), "{}", shape.machine);
    assert_eq!((shape.vcpus, shape.ram_bytes), (2, 64 << 20));
    assert_eq!(shape.pid, Some(source.process.pid()));
    let images: Vec<bool> = shape.images.iter().map(|image| image.read_only).collect();
    assert_eq!(images.len(), 3, "{:?}", shape.images);
    assert!(shape.drives.iter().any(|drive| drive.name == "virtio0"), "{:?}", shape.drives);
    assert!(shape.drives.iter().any(|drive| drive.name == "blk0"), "{:?}", shape.drives);
    let json = serde_json::to_value(&shape).unwrap();
    let back: Shape = serde_json::from_value(json).unwrap();
    assert_eq!(back, Shape { pid: None, ..shape.clone() });

    source.qmp.execute("object-add", json!({"qom-type": "rng-builtin", "id": "r"})).unwrap();
    source.qmp.execute("eject", json!({"id": "ide0", "force": true})).unwrap();
    let told = differences(&shape::of(&source.qmp).unwrap(), &other, &[]);
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("is empty in the VM"), "{told:?}");
}

#[test]
fn a_snapshot_changes_a_drive_and_a_job_or_an_ejected_medium_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let source = start(&disks(dir.path()));
    let file = |name: &str| dir.path().join(name).display().to_string();
    let before = shape::drives_of(&source.qmp, ANSWER).unwrap();
    let changed = || shape::changed_files(&before, &shape::drives_of(&source.qmp, ANSWER).unwrap());
    assert_eq!(changed(), None);
    source.qmp.execute("eject", json!({"id": "ide0", "force": true})).unwrap();
    assert_eq!(changed(), None);
    let mirror = json!({"job-id": "mirror", "device": "virtio0", "target": file("copy.img"),
                        "format": "raw", "sync": "full"});
    source.qmp.execute("drive-mirror", mirror).unwrap();
    assert_eq!(changed(), None);
    let snapshot = json!({"node-name": "disk0", "snapshot-node-name": "snapshot0",
                          "snapshot-file": file("snapshot.qcow2"), "format": "qcow2"});
    source.qmp.execute("blockdev-snapshot-sync", snapshot).unwrap();
    let told = changed().unwrap();
    assert!(told.starts_with("drive `blk0` holds other files"), "{told}");
    assert!(told.contains(&file("snapshot.qcow2")), "{told}");
}

#[test]
fn a_destination_gets_the_machine_type_that_the_name_meant_at_the_source() {
    let waiting = wait_for("-machine q35,usb=on -m 64", "pc-q35-7.2");
    assert_eq!(shape::of(&waiting.qmp).unwrap().machine, "pc-q35-7.2");
}

#[test]
fn a_plugged_device_is_found() {
    let arguments = "-machine pc -m 64 -S -device virtio-net-pci,id=nic0";
    let (source, other) = (start(arguments), start(arguments));
    source.qmp.execute("device_add", json!({"driver": "virtio-rng-pci", "id": "late"})).unwrap();
    source
        .qmp
        .execute("object-add", json!({"qom-type": "memory-backend-ram", "id": "m", "size": 4096}))
        .unwrap();
    let shapes = (shape::of(&source.qmp).unwrap(), shape::of(&other.qmp).unwrap());
    let told = differences(&shapes.0, &shapes.1, &[]);
    assert!(told.iter().any(|one| one.contains("virtio-rng-pci device `late`")), "{told:?}");
    assert!(told.iter().any(|one| one.contains("memory `m`")), "{told:?}");
}

/// Wherever the balloon comes from, QEMU knows what it does.
#[test]
fn free_page_hints_are_asked_for() {
    let device = "-device virtio-balloon-pci,iothread=t";
    let plugged = json!({"driver": "virtio-balloon-pci", "id": "late", "iothread": "t",
                         "free-page-hint": true});
    for (arguments, plugged, hints) in [
        (String::new(), None, false),
        (device.to_owned(), None, false),
        (format!("{device},id=b,free-page-hint=y"), None, true),
        (format!("{device} -global virtio-balloon-pci.free-page-hint=on"), None, true),
        (String::new(), Some(plugged), true),
    ] {
        let vm = start(&format!("-machine pc -m 32 -S -object iothread,id=t {arguments}"));
        if let Some(plugged) = plugged {
            vm.qmp.execute("device_add", plugged).unwrap();
        }
        assert_eq!(shape::has_free_page_hint(&vm.qmp).unwrap(), hints, "{arguments}");
    }
}
