//! A guest with file systems full of files, and a helper that reports which of its memory is a copy
//! of them; seen from outside: the guest's RAM in QEMU, and the disks' images.

use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use api::GuestHelper;
use cachemap::{Budget, CacheMap, PAGE_BYTES, Run};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{RUN_DIR, Storage};
use lab::setup::{self, Kit};
use qemu::guest_port::{self, GuestError, Patience};
use serde_json::Value;

use crate::memory::guest_ram;
use crate::{MIB, Side, World, assert_no_page_is_wrong, guest, own_qmp_argument, until};

/// The guest's memory.
pub const RAM_BYTES: u64 = 256 * MIB;
/// Bytes of files on each disk, unless a test needs more.
const FILES_BYTES: u64 = 8 * MIB;
/// For tests that compare amounts.
pub const MANY_FILES_BYTES: u64 = 2 * FILES_BYTES;
const EXT4_BYTES: u64 = 128 * MIB;
/// The smallest disk on which XFS can be made.
const XFS_BYTES: u64 = 304 * MIB;
/// Twice the smallest disk on which btrfs can be made.
const BTRFS_BYTES: u64 = 256 * MIB;
/// First sector of the first partition on old disks, which isn't aligned to pages.
const PARTITION_SECTOR: u64 = 63;
/// Where the volume of a disk starts, behind what LVM would keep there.
const VOLUME_AT: u64 = MIB;
const SECTOR: usize = 512;
const SECTOR_BYTES: u64 = SECTOR as u64;
/// QEMU usually reports a port at once, but the machine may be busy.
const FIND_MAX: Duration = Duration::from_secs(60);
/// Bytes copied at once.
const PIECE: usize = 1 << 20;
const PAGE: usize = 4096;

/// Serial numbers of the disks in the guest.
pub const SERIALS: [&str; 2] = ["files-ext4", "files-xfs"];

/// The image of a disk, by its serial number, as seen from outside. It is on host A, and both hosts
/// use this path.
#[must_use]
pub fn image(world: &World, serial: &str) -> PathBuf {
    world.host(Side::A).run_dir.join(format!("{serial}.img"))
}

fn run(program: &str, args: &[&str]) {
    let program = lab::program::find(program).unwrap_or_else(|| program.into());
    let output = Command::new(&program).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} {args:?}: {said}", program.display());
}

/// Makes ext4 on a whole disk, with the blocks that larger disks have.
fn make_ext4(path: &Path) {
    File::create(path).unwrap().set_len(EXT4_BYTES).unwrap();
    run("mkfs.ext4", &["-q", "-F", "-b", "4096", &path.display().to_string()]);
}

/// Makes XFS in the only partition of a disk.
fn make_xfs(path: &Path) {
    let whole = path.with_extension("xfs");
    File::create(&whole).unwrap().set_len(XFS_BYTES).unwrap();
    run("mkfs.xfs", &["-q", "-f", &whole.display().to_string()]);
    let mut disk = File::create(path).unwrap();
    disk.set_len(PARTITION_SECTOR * SECTOR_BYTES + XFS_BYTES).unwrap();
    let mut first = [0; SECTOR];
    // The first of four entries: type Linux, its first sector, its length.
    first[446 + 4] = 0x83;
    let numbers = [PARTITION_SECTOR, XFS_BYTES / SECTOR_BYTES].map(|n| u32::try_from(n).unwrap());
    first[446 + 8..446 + 12].copy_from_slice(&numbers[0].to_le_bytes());
    first[446 + 12..446 + 16].copy_from_slice(&numbers[1].to_le_bytes());
    first[510..].copy_from_slice(&[0x55, 0xaa]);
    disk.write_all(&first).unwrap();
    copy(&File::open(&whole).unwrap(), 0..XFS_BYTES, &disk, PARTITION_SECTOR * SECTOR_BYTES);
    fs::remove_file(&whole).unwrap();
}

/// Makes btrfs on a whole disk, as `mkfs.btrfs` does it by default: data once, metadata twice.
fn make_btrfs(path: &Path) {
    File::create(path).unwrap().set_len(BTRFS_BYTES).unwrap();
    run("mkfs.btrfs", &["-q", "-f", &path.display().to_string()]);
}

