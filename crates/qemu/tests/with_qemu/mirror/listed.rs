//! What disks a VM has, which of them can move, and why others can't.

use qemu::disks;
use qemu::shape;

use super::{text, tool};
use crate::{Vm, try_start};

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
    let shape = shape::of(&vm.qmp).unwrap();
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
    assert!(reason("null").contains("not an image of this host"));
    assert!(reason("disk2").contains("(node `b`)"), "{}", reason("disk2"));
    let named = |text: &str| disks::choose(&listed, &text.parse().unwrap());
    assert_eq!(named("virtio0,n").unwrap().moving.len(), 2);
    assert!(named("all").is_err());
    let there = disks::without_moving(&shape, &named("virtio0,n").unwrap().moving);
    let files: Vec<&str> = there.images.iter().map(|image| image.file.as_str()).collect();
    assert_eq!(&files[..3], ["cd", "named", "named-base"]);
}
