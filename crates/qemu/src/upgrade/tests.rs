use facts::program::{CpuModel, MachineType};

use super::*;

const MIB: u64 = 1 << 20;
const MACHINE: &str = "pc-q35-7.2";

fn backend(id: &str, mib: u64, share: bool) -> MemoryBackend {
    MemoryBackend { id: id.to_owned(), bytes: mib * MIB, share }
}

fn known(line: &str, backends: Vec<MemoryBackend>) -> Known {
    Known {
        argv: line.split_whitespace().map(str::to_owned).collect(),
        machine: MACHINE.to_owned(),
        ram_bytes: backends.iter().map(|one| one.bytes).sum(),
        backends,
        ..Known::default()
    }
}

fn next() -> Capabilities {
    let machine = MachineType { name: MACHINE.to_owned(), alias: None, deprecated: false };
    let cpu = CpuModel { name: "Haswell".to_owned(), unavailable: Vec::new() };
    Capabilities {
        version: (11, 1, 3),
        machines: vec![machine],
        cpus: vec![cpu],
        ..Capabilities::default()
    }
}

fn reasons(known: &Known) -> Vec<String> {
    match known.plan(&next()) {
        Plan::Not { reasons } => reasons.iter().map(ToString::to_string).collect(),
        plan => panic!("{plan:?}"),
    }
}

#[test]
fn shared_files_are_handed_over_and_private_memory_is_copied() {
    let plan = |line: &str, backends| known(line, backends).plan(&next());
    let file = "qemu -object memory-backend-file,id=r,size=64M,share=on,mem-path=/ram";
    let memfd = "qemu -object memory-backend-memfd,id=r,size=64M";
    let made = "qemu -object memory-backend-file,id=r,size=64M,share=on,\
                mem-path=/proc/self/fd/droveway-ram";
    let copied = |mib| Plan::Copied { bytes: mib * MIB };
    for (line, backends, expected) in [
        (file, vec![backend("r", 64, true)], Plan::HandedOver),
        (made, vec![backend("r", 64, true)], Plan::HandedOver),
        // Mapped privately, whatever the file is.
        (file, vec![backend("r", 64, false)], copied(64)),
        // 7.2 would leave it out, and others would not.
        (memfd, vec![backend("r", 64, true)], copied(64)),
        ("qemu -m 64", vec![backend("pc.ram", 64, false)], copied(64)),
        // Plugged in since.
        (file, vec![backend("r", 64, true), backend("more", 32, true)], copied(96)),
    ] {
        assert_eq!(plan(line, backends), expected, "{line}");
    }
    let unlisted = Known { ram_bytes: 96 * MIB, ..known(file, vec![backend("r", 64, true)]) };
    assert_eq!(unlisted.plan(&next()), copied(96));
}

/// Two QEMUs with the same file would write to each other's RAM.
#[test]
fn ram_in_a_shared_file_is_handed_over_and_never_copied() {
    let dir = tempfile::tempdir().unwrap();
    let object = |path: &str| {
        let object = format!("memory-backend-file,id=r,size=64M,share=on,mem-path={path}");
        ["qemu", "-object", &object].map(str::to_owned).to_vec()
    };
    for (path, expected) in [
        ("ram", vec!["r".to_owned()]),
        (".", Vec::new()),
        ("/proc/self/fd/droveway-ram", Vec::new()),
    ] {
        assert_eq!(in_files(&object(path), dir.path()), expected, "{path}");
    }
    let file = "qemu -object memory-backend-file,id=r,size=64M,share=on,mem-path=/ram";
    let in_files = vec!["r".to_owned()];
    let shared = Known { in_files, ..known(file, vec![backend("r", 64, true)]) };
    assert_eq!(shared.plan(&next()), Plan::HandedOver);
    // The other part can't be handed over.
    let backends = vec![backend("r", 64, true), backend("more", 32, false)];
    let mixed = Known { ram_bytes: 96 * MIB, backends, ..shared.clone() };
    let reasons = vec![Obstacle::InFile { id: "r".to_owned() }];
    assert_eq!(mixed.plan(&next()), Plan::Not { reasons });
    let hints = Known { hints_free_pages: true, ..shared.clone() };
    assert_eq!(hints.plan(&next()), Plan::Not { reasons: vec![Obstacle::FreePageHint] });
    let hints = Known { in_files: Vec::new(), ..hints };
    assert_eq!(hints.plan(&next()), Plan::Copied { bytes: 64 * MIB });
    // It takes no memory.
    let no_room = Some(NoRoom::Pages { needed: 64 * MIB, available: 16 * MIB });
    let (pages_bytes, group_room) = (64 * MIB, Some(0));
    let narrow = Known { no_room, pages_bytes, group_room, ..shared };
    assert_eq!(narrow.plan(&next()), Plan::HandedOver);
}

/// As it starts, or as it loads the VM.
#[test]
fn ram_that_the_next_qemu_would_write_to_is_not_handed_over() {
    let line = "qemu -object memory-backend-file,id=r,size=64M,share=on,mem-path=/ram";
    let of = |kind: &str, in_files: &[&str]| {
        let devices = vec!["virtio-net-pci".to_owned(), kind.to_owned()];
        let in_files = in_files.iter().map(|id| (*id).to_owned()).collect();
        Known { devices, in_files, ..known(line, vec![backend("r", 64, true)]) }
    };
    let older = Capabilities { version: (8, 0, 5), ..next() };
    let oldest = Capabilities { version: (8, 1, 0), ..next() };
    for (kind, qemu, writes) in [
        ("virtio-mem-pci", &older, true),
        ("virtio-mem-pci", &oldest, false),
        ("vmgenid", &next(), true),
        ("loader", &next(), true),
        ("virtio-balloon-pci", &older, false),
    ] {
        let reasons = vec![Obstacle::Writer { kind: kind.to_owned() }];
        let not = if writes { Plan::Not { reasons } } else { Plan::HandedOver };
        assert_eq!(of(kind, &["r"]).plan(qemu), not, "{kind}");
        let copied = if writes { Plan::Copied { bytes: 64 * MIB } } else { Plan::HandedOver };
        assert_eq!(of(kind, &[]).plan(qemu), copied, "{kind}");
    }
}

