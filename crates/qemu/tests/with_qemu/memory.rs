use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use qemu::guest_memory::GuestMemory;
use qemu::ram_blocks::{RamBlocks, Reached};
use qemu::shape::{self, Memory};
use serde_json::json;

use crate::{argv, start};

/// Reads guest memory the way the guest would, through QEMU.
fn guest_byte(vm: &crate::Vm, address: u64) -> u8 {
    let file = vm.dir.path().join("byte");
    vm.qmp.execute("pmemsave", json!({"val": address, "size": 1, "filename": file})).unwrap();
    std::fs::read(file).unwrap()[0]
}

fn only_block(vm: &crate::Vm, arguments: &str) -> Reached {
    let mut blocks = RamBlocks::of(vm);
    assert_eq!((blocks.reached.len(), blocks.notes.len()), (1, 0), "{arguments}: {blocks:?}");
    blocks.reached.remove(0)
}

#[test]
fn what_the_agent_writes_the_guest_reads() {
    let memfd = "-machine q35,memory-backend=r -m 64 -S -object memory-backend-memfd,id=r,size=64M";
    let file = "-machine q35,memory-backend=r -m 64 -S -object \
                memory-backend-file,id=r,size=64M,mem-path=own.ram,share=on";
    for arguments in ["-machine q35 -m 64 -S", "-machine pc -m 64 -S", memfd, file] {
        let vm = start(arguments);
        let ram = only_block(&vm, arguments);
        assert_eq!(ram.bytes, 64 << 20);
        ram.mapping.write(40 << 20, &[0x5a]).unwrap();
        assert_eq!(guest_byte(&vm, 40 << 20), 0x5a, "{arguments}");
    }
}

/// A command line with all RAM in files that the agent makes.
const HANDED_OVER: &str = "-machine q35,memory-backend=r -m 64 -S -object \
                           memory-backend-file,id=r,size=64M,share=on,\
                           mem-path=/proc/self/fd/droveway-ram";

/// The open files of a VM's QEMU that the agent made for its RAM.
fn ram_files(vm: &crate::Vm) -> Vec<PathBuf> {
    let open = fs::read_dir(format!("/proc/{}/fd", vm.process.pid())).unwrap();
    let open = open.map(|entry| entry.unwrap().path());
    let ram = Path::new("/memfd:droveway-ram (deleted)");
    open.filter(|path| fs::read_link(path).is_ok_and(|link| link == ram)).collect()
}

#[test]
fn ram_in_a_file_of_the_agent_can_be_reached_and_keeps_its_size() {
    let vm = start(HANDED_OVER);
    assert_eq!(vm.argv, argv(HANDED_OVER), "each QEMU gets its own number");
    let ram = only_block(&vm, HANDED_OVER);
    ram.mapping.write(40 << 20, &[0x5a]).unwrap();
    assert_eq!(guest_byte(&vm, 40 << 20), 0x5a);
    // One that QEMU inherited, and the same that it opened.
    let files = ram_files(&vm);
    assert_eq!(files.len(), 2, "{files:?}");
    for path in files {
        let file = File::options().read(true).write(true).open(path).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 64 << 20);
        file.set_len(32 << 20).unwrap_err();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 40 << 20).unwrap();
        assert_eq!(byte, [0x5a]);
    }
}

#[test]
fn ram_above_four_gib_is_one_block() {
    let vm = start("-machine q35 -m 4352 -S");
    let ram = only_block(&vm, "4352");
    assert_eq!(ram.bytes, 4352 << 20);
    // 2 GiB lie below the hole for devices, the rest from 4 GiB on.
    ram.mapping.write(2 << 30, &[0x77]).unwrap();
    assert_eq!(guest_byte(&vm, 4 << 30), 0x77);
}

#[test]
fn untouched_memory_is_known_to_be_a_hole() {
    let vm = start("-machine q35 -m 1024 -S");
    let ram::DataRanges::Known(ranges) = only_block(&vm, "").mapping.data_ranges().unwrap() else {
        panic!("an own child's page map can be read")
    };
    let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    assert!(bytes < 64 << 20, "{bytes} bytes of a VM that never ran");
}

#[test]
fn numa_nodes_are_reached_each_or_left_to_qemus_stream() {
    let vm = start(
        "-machine q35 -m 64 -S -smp 2 \
         -object memory-backend-ram,id=a,size=32M -object memory-backend-ram,id=b,size=32M \
         -numa node,nodeid=0,memdev=a,cpus=0 -numa node,nodeid=1,memdev=b,cpus=1",
    );
    let blocks = RamBlocks::of(&vm);
    // QEMU before 8.0 reports only the first block's address.
    let all = vm.qmp.version() >= (8, 0, 0);
    assert_eq!(blocks.reached.len(), if all { 2 } else { 1 }, "{blocks:?}");
    assert_eq!(blocks.notes.is_empty(), all);
    let last = blocks.reached.last().unwrap();
    last.mapping.write(0, &[0x77]).unwrap();
    assert_eq!(guest_byte(&vm, if all { 32 << 20 } else { 0 }), 0x77);
}

#[test]
fn firmware_stays_with_qemu() {
    let vm = start("-machine q35 -m 16 -S");
    assert!(RamBlocks::of(&vm).reached.is_empty());
}