/// Makes ext4 in a volume that a guest puts together: the disk's second half comes first.
fn make_volume(path: &Path) {
    const HALF: u64 = EXT4_BYTES / 2;
    let whole = path.with_extension("ext4");
    make_ext4(&whole);
    let disk = File::create(path).unwrap();
    disk.set_len(VOLUME_AT + EXT4_BYTES).unwrap();
    let from = File::open(&whole).unwrap();
    copy(&from, 0..HALF, &disk, VOLUME_AT + HALF);
    copy(&from, HALF..EXT4_BYTES, &disk, VOLUME_AT);
    fs::remove_file(&whole).unwrap();
}

/// Copies whole pieces of a file to a place in another one.
fn copy(from: &File, range: Range<u64>, to: &File, at: u64) {
    let (mut piece, empty) = (vec![0; PIECE], vec![0; PIECE]);
    for offset in range.clone().step_by(PIECE) {
        from.read_exact_at(&mut piece, offset).unwrap();
        // Empty pieces stay holes. Compared as a whole: byte by byte, tests, which are compiled
        // without optimization, would take seconds.
        if piece != empty {
            to.write_all_at(&piece, at + offset - range.start).unwrap();
        }
    }
}

/// Makes images in this directory, for disks that a guest fills with files.
///
/// # Panics
/// If they can't be made.
#[must_use]
pub fn make_images(dir: &Path) -> [PathBuf; 2] {
    let images = SERIALS.map(|serial| dir.join(format!("{serial}.img")));
    make_ext4(&images[0]);
    make_xfs(&images[1]);
    images
}

/// A quiet guest with a helper, which fills its disks with files.
///
/// # Panics
/// If what it boots can't be made.
#[must_use]
pub fn with_helper(kit: &Kit, name: &str) -> GuestSpec {
    let mut spec = guest(&format!("{}M", RAM_BYTES / MIB), 0);
    spec.name = name.to_owned();
    spec.initrd = Some(setup::helper_initrd(kit).unwrap());
    spec.orders.files_bytes = FILES_BYTES;
    spec
}

/// The same with two disks full of files, all of them in the page cache, and a
/// helper.
///
/// # Panics
/// If the disks can't be made.
#[must_use]
pub fn with_files(world: &World) -> GuestSpec {
    with_files_by(world, Reached::Raw)
}

/// How a guest's disks are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// Raw files.
    Raw,
    /// qcow2 files.
    Qcow2,
    /// An NBD server; see [`export`].
    Nbd,
    /// An NFS server of a storage host, which QEMU reaches by itself.
    Nfs,
}

/// The same with disks that are reached in this way.
///
/// # Panics
/// If the disks can't be made.
#[must_use]
pub fn with_files_by(world: &World, reached: Reached) -> GuestSpec {
    with_disks(world, "web1", SERIALS, reached)
}

/// A guest of this name that has the same files on disks of its own.
///
/// # Panics
/// If the disks can't be made.
#[must_use]
pub fn twin_with_files(world: &World, name: &str) -> GuestSpec {
    let serials = ["ext4", "xfs"].map(|kind| format!("{name}-{kind}"));
    let serials = serials.each_ref().map(String::as_str);
    with_disks(world, name, serials, Reached::Raw)
}

/// Its port for the helper is made by `droveway run`.
fn with_disks(world: &World, name: &str, serials: [&str; 2], reached: Reached) -> GuestSpec {
    let mut spec = with_helper(&world.kit, name);
    spec.extra.extend(own_qmp_argument(name));
    make_ext4(&image(world, serials[0]));
    make_xfs(&image(world, serials[1]));
    for serial in serials {
        let path = image(world, serial);
        if reached == Reached::Qcow2 {
            let [raw, qcow2] = [path.with_extension("raw"), path.clone()];
            fs::rename(&path, &raw).unwrap();
            let [from, to] = [&raw, &qcow2].map(|path| path.display().to_string());
            run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &from, &to]);
            fs::remove_file(&raw).unwrap();
        }
        let path = path.display();
        let drive = match reached {
            Reached::Raw => format!("file={path},format=raw,if=none,id={serial}"),
            Reached::Qcow2 => format!("file={path},format=qcow2,if=none,id={serial}"),
            Reached::Nbd => {
                let path = format!("{RUN_DIR}/{}", nbd_socket(serial));
                let server = format!("file.server.type=unix,file.server.path={path}");
                format!("if=none,id={serial},format=raw,file.driver=nbd,{server}")
            }
            Reached::Nfs => {
                let node = Storage::nfs_node(&format!("{serial}.img"));
                let text = |value: &Value| value.as_str().unwrap().to_owned();
                let (host, path) = (text(&node["server"]["host"]), text(&node["path"]));
                let server = format!("file.server.type=inet,file.server.host={host}");
                let image = format!("file.driver=nfs,{server},file.path={path}");
                format!("if=none,id={serial},format=raw,cache.direct=on,{image}")
            }
        };
        let device = format!("virtio-blk-pci,drive={serial},serial={serial}");
        spec.extra.extend(["-drive", &drive, "-device", &device].map(str::to_owned));
    }
    spec
}