#[test]
fn what_forbids_it_is_named() {
    let plain = || known("qemu -cpu Haswell,+aes", vec![backend("pc.ram", 64, false)]);
    assert_eq!(plain().plan(&next()), Plan::Copied { bytes: 64 * MIB });
    let vm = Known { blockers: vec!["0000:00:04.0/nvme".to_owned()], ..plain() };
    assert_eq!(reasons(&vm), ["QEMU can't migrate it: 0000:00:04.0/nvme"]);
    let devices = ["virtio-net-pci", "vfio-pci-nohotplug", "vhost-user-fs-pci", "vhost-vsock-pci"];
    let vm = Known { devices: devices.map(str::to_owned).to_vec(), ..plain() };
    let expected = [
        "vfio-pci-nohotplug has a device of the host for itself",
        "the back end of vhost-user-fs-pci serves one QEMU",
        "the back end of vhost-vsock-pci serves one QEMU",
    ];
    assert_eq!(reasons(&vm), expected);
    let vm = known("qemu -serial unix:/s", Vec::new());
    assert_eq!(reasons(&vm), ["-serial is connected to something outside of QEMU"]);
    let no_room = NoRoom::Pages { needed: 64 * MIB, available: 16 * MIB };
    let vm = Known { no_room: Some(no_room), ..plain() };
    assert_eq!(reasons(&vm), ["a copy of its RAM takes 64 MiB, and this host has 16 MiB"]);
    let no_room = NoRoom::Huge { page_bytes: 2 * MIB, needed: 32, free: 4 };
    let vm = Known { no_room: Some(no_room), ..plain() };
    assert_eq!(reasons(&vm), ["a copy of its RAM takes 64 MiB, and this host has 8 MiB"]);
    let group = |mib: u64| Known {
        pages_bytes: 64 * MIB,
        group_room: Some(mib * MIB),
        ..known("qemu -cpu Haswell,+aes", vec![backend("pc.ram", 64, false)])
    };
    assert_eq!(group(64).plan(&next()), Plan::Copied { bytes: 64 * MIB });
    let [narrow] = &reasons(&group(63))[..] else { panic!() };
    assert!(narrow.starts_with("a copy of its RAM takes 64 MiB (what it has touched"), "{narrow}");
    assert!(narrow.contains("its cgroup leaves 63 MiB: raise its limit"), "{narrow}");
    let vm = Known { machine: "pc-q35-12.0".to_owned(), ..plain() };
    assert_eq!(reasons(&vm), ["QEMU 11.1.3 doesn't know the machine type pc-q35-12.0"]);
    let vm = known("qemu -cpu Later", Vec::new());
    assert_eq!(reasons(&vm), ["QEMU 11.1.3 doesn't know the CPU model Later"]);
    let vm = known("qemu -m", Vec::new());
    assert_eq!(reasons(&vm), ["its command line can't be used: -m needs an argument"]);
}

#[test]
fn of_libvirts_vms_only_libvirt_is_named() {
    let line = "qemu -chardev socket,id=charmonitor,fd=22,server=on,wait=off -vnc :1 -m 64";
    let vm = known(line, Vec::new());
    assert_eq!(vm.plan(&next()), Plan::Not { reasons: vec![Obstacle::Libvirt] });
}

/// Both QEMUs are in it.
#[test]
fn within_a_cgroup_a_copy_takes_what_was_touched_and_a_quarter_of_the_rest() {
    let plain = |pages_mib, backends, touched_mib: Option<u64>| Known {
        pages_bytes: pages_mib * MIB,
        touched_bytes: touched_mib.map(|mib| mib * MIB),
        ..known("qemu", backends)
    };
    for (pages, shared, touched, expected) in [
        (1024, 0, None, 1024),
        (1024, 0, Some(24), 24 + 250),
        (1024, 0, Some(1024), 1024),
        // Its QEMU has memory besides.
        (1024, 0, Some(1100), 1100),
        // Shared memory is allocated as it is read.
        (1024, 1024, Some(50), 1024 + 50),
        (1024, 512, Some(112), 512 + 112 + 100),
        // In huge pages.
        (0, 1024, Some(50), 50),
    ] {
        let backends = vec![backend("r", 1024, false), backend("s", shared, true)];
        let bytes = plain(pages, backends, touched).copy_bytes();
        assert_eq!(bytes, expected * MIB, "{pages} {shared} {touched:?}");
    }
    let narrow = |room_mib: u64| Known {
        group_room: Some(room_mib * MIB),
        ..plain(1024, vec![backend("pc.ram", 1024, false)], Some(24))
    };
    assert_eq!(narrow(274).plan(&next()), Plan::Copied { bytes: 1024 * MIB });
    let [narrow] = &reasons(&narrow(273))[..] else { panic!() };
    assert!(narrow.contains("takes 274 MiB (what it has touched, and a quarter"), "{narrow}");
}
