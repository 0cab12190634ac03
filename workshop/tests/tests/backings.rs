//! RAM of every backend of QEMU, in one VM, also in files that held something else before: what is
//! zero at the source is zero at the destination.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use end_to_end::memory::HugePages;
use end_to_end::{MIB, Side, World, bare, guest, until};
use lab::guest::GuestSpec;
use lab::hosts::{Link, RUN_DIR};
use marks::runs;
use qemu::process::Process;
use ram::Mapping;

const PAGE: usize = 4096;
/// Former content of files.
const STALE: u8 = 0xa7;
/// 64 MiB and a page: QEMU's TCG loses writes to all RAM blocks but the first if their
/// sizes are multiples of 256 KiB (docs/TESTING-RESULTS.md, "Wrong pages").
const NODE_BYTES: u64 = 64 * MIB + PAGE as u64;

/// Files of a host's own, by backend.
const FILES: [(&str, &str); 5] = [
    ("shared", "files-shm/shared"),
    ("private", "files-shm/private"),
    ("disk", "files-disk"),
    ("new", "files-shm/new"),
    ("huge", "files-huge/ram"),
];

fn with_every_backend() -> GuestSpec {
    let file = |id: &str, share: &str| {
        let (_, path) = FILES.iter().find(|(name, _)| *name == id).unwrap();
        format!("memory-backend-file,id={id},mem-path={RUN_DIR}/{path},share={share}")
    };
    let backends = [
        ("anonymous", "memory-backend-ram,id=anonymous".to_owned()),
        ("memfd", "memory-backend-memfd,id=memfd,share=on".to_owned()),
        ("shared", file("shared", "on")),
        ("private", file("private", "off")),
        ("new", file("new", "on")),
        ("disk", file("disk", "on")),
    ];
    let mut spec = guest(&format!("{}k", 6 * NODE_BYTES / 1024), 2_000_000);
    // Linux uses memory in each node. The guest checks pages of zeros as well.
    spec.orders.zero_bytes = 96 * MIB;
    for (node, (id, backend)) in backends.iter().enumerate() {
        let backend = format!("{backend},size={}k", NODE_BYTES / 1024);
        let numa = format!("node,nodeid={node},memdev={id}");
        spec.extra.extend(["-object", &backend, "-numa", &numa].map(str::to_owned));
    }
    spec
}

/// Fills files as a VM that ran here would have left them.
fn fill(world: &World, side: Side) {
    let stale = vec![STALE; usize::try_from(NODE_BYTES).unwrap()];
    for (_, path) in FILES.iter().filter(|(id, _)| !["new", "huge"].contains(id)) {
        fs::write(world.host(side).inside(path), &stale).unwrap();
    }
}

/// Mounts a file system of a host's own.
fn mount(world: &World, side: Side, place: &str, kind: &[&str]) {
    let place = format!("{RUN_DIR}/{place}");
    for command in [&["mkdir", &place][..], &[&["mount"], kind, &["none", &place]].concat()] {
        let done = world.host(side).command(command[0]).args(&command[1..]).status().unwrap();
        assert!(done.success());
    }
}

/// Pages of a VM's RAM that are full of their files' former content; the guest never has such
/// pages.
fn stale_pages(world: &World, side: Side, name: &str) -> usize {
    let pid = world.vm(side, name).unwrap().pid;
    let process = Process::now(pid).unwrap();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let mut stale = 0;
    for line in maps.lines().filter(|line| FILES.iter().any(|(_, path)| line.ends_with(path))) {
        let (start, rest) = line.split_once('-').unwrap();
        let address = |text| u64::from_str_radix(text, 16).unwrap();
        let (start, end) = (address(start), address(rest.split_once(' ').unwrap().0));
        let ram = Mapping::of_process(process.pidfd(), pid, start, end - start).unwrap();
        let mut bytes = vec![0; usize::try_from(end - start).unwrap()];
        ram.read(0, &mut bytes).unwrap();
        stale += bytes.chunks(PAGE).filter(|page| page.iter().all(|byte| *byte == STALE)).count();
    }
    stale
}

