use std::fs::File;
use std::path::Path;

use cachemap::Device;
use qemu::guest_disks::{self, Reading};
use serde_json::json;

use crate::start;

fn image(dir: &Path, name: &str, bytes: u64) -> String {
    let path = dir.join(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path.display().to_string()
}

fn told(serial: &str, address: &str, bytes: u64) -> Device {
    let sectors = bytes / 512;
    Device { name: String::new(), serial: serial.into(), address: address.into(), sectors }
}

#[test]
fn a_live_vms_disks_are_found_with_their_files() {
    let dir = tempfile::tempdir().unwrap();
    let [plain, part, backed, scsi] =
        ["plain", "part", "backed", "scsi"].map(|name| image(dir.path(), name, 4 << 20));
    let vm = start(&format!(
        "-machine q35 -m 32 -S \
         -drive file={plain},format=raw,if=none,id=d0 \
         -device virtio-blk-pci,drive=d0,serial=disk-0,id=v0 \
         -blockdev driver=file,filename={part},node-name=f1 \
         -blockdev driver=raw,file=f1,node-name=r1,offset=1048576,size=2097152 \
         -device virtio-blk-pci,drive=r1,addr=0x1d.1 \
         -device virtio-scsi-pci,id=hba,addr=0x9 \
         -drive file={scsi},format=raw,if=none,id=d2 \
         -device scsi-hd,drive=d2,bus=hba.0,scsi-id=3,lun=2,id=lun0 \
         -drive file={backed},format=raw,if=virtio -device virtio-rng-pci,addr=0x1d,multifunction=on"
    ));
    let disks = guest_disks::disks(&vm.qmp, &vm.cwd).unwrap();
    assert_eq!(disks.len(), 4, "{disks:?}");
    let devices = [
        told("disk-0", "0000:00:01.0", 4 << 20),
        told("", "0000:00:1d.1", 2 << 20),
        told("", "0000:00:09.0/0:3:2", 4 << 20),
        told("", "0000:00:1d.1", 4 << 20),
        told("disk-1", "0000:00:01.0", 4 << 20),
    ];
    let found = guest_disks::matched(&devices[..3], &disks);
    let reading = |nth: usize| disks[*found[nth].as_ref().unwrap()].reading.clone();
    assert_eq!(reading(0), Reading::Direct { path: plain.into(), offset: 0 });
    assert_eq!(reading(1), Reading::Direct { path: part.into(), offset: 1 << 20 });
    assert_eq!(reading(2), Reading::Direct { path: scsi.into(), offset: 0 });
    let found = guest_disks::matched(&devices[3..], &disks);
    assert!(found.iter().all(Result::is_err), "{found:?}");

    let target = json!({ "driver": "null-co", "node-name": "t", "size": 4 << 20 });
    vm.qmp.execute("blockdev-add", target).unwrap();
    let mirror = json!({ "job-id": "m", "device": "d0", "target": "t", "sync": "none" });
    vm.qmp.execute("blockdev-mirror", mirror).unwrap();
    let disks = guest_disks::disks(&vm.qmp, &vm.cwd).unwrap();
    let mirrored = disks.iter().find(|disk| disk.serial == "disk-0").unwrap();
    assert!(matches!(&mirrored.reading, Reading::No { reason } if reason.contains("`m`")));
}

#[test]
fn a_machine_without_disks_or_pci_has_none() {
    for arguments in ["-machine q35 -m 32 -S", "-machine microvm -m 32 -S"] {
        let vm = start(arguments);
        assert_eq!(guest_disks::disks(&vm.qmp, &vm.cwd).unwrap(), []);
    }
}
