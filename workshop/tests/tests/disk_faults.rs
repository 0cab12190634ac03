//! A fault while disks move costs only the move: the VM goes on from its own disk, nothing is left
//! at the destination, and the next move works.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::{Outcome, Phase};
use end_to_end::disk::{
    allocated_bytes, assert_disk_intact, assert_still, image, mirrors, qemu_io, with_disk,
    with_still_disk,
};
use end_to_end::proxy::Proxies;
use end_to_end::{Frozen, MIB, Moving, Side, World, kill, own_qmp_argument, until};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Link, RUN_DIR};
use qemu::qmp::Qmp;
use tempfile::TempDir;

/// For what takes seconds, on a busy machine too.
const SOON: Duration = Duration::from_secs(60);
const MOVE: [&str; 3] = ["--disks", "all", "--create-disks"];
/// Where a guest leaves its disk alone, what that holds.
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
        Self::with(|world| with_disk(world, "raw", 1_000_000))
    }

    fn with(disk: impl FnOnce(&World) -> GuestSpec) -> Self {
        let world = World::new(Link::one(100));
        let mut spec = disk(&world);
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

    /// Asserts that the VM goes on, that its disk holds what it wrote, and that QEMU copies it no
    /// more.
    fn goes_on(&self) {
        self.world.remove_own_sockets(Side::B, "web1");
        self.world.assert_stayed(&self.guest, Side::A, self.pid);
        assert_disk_intact(&self.guest);
        assert_eq!(mirrors(&self.owners), [""; 0]);
    }
}

/// Asserts that a disk that its guest leaves alone is as it was, and that QEMU still writes to it.
fn assert_still_goes_on(world: &World, owners: &Qmp) {
    let (image, mut held) = (image(world, Side::A), [0; 4096]);
    assert_still(&image, WRITTEN);
    qemu_io(owners, &format!("write -P 119 {WRITTEN} {}", held.len()));
    File::open(image).unwrap().read_exact_at(&mut held, WRITTEN).unwrap();
    assert_eq!(held, [119; 4096]);
    assert_eq!(mirrors(owners), [""; 0]);
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
    let faulty = Faulty::with(|world| with_still_disk(world, WRITTEN));
    let Faulty { world, guest, pid, owners } = &faulty;
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
    world.remove_own_sockets(Side::B, "web1");
    world.assert_stayed(guest, Side::A, *pid);
    assert_still_goes_on(world, owners);
    assert_eq!(small.files(), "");

    small.resize(64);
    drop(world.migrate(guest, Side::A, &args));
    assert_still(&small.image(), WRITTEN);
}

/// The disk takes nothing for a while, like overloaded storage: memory passes it on the same lane,
/// however little the agents may buffer.
#[test]
fn a_disk_that_stands_still() {
    let mut world = World::new(Link::one(200));
    world.restart_agents_with(&["--pool-mib", "16"]);
    let mut spec = with_disk(&world, "raw", 200_000);
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
    assert_disk_intact(&guest);
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
    faulty.goes_on();
    assert!(!image(world, Side::B).exists(), "an image that was made for nothing");

    let mut moving = begin();
    let frozen = Frozen::new(world.vm(Side::B, "web1").unwrap().pid);
    moving.wait_line("limited by the destination's storage");
    moving.interrupt();
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
    assert_disk_intact(guest);
    assert_eq!(mirrors(&faulty.owners), [""; 0]);
    drop(frozen);
    faulty.goes_on();
    drop(world.migrate(guest, Side::A, &MOVE));
    assert_disk_intact(guest);
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
    let mut spec = with_disk(&world, "raw", 1_000_000);
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
    assert_disk_intact(&guest);
    assert_eq!(mirrors(&owners), [""; 0]);
    drop(world.migrate(&guest, Side::A, &MOVE));
    assert_disk_intact(&guest);
}
