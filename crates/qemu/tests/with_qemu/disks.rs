use std::fs;
use std::path::Path;

use qemu::disks::{Proof, challenges, verify};
use qemu::shape;

use crate::{Vm, try_start};

#[test]
fn images_of_a_live_vm_are_challenged_where_they_are() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["disk.img", "cd.iso"] {
        fs::write(dir.path().join(name), [1; 4096]).unwrap();
    }
    let machine = try_start(
        "-machine q35 -m 64 -S -drive file=disk.img,format=raw,if=virtio \
         -drive file=cd.iso,format=raw,if=virtio,readonly=on",
        dir.path(),
    )
    .unwrap();
    let vm = Vm { machine: Some(machine), dir };
    let shape = shape::of(&vm.qmp).unwrap();
    let (made, cleanup) = challenges(&shape, "move-1");
    assert_eq!(made.len(), 2);
    for challenge in &made {
        assert!(Path::new(&challenge.image).is_absolute(), "{challenge:?}");
        assert!(matches!(challenge.proof, Proof::Nonce { .. }), "{challenge:?}");
        let sent = serde_json::to_string(challenge).unwrap();
        let heard: qemu::disks::Challenge = serde_json::from_str(&sent).unwrap();
        assert_eq!(verify(&heard, &[]), Ok(()));
    }
    let copy = tempfile::tempdir().unwrap();
    let elsewhere = [(vm.dir.path().display().to_string(), copy.path().display().to_string())];
    assert!(made.iter().all(|challenge| verify(challenge, &elsewhere).is_err()));
    for name in ["disk.img", "cd.iso"] {
        fs::copy(vm.dir.path().join(name), copy.path().join(name)).unwrap();
    }
    for challenge in &made {
        // A copy is as good only of what nothing writes to.
        let is_read_only = challenge.image.ends_with("cd.iso");
        assert_eq!(verify(challenge, &elsewhere).is_ok(), is_read_only, "{challenge:?}");
    }
    drop(cleanup);
    let left = fs::read_dir(vm.dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(left.into_iter().all(|name| !name.to_string_lossy().starts_with(".droveway")));
}

#[test]
fn a_vm_without_disks_has_nothing_to_show() {
    let vm = crate::start("-machine q35 -m 64 -S");
    let (made, _cleanup) = challenges(&shape::of(&vm.qmp).unwrap(), "move-1");
    assert_eq!(made, []);
}
