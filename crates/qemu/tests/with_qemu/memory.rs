use serde_json::json;

use crate::{start, try_start};

/// Reads guest memory the way the guest would, through QEMU.
fn guest_byte(vm: &crate::Vm, address: u64) -> u8 {
    let file = vm.dir.path().join("byte");
    vm.qmp.execute("pmemsave", json!({"val": address, "size": 1, "filename": file})).unwrap();
    std::fs::read(file).unwrap()[0]
}

#[test]
fn what_the_agent_writes_the_guest_reads() {
    let memfd = "-machine q35,memory-backend=r -m 64 -S -object memory-backend-memfd,id=r,size=64M";
    let json = "-machine q35,memory-backend=r -m 64 -S -object \
                {\"qom-type\":\"memory-backend-ram\",\"id\":\"r\",\"size\":67108864}";
    for arguments in ["-machine q35 -m 64 -S", "-machine pc -m 64 -S", memfd, json] {
        let vm = start(arguments);
        assert_eq!(vm.ram.len(), 1, "{arguments}");
        assert_eq!(vm.ram[0].bytes, 64 << 20);
        vm.ram[0].mapping.write(40 << 20, &[0x5a]).unwrap();
        assert_eq!(guest_byte(&vm, 40 << 20), 0x5a, "{arguments}");
        let backends = vm.qmp.memory_backends().unwrap();
        assert!(backends.iter().any(|one| one.id == vm.ram[0].id && one.share));
    }
}

#[test]
fn numa_nodes_and_dimms_are_shared_each() {
    let vm = start(
        "-machine q35 -m 64,slots=1,maxmem=1G -S -smp 2 \
         -object memory-backend-ram,id=a,size=32M -object memory-backend-ram,id=b,size=32M \
         -numa node,nodeid=0,memdev=a,cpus=0 -numa node,nodeid=1,memdev=b,cpus=1 \
         -object memory-backend-memfd,id=d,size=128M -device pc-dimm,memdev=d",
    );
    let ids: Vec<&str> = vm.ram.iter().map(|ram| ram.id.as_str()).collect();
    assert_eq!(ids, ["a", "b", "d"]);
    vm.ram[1].mapping.write(0, &[0x77]).unwrap();
    assert_eq!(guest_byte(&vm, 32 << 20), 0x77);
}

#[test]
fn qemu_leaves_holes_what_nobody_touched() {
    let vm = start("-machine q35 -m 1024 -S");
    let allocated = vm.ram[0].mapping.file().allocated_bytes().unwrap();
    assert!(allocated < 64 << 20, "{allocated} bytes of a VM that never ran");
}

#[test]
fn odd_sizes_work_as_qemu_rounds_them() {
    assert_eq!(start("-machine q35 -m 65540k -S").ram[0].bytes, 65_544 << 10);
    assert_eq!(start("-machine q35 -S").ram[0].bytes, 128 << 20);
    let microvm = start("-machine microvm -m 64 -S");
    assert_eq!(microvm.ram[0].id, "microvm.ram");
}

#[test]
fn ram_of_the_users_own_stays_theirs() {
    let dir = tempfile::tempdir().unwrap();
    let machine = try_start(
        "-machine q35,memory-backend=r -m 64 -S -object \
         memory-backend-file,id=r,size=64M,mem-path=own.ram,share=on",
        dir.path(),
    )
    .unwrap();
    assert!(machine.ram.is_empty());
    assert_eq!(machine.left.len(), 1);
    assert!(dir.path().join("own.ram").exists());
    machine.quit().unwrap();
}

#[test]
fn no_huge_pages_is_said_before_qemu_is_started() {
    let dir = tempfile::tempdir().unwrap();
    // More than any test host has reserved.
    let error = try_start(
        "-machine q35,memory-backend=r -m 1T -S -object \
         memory-backend-memfd,id=r,size=1T,hugetlb=on,hugetlbsize=2M",
        dir.path(),
    )
    .unwrap_err();
    assert!(error.to_string().contains("huge pages"), "{error}");
    assert!(!dir.path().join("qemu.log").exists());
}