/// The same guest with its disks at a virtio-scsi controller: one with a volume, and one with a
/// partition.
///
/// # Panics
/// If the disks can't be made.
#[must_use]
pub fn with_files_on_scsi(world: &World) -> GuestSpec {
    let name = "web1";
    let mut spec = with_helper(&world.kit, name);
    spec.initrd = Some(setup::scsi_initrd(&world.kit).unwrap());
    spec.extra.extend(own_qmp_argument(name));
    make_volume(&image(world, SERIALS[0]));
    make_xfs(&image(world, SERIALS[1]));
    spec.extra.extend(["-device", "virtio-scsi-pci,id=scsi"].map(str::to_owned));
    for (target, serial) in SERIALS.into_iter().enumerate() {
        let path = image(world, serial);
        let drive = format!("file={},format=raw,if=none,id={serial}", path.display());
        let device = format!("scsi-hd,bus=scsi.0,scsi-id={target},drive={serial},serial={serial}");
        spec.extra.extend(["-drive", &drive, "-device", &device].map(str::to_owned));
    }
    spec
}

/// The serial number of the disk of [`with_files_on_btrfs`].
pub const BTRFS_SERIAL: &str = "files-btrfs";

/// The same guest with one disk, which has btrfs.
///
/// # Panics
/// If the disk can't be made.
#[must_use]
pub fn with_files_on_btrfs(world: &World) -> GuestSpec {
    let name = "web1";
    let mut spec = with_helper(&world.kit, name);
    spec.initrd = Some(setup::btrfs_initrd(&world.kit).unwrap());
    spec.extra.extend(own_qmp_argument(name));
    let path = image(world, BTRFS_SERIAL);
    make_btrfs(&path);
    let drive = format!("file={},format=raw,if=none,id=btrfs", path.display());
    let device = format!("virtio-blk-pci,drive=btrfs,serial={BTRFS_SERIAL}");
    spec.extra.extend(["-drive", &drive, "-device", &device].map(str::to_owned));
    spec
}

/// Name of the socket at which each host has a disk served.
fn nbd_socket(serial: &str) -> String {
    format!("{serial}.nbd")
}

/// Servers of all disks, one for each disk on either host, until this is dropped.
pub struct Export(Vec<(Child, PathBuf)>);

/// Serves the disks of a guest with [`Reached::Nbd`].
///
/// # Panics
/// If the servers can't be started.
#[must_use]
pub fn export(world: &World) -> Export {
    let serve = |(side, serial)| {
        let socket = world.host(side).run_dir.join(nbd_socket(serial));
        let mut server = Command::new("qemu-nbd");
        server.args(["--persistent", "--shared=0", "--cache=writeback", "--image-opts"]);
        let image = image(world, serial);
        // Two servers open the same file.
        let file = format!("file.driver=file,file.locking=off,file.filename={}", image.display());
        server.arg("--socket").arg(&socket).arg(format!("driver=raw,{file}"));
        let server = server.spawn().unwrap();
        until("the disk is served", || socket.exists());
        (server, socket)
    };
    let sides = [Side::A, Side::B].into_iter();
    Export(sides.flat_map(|side| SERIALS.map(|serial| (side, serial))).map(serve).collect())
}

impl Export {
    /// Process IDs of the servers.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.0.iter().map(|(server, _)| server.id()).collect()
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        for (server, socket) in &mut self.0 {
            let _ = server.kill();
            let _ = server.wait();
            let _ = fs::remove_file(socket);
        }
    }
}

/// Asserts that all files are as the guest has written them, both in memory and on disk.
///
/// # Panics
/// If one isn't.
pub fn assert_files(guest: &Guest) {
    assert_cached_files(guest);
    guest.ask("files-sync").unwrap();
    guest.ask("files-drop").unwrap();
    assert_cached_files(guest);
}

/// The same for files in memory, and for those on disk that aren't in memory.
///
/// # Panics
/// If one isn't.
pub fn assert_cached_files(guest: &Guest) {
    let checked = guest.check_files().unwrap();
    assert_no_page_is_wrong(&checked);
    let orders = &guest.spec.orders;
    // Churned files may be shorter; small ones take whole pages.
    assert!(checked.pages >= 2 * orders.files_bytes / PAGE_BYTES, "{checked:?}");
}

