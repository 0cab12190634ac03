//! A fault while disks move costs only the move: the VM goes on from its own disk, nothing is left
//! at the destination, and the next move works.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::{Outcome, Phase};
use end_to_end::disk::{allocated_bytes, assert_still, image, mirrors, qemu_io, with_still_disk};
use end_to_end::proxy::Proxies;
use end_to_end::{Frozen, MIB, Moving, Side, World, kill, own_qmp_argument, until};
use lab::guest::Guest;
use lab::hosts::{Link, RUN_DIR};
use qemu::qmp::Qmp;
use tempfile::TempDir;

/// For what takes seconds, on a busy machine too.
const SOON: Duration = Duration::from_secs(60);
const MOVE: [&str; 3] = ["--disks", "all", "--create-disks"];
/// What a disk holds that its guest leaves alone.
const WRITTEN: u64 = 32 * MIB;

/// A VM with a disk of its own, and a link on which its move takes seconds.
struct Faulty {
    world: World,
    guest: Guest,
    pid: u32,
    owners: Arc<Qmp>,
}

impl Faulty {
    fn new() -> Self {
        let world = World::new(Link::one(100));
        let mut spec = with_still_disk(&world, WRITTEN);
        spec.extra.extend(own_qmp_argument(&spec.name));
        let guest = world.boot(&spec);
        let pid = world.vm(Side::A, "web1").unwrap().pid;
        let owners = world.own_qmp(Side::A, "web1");
        Self { world, guest, pid, owners }
    }

    /// Waits for the end of a migration that must fail; returns the reason.
    fn fails(&self, moving: Moving) -> String {
        let ended = moving.wait();
        let Outcome::Failed(why) = ended.report.outcome else { panic!("{:?}", ended.report) };
        assert!(!ended.success && why.contains("The VM stays where it was"), "{why}");
        why
    }

    /// Asserts that the VM goes on, that its disk is as it was, and that QEMU copies it no more, and
    /// writes to it: now a page of these bytes.
    fn goes_on(&self, byte: u8) {
        self.world.remove_own_sockets(Side::B, "web1");
        self.world.assert_stayed(&self.guest, Side::A, self.pid);
        assert_still_goes_on(&self.world, &self.owners, byte);
    }
}

fn assert_still_goes_on(world: &World, owners: &Qmp, byte: u8) {
    let (image, mut held) = (image(world, Side::A), [0; 4096]);
    assert_eq!(mirrors(owners), [""; 0]);
    assert_still(&image, WRITTEN);
    qemu_io(owners, &format!("write -P {byte} {WRITTEN} {}", held.len()));
    File::open(image).unwrap().read_exact_at(&mut held, WRITTEN).unwrap();
    assert_eq!(held, [byte; 4096]);
}

/// Asserts that the disk has moved with its VM: what it held, and the last page written to it.
fn assert_has_moved(image: &Path, byte: u8) {
    let mut held = [0; 4096];
    assert_still(image, WRITTEN);
    File::open(image).unwrap().read_exact_at(&mut held, WRITTEN).unwrap();
    assert_eq!(held, [byte; 4096]);
}

/// A file system on B only.
struct Small<'w> {
    world: &'w World,
    dir: TempDir,
}

impl<'w> Small<'w> {
    fn mount(world: &'w World, mib: u64) -> Self {
        let small = Self { world, dir: TempDir::new().unwrap() };
        // It is unmounted with the host's mount namespace.
        small.run("mount", &["-t", "tmpfs", "-o", &format!("size={mib}m"), "small"]);
        small
    }