#[test]
fn files_that_held_something_else() {
    let world = World::new(Link::one(1000));
    for side in [Side::A, Side::B] {
        // Like `/dev/shm` on hosts that are separate machines.
        mount(&world, side, "files-shm", &["-t", "tmpfs"]);
    }
    let guest = world.boot(&with_every_backend());
    fill(&world, Side::B);
    // Back to the host that still has its files, from before it left.
    for side in [Side::A, Side::B] {
        let report = world.migrate(&guest, side, &[]);
        assert_eq!(report.placement, "mapped");
        if side == Side::A {
            // Until a program reads all of it, a new file has blocks only for what the VM has
            // there: at most all that the guest and its kernel hold, if they chose this node.
            let new = fs::metadata(world.host(Side::B).inside("files-shm/new")).unwrap();
            let allocated = new.blocks() * 512;
            assert!(
                allocated < NODE_BYTES * 15 / 16,
                "{allocated} bytes of a new file are allocated"
            );
        }
        assert_eq!(stale_pages(&world, side.other(), "web1"), 0);
    }
}

/// All of the VM's RAM is a private mapping of a file.
#[test]
fn mem_path() {
    let world = World::new(Link::one(1000));
    let mut spec = bare("256M", 2_000_000);
    spec.orders.zero_bytes = 64 * MIB;
    spec.extra.extend(["-mem-path".to_owned(), format!("{RUN_DIR}/files-disk")]);
    for side in [Side::A, Side::B] {
        let file = File::create(world.host(side).inside("files-disk")).unwrap();
        file.set_len(256 * MIB).unwrap();
    }
    let guest = world.boot(&spec);
    let stale = vec![STALE; usize::try_from(256 * MIB).unwrap()];
    fs::write(world.host(Side::B).inside("files-disk"), stale).unwrap();
    assert_eq!(world.migrate(&guest, Side::A, &[]).placement, "mapped");
    assert_eq!(stale_pages(&world, Side::B, "web1"), 0);
}

/// The kernel doesn't report which parts of huge pages are holes.
#[runs(alone)]
#[test]
fn huge_pages_that_held_something_else() {
    const PAGES: u64 = 256 / 2;
    // Dropped after the world: its VMs need the pages until they are gone.
    let _pool = HugePages::reserve(3 * PAGES);
    let world = World::new(Link::one(1000));
    for side in [Side::A, Side::B] {
        mount(&world, side, "files-huge", &["-t", "hugetlbfs", "-o", "pagesize=2M"]);
    }
    let mut spec = bare("256M", 2_000_000);
    spec.machine += ",memory-backend=huge";
    let backend = "memory-backend-file,id=huge,size=256M,share=on";
    let backend = format!("{backend},mem-path={RUN_DIR}/files-huge/ram");
    spec.extra.extend(["-object", &backend].map(str::to_owned));
    let guest = world.boot(&spec);
    leave_stale(&world.host(Side::B).inside("files-huge/ram"), 256 * MIB);
    for side in [Side::A, Side::B] {
        assert_eq!(world.migrate(&guest, side, &[]).placement, "mapped");
        assert_eq!(stale_pages(&world, side.other(), "web1"), 0);
    }
}

/// Such files can only be mapped, so the RAM of a stopped QEMU is filled.
fn leave_stale(path: &Path, bytes: u64) {
    let file = File::create_new(path).unwrap();
    file.set_len(bytes).unwrap();
    let backend = format!(
        "memory-backend-file,id=huge,size={bytes},share=on,mem-path={},prealloc=on",
        path.display()
    );
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-S", "-nodefaults", "-display", "none", "-machine", "pc,memory-backend=huge"]);
    qemu.args(["-m", &format!("{}M", bytes / MIB), "-object", &backend]);
    let mut qemu = qemu.spawn().unwrap();
    let mut filled = false;
    until("the file is filled", || {
        let maps = fs::read_to_string(format!("/proc/{}/maps", qemu.id())).unwrap_or_default();
        let line = maps.lines().find(|line| line.ends_with("files-huge/ram"));
        let Some((start, _)) = line.and_then(|line| line.split_once('-')) else { return false };
        let start = u64::from_str_radix(start, 16).unwrap();
        let process = Process::now(qemu.id()).unwrap();
        let ram = Mapping::of_process(process.pidfd(), process.pid(), start, bytes);
        filled = ram.is_ok_and(|ram| ram.fill(0, bytes, STALE).is_ok());
        filled
    });
    qemu.kill().unwrap();
    qemu.wait().unwrap();
}
