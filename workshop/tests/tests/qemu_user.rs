//! QEMUs that agents start as a user that may do nothing but run the VM: they move with memory and
//! disks like others.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use end_to_end::{MIB, Side, World, bare};
use lab::hosts::{Link, RUN_DIR};

const USER: &str = "nobody";
/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "262296k";
const DISK_BYTES: u64 = 64 * MIB;
/// What its disk begins with, and how much of that.
const CONTENT: u8 = 0x5a;
const WRITTEN: usize = 4 << 20;

/// The guests' files may lie where only root can read them.
fn readable(world: &mut World) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    open(dir.path(), 0o755);
    let kernel = &mut world.kit.bare_kernel;
    let copy = dir.path().join(kernel.file_name().unwrap());
    fs::copy(&*kernel, &copy).unwrap();
    open(&copy, 0o644);
    *kernel = copy;
    for side in [Side::A, Side::B] {
        open(&world.host(side).run_dir, 0o777);
    }
    dir
}

fn assert_of_that_user(world: &World, side: Side, uid: u32) {
    let pid = world.vm(side, "web1").unwrap().pid;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let uids = format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n");
    assert!(status.contains(&uids) && status.contains("CapEff:\t0000000000000000"), "{status}");
    let image = fs::metadata(world.host(side).run_dir.join("disk.img")).unwrap();
    assert_eq!(image.uid(), uid);
    // No other user can reach the VM by it.
    let qmp = world.host(side).run_dir.join("state/vms/web1/qmp");
    assert_eq!(fs::metadata(&qmp).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(qmp).unwrap().uid(), 0);
}

/// Overwrites the beginning of an image, which no QEMU has open.
fn fill(image: &Path, byte: u8) {
    let file = File::options().write(true).open(image).unwrap();
    file.write_all_at(&vec![byte; WRITTEN], 0).unwrap();
}

#[test]
fn a_vm_of_a_user_of_its_own_moves_with_its_disk() {
    let mut world = World::new(Link::one(1000));
    let _files = readable(&mut world);
    world.restart_agents_with(&["--qemu-user", USER]);
    let uid = fs::read_to_string("/etc/passwd")
        .unwrap()
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{USER}:"))?.split(':').nth(1)?.parse().ok())
        .unwrap();
    let image = |side| world.host(side).run_dir.join("disk.img");
    File::create(image(Side::A)).unwrap().set_len(DISK_BYTES).unwrap();
    fill(&image(Side::A), CONTENT);
    std::os::unix::fs::chown(image(Side::A), Some(uid), None).unwrap();

    let mut spec = bare(ODD, 2_000_000);
    let drive = format!("file={RUN_DIR}/disk.img,format=raw,if=none,id=data");
    let device = "virtio-blk-pci,drive=data,id=vda".to_owned();
    spec.extra.extend(["-drive".to_owned(), drive, "-device".to_owned(), device]);
    let guest = world.boot_with(&spec, &world.kit.qemu_system);
    assert_of_that_user(&world, Side::A, uid);

    for (side, images) in [(Side::A, "--create-disks"), (Side::B, "--overwrite-disks")] {
        let report = world.migrate(&guest, side, &["--disks", "all", images]);
        assert_eq!(report.placement, "mapped");
        assert_of_that_user(&world, side.other(), uid);
        // The way back overwrites it.
        fill(&image(side), 0);
        let mut held = vec![0; WRITTEN];
        File::open(image(side.other())).unwrap().read_exact_at(&mut held, 0).unwrap();
        assert!(held == vec![CONTENT; WRITTEN], "its disk has other content");
    }
    let found = world.tells(Side::A, &["doctor"]);
    assert!(found.contains("started as a user of their own"), "{found}");
    let said = found.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(!said.contains("owns the host"), "{found}");
}

#[test]
fn a_user_that_is_not_there() {
    let world = World::new(Link::one(1000));
    let args = ["agent", "--name", "x", "--listen", "127.0.0.1:7801", "--state"];
    let state = format!("{RUN_DIR}/other");
    let args: Vec<&str> =
        args.into_iter().chain([&*state, "--qemu-user", "no-such-user"]).collect();
    let why = world.refuses(Side::A, &args);
    assert!(why.contains("qemu-user: there is no user `no-such-user`"), "{why}");
}