    fn run(&self, program: &str, args: &[&str]) -> String {
        let output = self.world.hosts.b.command(program).args(args).arg(self.dir.path()).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{program} {args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The option that has the image made here.
    fn set(&self) -> String {
        format!("{RUN_DIR}/disk.img={}/disk.img", self.dir.path().display())
    }

    fn resize(&self, mib: u64) {
        self.run("mount", &["-o", &format!("remount,size={mib}m")]);
    }

    /// The image here, as a VM on B sees it.
    fn image(&self) -> PathBuf {
        let pid = self.world.vm(Side::B, "web1").unwrap().pid;
        format!("/proc/{pid}/root{}/disk.img", self.dir.path().display()).into()
    }

    /// The names of its files.
    fn files(&self) -> String {
        self.run("ls", &["-A"])
    }

    fn taken_mib(&self) -> u64 {
        let said = self.run("du", &["-sm"]);
        said.split_whitespace().next().unwrap().parse().unwrap()
    }
}

/// The file system is too small at first; or it shrinks after it was checked, as if others wrote to
/// it as well.
#[test]
fn a_file_system_that_is_full() {
    let faulty = Faulty::new();
    let Faulty { world, guest, pid, .. } = &faulty;
    let small = Small::mount(world, 8);
    let set = small.set();
    let args = [&MOVE[..], &["--set", &set]].concat();
    let refused = world.refuses(Side::A, &[&["migrate", "web1", "host-b"][..], &args].concat());
    assert!(refused.contains("disk `data`") && refused.contains("there is room for"), "{refused}");
    world.assert_stayed(guest, Side::A, *pid);
    assert_eq!(small.files(), "");

    small.resize(64);
    let mut moving = world.begin(guest, Side::A, &args);
    moving.wait_for(Phase::FirstPass);
    until("blocks are written", || small.taken_mib() > 1);
    small.resize(8);
    let why = faulty.fails(moving);
    for word in ["host-b", "disk data", "no space left at the destination"] {
        assert!(why.contains(word), "{word:?} is not in: {why}");
    }
    faulty.goes_on(1);
    assert_eq!(small.files(), "");

    small.resize(64);
    drop(world.migrate(guest, Side::A, &args));
    assert_has_moved(&small.image(), 1);
}

/// The disk takes nothing for a while, like overloaded storage: memory passes it on the same lane,
/// however little the agents may buffer.
#[test]
fn a_disk_that_stands_still() {
    let mut world = World::new(Link::one(200));
    world.restart_agents_with(&["--pool-mib", "16"]);
    let mut spec = with_still_disk(&world, WRITTEN);
    spec.orders.random_bytes = 64 * MIB;
    let guest = world.boot(&spec);
    let args = [&MOVE[..], &["--lanes", "1", "--compress", "off"]].concat();
    let mut moving = world.begin(&guest, Side::A, &args);
    moving.wait_for(Phase::FirstPass);
    until("blocks are written", || allocated_bytes(&world, Side::B) > MIB);
    // A frozen QEMU writes no disk, but its memory can be written from outside.
    let frozen = Frozen::new(world.vm(Side::B, "web1").unwrap().pid);
    moving.wait_for(Phase::LaterPass);
    moving.wait_line("limited by the destination's storage");
    drop(frozen);
    let report = world.arrive(&guest, Side::A, moving);
    assert!(report.lanes.iter().all(|lane| lane.deaths == 0), "{:?}", report.lanes);
    assert_still(&image(&world, Side::B), WRITTEN);
}

/// The QEMU that writes the image there dies. In the next move the disk takes nothing, and
/// cancelling that doesn't wait for such a disk.
#[test]
fn a_sink_that_dies_and_a_disk_that_stands_still_is_given_up() {
    let faulty = Faulty::new();
    let Faulty { world, guest, .. } = &faulty;
    let begin = || {
        let mut moving = world.begin(guest, Side::A, &MOVE);
        moving.wait_for(Phase::FirstPass);
        until("blocks are written", || allocated_bytes(world, Side::B) > MIB);
        moving
    };
    let moving = begin();
    assert_ne!(mirrors(&faulty.owners), [""; 0]);
    kill(world.vm(Side::B, "web1").unwrap().pid);
    let why = faulty.fails(moving);
    assert!(why.contains("host-b"), "{why}");
    faulty.goes_on(1);
    assert!(!image(world, Side::B).exists(), "an image that was made for nothing");

    let mut moving = begin();
    let frozen = Frozen::new(world.vm(Side::B, "web1").unwrap().pid);
    moving.wait_line("limited by the destination's storage");
    moving.interrupt();
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
    assert_still_goes_on(world, &faulty.owners, 2);
    drop(frozen);
    faulty.goes_on(3);
    drop(world.migrate(guest, Side::A, &MOVE));
    assert_has_moved(&image(world, Side::B), 3);
}

/// Whether a thread of B's agent waits until a VM is loaded.
fn loads(world: &World) -> bool {
    let tasks = fs::read_dir(format!("/proc/{}/task", world.agent(Side::B).pid())).unwrap();
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
    tasks.filter_map(|task| name(task.ok()?)).any(|name| name.trim() == "arrival-load")
}

/// The disk hangs when everything has arrived, and the image is to be made durable. The agent there
/// still learns that the VM stays, and leaves nothing behind.
#[test]
fn a_disk_that_hangs_at_the_end() {
    let mut world = World::new(Link::one(200));
    let proxies = Proxies::start(&world.hosts, 1);
    world.tell_agents(vec!["--peers".to_owned(), Proxies::peers(&world.hosts)]);
    let mut spec = with_still_disk(&world, WRITTEN);
    // Pages are left when the VM is stopped.
    spec.orders.rate = 15_000_000;
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot(&spec);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let owners = world.own_qmp(Side::A, "web1");
    let events = owners.events_named(&["MIGRATION"]);
    let moving = world.begin(&guest, Side::A, &[&MOVE[..], &["--blackout-max", "100"]].concat());
    // The disk was copied and flushed; pages and devices are left.
    while events.recv_timeout(SOON).expect("it gets there").data["status"] != "device" {}
    proxies.hold_up(Side::A);
    let frozen = Frozen::new(world.vm(Side::B, "web1").unwrap().pid);
    proxies.mend();
    until("all has arrived", || loads(&world));
    moving.interrupt();
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
    until("what arrived is gone", || world.vms(Side::B).is_empty());
    until("nobody waits for it", || !loads(&world));
    drop(frozen);
    assert!(!image(&world, Side::B).exists(), "an image that was made for nothing");
    world.remove_own_sockets(Side::B, "web1");
    world.assert_stayed(&guest, Side::A, pid);
    assert_still_goes_on(&world, &owners, 1);
    drop(world.migrate(&guest, Side::A, &MOVE));
    assert_has_moved(&image(&world, Side::B), 1);
}