#[test]
fn memory_that_may_be_unplugged_is_known() {
    let vm = start(
        "-machine q35 -m 64,maxmem=1G -S -object memory-backend-memfd,id=vm0,size=128M,share=on \
         -device virtio-mem-pci,memdev=vm0,id=m",
    );
    let blocks = RamBlocks::of(&vm);
    // QEMU before 8.0 reports only the first block's address.
    let all = vm.qmp.version() >= (8, 0, 0);
    assert_eq!(blocks.reached.len(), if all { 2 } else { 1 }, "{blocks:?}");
    for block in &blocks.reached {
        assert_eq!(block.may_be_unplugged, block.name.ends_with("/vm0"), "{blocks:?}");
    }
}

/// No guest plugs anything here, and may plug what is requested.
#[test]
fn unplugged_memory_is_counted() {
    for (requested, bytes) in [("0", 128 << 20), ("32M", 96 << 20)] {
        let vm = start(&format!(
            "-machine q35 -m 64,maxmem=1G,slots=2 -S \
             -object memory-backend-ram,id=m,size=128M -device pc-dimm,memdev=m,id=d \
             -object memory-backend-memfd,id=vm0,size=128M,share=on \
             -device virtio-mem-pci,memdev=vm0,requested-size={requested}"
        ));
        let expected = [Memory { id: "vm0".to_owned(), bytes }];
        assert_eq!(vm.qmp.unplugged().unwrap(), expected);
        assert_eq!(shape::of(&vm.qmp).unwrap().unplugged, expected);
        let backends = vm.qmp.plugged_backends().unwrap();
        let plugged: u64 = backends.iter().map(|backend| backend.bytes).sum();
        assert_eq!(plugged, (320 << 20) - bytes, "{backends:?}");
    }
    let vm = start("-machine q35 -m 64 -S");
    assert_eq!(vm.qmp.unplugged().unwrap(), []);
}

const GIB4: u64 = 4 << 30;
/// Machines, and addresses in the memory of their guests.
const MACHINES: [(&str, &[u64]); 6] = [
    ("-machine pc -m 64 -S", &[0x1000, 60 << 20]),
    ("-machine q35 -m 4352 -S -vga std", &[1 << 20, (2 << 30) - 4096, GIB4, GIB4 + (200 << 20)]),
    ("-machine pc,max-ram-below-4g=1G -m 1536 -S", &[(1 << 30) - 4096, GIB4 + 4096]),
    (
        "-machine q35,memory-backend=r -m 64,slots=2,maxmem=1G -S \
         -object memory-backend-memfd,id=r,size=64M,share=on \
         -object memory-backend-ram,id=m,size=128M -device pc-dimm,memdev=m,id=d",
        &[32 << 20, GIB4 + (1 << 20)],
    ),
    (
        "-machine pc -m 64 -S -smp 2 \
         -object memory-backend-memfd,id=a,size=32M -object memory-backend-ram,id=b,size=32M \
         -numa node,nodeid=0,memdev=a,cpus=0 -numa node,nodeid=1,memdev=b,cpus=1",
        &[1 << 20, 40 << 20],
    ),
    (
        "-machine q35 -m 64,maxmem=1G -S -object memory-backend-memfd,id=vm0,size=128M,share=on \
         -device virtio-mem-pci,memdev=vm0,id=m",
        &[32 << 20, GIB4 + (1 << 20)],
    ),
];

/// Asserts that pages are found, by what the guest reads there.
fn assert_found(arguments: &str, addresses: &[u64]) {
    let vm = start(arguments);
    let reached = RamBlocks::of(&vm).reached;
    let blocks = reached.iter().map(|block| (block.name.as_str(), block.bytes));
    let memory = GuestMemory::of(&vm.qmp, blocks).unwrap();
    let all = vm.qmp.version() >= (8, 0, 0);
    for (nth, address) in addresses.iter().enumerate() {
        // QEMU before 8.0 reports only the first block's address.
        let Some((place, _)) = memory.lookup_run(address / 4096, 1) else {
            assert!(!all && nth > 0, "{address:#x} of {arguments}: {memory:?} {reached:?}");
            continue;
        };
        let mark = 0x70 + u8::try_from(nth).unwrap();
        reached[place.block].mapping.write(place.offset, &[mark]).unwrap();
        assert_eq!(guest_byte(&vm, *address), mark, "{address:#x} of {arguments}");
    }
    assert_eq!(memory.lookup_run(0xfec0_0000 / 4096, 1), None, "no RAM: {arguments}");
}

#[test]
fn a_page_of_the_guest_is_found_in_its_block() {
    for (arguments, addresses) in MACHINES {
        assert_found(arguments, addresses);
    }
}

/// KVM changes what QEMU says of memory. No guest runs for it.
#[test]
fn a_page_of_the_guest_is_found_under_kvm() {
    if File::options().read(true).write(true).open("/dev/kvm").is_err() {
        eprintln!("KVM can't be used on this machine: nothing was tried with it");
        return;
    }
    for (arguments, addresses) in MACHINES {
        assert_found(&format!("-accel kvm {arguments}"), addresses);
    }
}
