use std::fs;
use std::path::Path;

use qemu::disks::{self, Challenge, Cleanup, NotShared, Proof};
use qemu::shape::{self, Shape};

use crate::{Vm, try_start};

fn challenges(shape: &Shape) -> (Vec<Challenge>, Cleanup) {
    disks::challenges(shape, "move-1", &|| Ok(()))
}

fn verify(challenge: &Challenge, overrides: &[(String, String)]) -> Result<(), NotShared> {
    disks::verify(challenge, overrides, None, &|| Ok(()))
}

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
    let (made, cleanup) = challenges(&shape);
    assert_eq!(made.len(), 2);
    for challenge in &made {
        assert!(Path::new(&challenge.image).is_absolute(), "{challenge:?}");
        assert!(matches!(challenge.proof, Proof::Nonce { .. }), "{challenge:?}");
        let sent = serde_json::to_string(challenge).unwrap();
        let received: Challenge = serde_json::from_str(&sent).unwrap();
        assert_eq!(verify(&received, &[]), Ok(()));
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

/// As libvirt starts VMs: QEMU shows the file as writable, and opens it for reading only, since
/// nothing over it writes.
#[test]
fn a_copy_of_firmware_that_is_opened_for_writing_only_if_needed_will_do() {
    let (dir, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for dir in [&dir, &copy] {
        fs::write(dir.path().join("code.fd"), vec![1_u8; 128 << 10]).unwrap();
    }
    fs::write(dir.path().join("vars.fd"), vec![2_u8; 128 << 10]).unwrap();
    let machine = try_start(
        "-machine q35,pflash0=code,pflash1=vars -m 64 -S \
         -blockdev driver=file,node-name=code-file,filename=code.fd,auto-read-only=on \
         -blockdev driver=raw,node-name=code,file=code-file,read-only=on \
         -blockdev driver=file,node-name=vars-file,filename=vars.fd,auto-read-only=on \
         -blockdev driver=raw,node-name=vars,file=vars-file,read-only=off",
        dir.path(),
    )
    .unwrap();
    let vm = Vm { machine: Some(machine), dir };
    let shape = shape::of(&vm.qmp).unwrap();
    let (made, _cleanup) = challenges(&shape);
    let of = |name: &str| made.iter().find(|one| one.image.ends_with(name)).unwrap();
    let elsewhere = [(vm.dir.path().display().to_string(), copy.path().display().to_string())];
    assert_eq!(verify(of("code.fd"), &elsewhere), Ok(()));
    // What the VM writes to has to be the same.
    fs::copy(vm.dir.path().join("vars.fd"), copy.path().join("vars.fd")).unwrap();
    assert!(verify(of("vars.fd"), &elsewhere).is_err());
    assert_eq!(verify(of("vars.fd"), &[]), Ok(()));
    fs::write(copy.path().join("code.fd"), vec![3_u8; 128 << 10]).unwrap();
    let refused = verify(of("code.fd"), &elsewhere).unwrap_err();
    assert!(refused.reason.for_log().contains("other content"), "{refused}");
}

#[test]
fn a_vm_without_disks_has_nothing_to_show() {
    let vm = crate::start("-machine q35 -m 64 -S");
    let (made, _cleanup) = challenges(&shape::of(&vm.qmp).unwrap());
    assert_eq!(made, []);
}