/// Pages of files in the guest's cache, after it has read all of them.
///
/// # Panics
/// If it doesn't answer.
#[must_use]
pub fn cached_pages(guest: &Guest) -> u64 {
    let answer = guest.ask("files").unwrap();
    answer.strip_prefix("pages=").unwrap().parse().unwrap()
}

/// Waits for the helper, which a guest starts after it has made its files.
///
/// # Panics
/// If the helper doesn't answer.
pub fn wait_helper(world: &World, side: Side, name: &str) {
    let answers = || {
        let helper = world.shown(side, name).helper;
        matches!(helper, Some(GuestHelper::Answers { .. }))
    };
    until("the guest's helper answers", answers);
}

/// Sizes of the guest kernel's caches, in KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The page cache.
    pub cached: u64,
    /// The part of it that counts as used more than once.
    pub active: u64,
    /// The kernel's own tables: inodes, names.
    pub slab: u64,
}

impl Kept {
    /// The current sizes.
    ///
    /// # Panics
    /// If the guest doesn't answer.
    #[must_use]
    pub fn by(guest: &Guest) -> Self {
        let answer = guest.ask("memory").unwrap();
        let number = |name: &str| {
            let word = answer.split(' ').find_map(|word| word.strip_prefix(name)).unwrap();
            word.parse().unwrap()
        };
        Self { cached: number("cached="), active: number("active="), slab: number("slab=") }
    }

    /// Asserts that none has grown by more than 2 MiB, which a guest may use by itself.
    ///
    /// # Panics
    /// If one has.
    pub fn assert_same(&self, later: &Self) {
        let near = |before: u64, after: u64| after <= before + 2048;
        let all = near(self.cached, later.cached)
            && near(self.active, later.active)
            && near(self.slab, later.slab);
        assert!(all, "{self:?}, and later {later:?}");
    }
}

/// The socket of the helper's port, on the VM's host.
///
/// # Panics
/// If it has no port.
#[must_use]
pub fn socket(world: &World, side: Side, name: &str) -> PathBuf {
    let port = guest_port::find(&world.own_qmp(side, name), FIND_MAX).unwrap();
    let within = port.socket.strip_prefix(RUN_DIR).unwrap();
    world.host(side).run_dir.join(within)
}

/// A budget that is enough even on a busy machine.
#[must_use]
pub fn ample() -> Budget {
    Budget { cpu_percent: 100, time_ms: 60_000, ..Budget::default() }
}

/// Asks the helper of a VM.
///
/// # Errors
/// Those of [`guest_port`].
///
/// # Panics
/// If the VM's QEMU doesn't report how much memory it has.
pub fn asked(
    world: &World,
    side: Side,
    name: &str,
    budget: Budget,
) -> Result<CacheMap, GuestError> {
    let limits = guest_port::limits_of(&world.own_qmp(side, name)).unwrap();
    assert_eq!(limits, guest_port::limits(RAM_BYTES));
    let stream = guest_port::connect(&socket(world, side, name))?;
    let usual = Patience::of(budget);
    let patience = Patience { greeting: Duration::from_secs(30), ..usual };
    guest_port::query(&stream, limits, budget, patience)
}

/// Compares each page of a map with its disk, from outside. Returns the number of equal pages, and
/// the first that differs.
///
/// # Panics
/// If one of them can't be read.
#[must_use]
pub fn compare(world: &World, side: Side, name: &str, map: &CacheMap) -> (u64, Option<Run>) {
    let ram = guest_ram(world, side, name, RAM_BYTES);
    let disks: Vec<File> = map
        .devices()
        .iter()
        .map(|device| {
            let image = File::open(image(world, &device.serial)).unwrap();
            assert_eq!(image.metadata().unwrap().len(), device.sectors * SECTOR_BYTES);
            image
        })
        .collect();
    let (mut equal, mut first_wrong) = (0, None);
    let mut page = [0; PAGE];
    let mut block = page;
    for run in map.runs() {
        let disk = &disks[usize::from(run.device)];
        for nth in 0..u64::from(run.pages) {
            ram.read((run.page + nth) * PAGE_BYTES, &mut page).unwrap();
            disk.read_exact_at(&mut block, run.sector * SECTOR_BYTES + nth * PAGE_BYTES).unwrap();
            if page == block {
                equal += 1;
            } else {
                first_wrong.get_or_insert(Run { page: run.page + nth, pages: 1, ..*run });
            }
        }
    }
    (equal, first_wrong)
}
