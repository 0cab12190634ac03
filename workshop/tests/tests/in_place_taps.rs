//! A VM with taps gets another QEMU on its host: the taps stay what and where they are, and go on,
//! whatever fails.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::Duration;

use api::VmStatus;
use end_to_end::faults::{Traced, phase_within};
use end_to_end::{MIB, OwnProgram, Side, World, bare, guest, kill, note, reached, until};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Link, Outside};
use lab::setup;
use lab_guest::net::ADDRESS;
use marks::runs;

/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "262296k";
const RATE: u64 = 2_000_000;
/// By which options of `run` a VM has RAM of QEMU's own, or in files of the agent's.
const RAMS: [&[&str]; 2] = [&[], &["--hand-over"]];
const TAP: &str = "vmtap";
const BRIDGE: &str = "vmbr";
/// memcached's port.
const PORT: u16 = 11211;
/// What a client waits at most for an answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long each command to a device takes: there is time for a fault between any two.
const STEP: Duration = Duration::from_millis(200);

/// Runs `ip` on A.
fn ip(world: &World, change: &str) -> String {
    let done = world.host(Side::A).command("ip").args(change.split(' ')).output().unwrap();
    assert!(done.status.success(), "ip {change}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// The tap on A, as the host knows it. Its number never comes again: another tap has another one.
#[derive(Debug, PartialEq, Eq)]
struct Known {
    number: String,
    on_bridge: bool,
    persistent: bool,
    /// Whether a QEMU has it.
    has_carrier: bool,
}

fn known(world: &World) -> Known {
    let shown = ip(world, &format!("-o -d link show {TAP}"));
    Known {
        number: shown.split(':').next().unwrap().to_owned(),
        on_bridge: shown.contains(&format!(" master {BRIDGE} ")),
        persistent: shown.contains(" persist on "),
        has_carrier: shown.contains("LOWER_UP"),
    }
}

/// Asserts that the tap is the same, on the bridge, with a QEMU, and that nothing of another is
/// left.
fn assert_same(world: &World, before: &Known) {
    let is_there = || known(world) == *before;
    assert!(reached(is_there), "{before:?}\n{:?}", known(world));
    assert!(before.has_carrier && before.on_bridge, "{before:?}");
    let left = ip(world, "-o link");
    assert!(!left.contains(": droveway"), "{left}");
    assert!(!world.host(Side::A).inside("state/vms/web1/taps").exists());
}

fn connected(world: &World) {
    ip(world, &format!("link add {BRIDGE} up type bridge"));
}

/// Makes the tap, which may have several queues.
fn make_for_several_queues(world: &World) {
    ip(world, &format!("tuntap add dev {TAP} mode tap multi_queue"));
    ip(world, &format!("link set {TAP} master {BRIDGE} up"));
}

/// A guest with a network card at the tap; it uses none.
fn with_card(tap: &str, device: &str) -> GuestSpec {
    let mut spec = bare(ODD, RATE);
    let tap = format!("tap,id=n0,ifname={TAP},{tap}");
    let device = format!("virtio-net-pci,netdev=n0,romfile={device}");
    spec.extra.extend(["-netdev".to_owned(), tap, "-device".to_owned(), device]);
    spec
}

/// A script on the hosts that puts a tap on the bridge.
fn script(dir: &Path) -> String {
    let path = dir.join("connects");
    fs::write(&path, format!("#!/bin/sh\nip link set \"$1\" master {BRIDGE} up\n")).unwrap();
    for path in [dir, &path] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    path.display().to_string()
}

/// A VM whose tap its QEMU has made, and which vanishes with it. The program is a script, so that
/// the VM may get another QEMU of the same program.
struct Made {
    world: World,
    guest: Guest,
    before: Known,
    _dir: tempfile::TempDir,
}

impl Made {
    fn new(options: &[&str]) -> Self {
        let mut world = World::new(Link::unshaped());
        let program = OwnProgram::new(&mut world);
        connected(&world);
        let dir = tempfile::tempdir().unwrap();
        let spec = with_card(&format!("script={},downscript=no", script(dir.path())), "");
        let guest = world.boot_by(&spec, &program.path, options);
        let before = known(&world);
        assert!(!before.persistent, "{before:?}");
        Self { world, guest, before, _dir: dir }
    }

    fn pid(&self) -> u32 {
        self.world.vm(Side::A, "web1").unwrap().pid
    }

    /// Asserts that the VM runs in that QEMU, with its tap, and gets another one.
    fn assert_has_it(self, pid: u32) {
        let Self { world, guest, before, _dir } = self;
        let vm = || world.vm(Side::A, "web1").expect("its VM is listed");
        let runs = || vm().status == VmStatus::Running && vm().migration.is_none();
        assert!(reached(runs), "{:?}\n{}", vm(), world.agent(Side::A).log_text());
        assert_eq!(vm().pid, pid, "{}", world.agent(Side::A).log_text());
        world.assert_stayed(&guest, Side::A, pid);
        world.assert_nothing_else(Side::A);
        assert_same(&world, &before);
        drop(world.upgrade(&guest, Side::A, &[]));
        assert_same(&world, &before);
        world.says(Side::A, &["stop", "web1", "--force"]);
        until("the tap has gone with its VM", || !ip(&world, "-o link").contains(TAP));
    }
}

/// Numbers its requests to the server in the guest, on one connection, and checks each answer,
/// until the sender of `over` is dropped.
fn converse(connection: TcpStream, over: &Receiver<()>, answered: &AtomicU64) {
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut requests = connection.try_clone().unwrap();
    let mut answers = BufReader::new(connection).lines();
    let mut next = || answers.next().expect("the connection has ended").unwrap();
    while over.try_recv() == Err(TryRecvError::Empty) {
        let number = format!("{:08}", answered.load(Relaxed));
        write!(requests, "set n 0 0 8\r\n{number}\r\nget n\r\n").unwrap();
        let expected = ["STORED", "VALUE n 0 8", number.as_str(), "END"];
        assert_eq!([next(), next(), next(), next()], expected);
        answered.fetch_add(1, Relaxed);
    }
}

/// A client outside is connected to a server in the guest, and notices nothing but a pause.
fn a_connection_goes_on(options: &[&str], more: &str) {
    let mut world = World::new(Link::unshaped());
    let program = OwnProgram::new(&mut world);
    let outside = Outside::join(&world.hosts).unwrap();
    let mut spec = guest(ODD, RATE);
    spec.orders.serve_bytes = 8 * MIB;
    spec.initrd = Some(setup::server_initrd(&world.kit).unwrap());
    if more.contains("queues=") {
        ip(&world, &format!("link del {TAP}"));
        make_for_several_queues(&world);
    }
    let mut network = Outside::arguments();
    network[1].push_str(more);
    spec.extra.extend(network);
    let guest = world.boot_by(&spec, &program.path, options);
    let before = known(&world);
    let connect = || outside.host.within(|| TcpStream::connect((ADDRESS, PORT)).ok());
    let mut connection = None;
    until("the server listens", || {
        connection = connect();
        connection.is_some()
    });
    let connection = connection.unwrap();
    let answered = &AtomicU64::new(0);
    let (going, over) = channel();
    let goes_on = || {
        let now = answered.load(Relaxed);
        until("requests are answered", || answered.load(Relaxed) > now + 10);
    };
    thread::scope(|scope| {
        scope.spawn(move || converse(connection, &over, answered));
        // Dropped by a failure as well, which would otherwise wait for that thread for ever.
        let _going = going;
        for _ in 0..3 {
            goes_on();
            drop(world.upgrade(&guest, Side::A, &[]));
            assert_same(&world, &before);
        }
        goes_on();
        // And a new one is accepted: the guest is found where it was.
        assert!(connect().is_some());
    });
}

#[runs(promised)]
#[test]
fn a_connection_to_a_guest_with_ram_in_files_goes_on() {
    a_connection_goes_on(RAMS[1], "");
}

#[test]
fn a_connection_to_a_guest_with_qemus_own_ram_goes_on() {
    a_connection_goes_on(RAMS[0], "");
}

/// Of the tap's queues the former QEMU may still have some open when the VM runs in the next one.
#[test]
fn a_connection_by_one_of_several_queues_goes_on() {
    a_connection_goes_on(RAMS[1], ",queues=2");
}

#[test]
fn a_connection_by_vhost_goes_on() {
    if fs::File::open("/dev/vhost-net").is_err() {
        note("/dev/vhost-net can't be used here: no VM got another QEMU with it");
        return;
    }
    a_connection_goes_on(RAMS[1], ",vhost=on");
}

#[test]
fn one_that_qemu_made_goes_on_and_vanishes_with_the_vm() {
    let made = Made::new(RAMS[1]);
    drop(made.world.upgrade(&made.guest, Side::A, &[]));
    let pid = made.pid();
    made.assert_has_it(pid);
}

#[test]
fn one_with_several_queues() {
    let mut world = World::new(Link::unshaped());
    let program = OwnProgram::new(&mut world);
    connected(&world);
    make_for_several_queues(&world);
    let spec = with_card("script=no,downscript=no,queues=3", ",mq=on,vectors=8");
    let guest = world.boot_by(&spec, &program.path, RAMS[0]);
    let before = known(&world);
    for _ in 0..2 {
        drop(world.upgrade(&guest, Side::A, &[]));
        assert_same(&world, &before);
    }
}

/// Nothing runs it before its next QEMU has it, which is when that one gets the tap.
#[test]
fn one_of_a_vm_that_is_paused() {
    let mut world = World::new(Link::unshaped());
    let program = OwnProgram::new(&mut world);
    connected(&world);
    let dir = tempfile::tempdir().unwrap();
    let mut spec = with_card(&format!("script={},downscript=no", script(dir.path())), "");
    spec.extra.push("-S".to_owned());
    world.run(&spec, &program.path, &[]);
    let (before, former) = (known(&world), world.vm(Side::A, "web1").unwrap());
    for _ in 0..2 {
        world.says(Side::A, &["upgrade", "web1"]);
        assert_same(&world, &before);
    }
    let vm = world.vm(Side::A, "web1").unwrap();
    assert_eq!((former.status, vm.status), (VmStatus::Paused, VmStatus::Paused));
    assert_ne!(vm.pid, former.pid);
    world.assert_nothing_else(Side::A);
    world.says(Side::A, &["stop", "web1", "--force"]);
    until("the tap has gone with its VM", || !ip(&world, "-o link").contains(TAP));
}

/// What an upgrade would lose or can't know is named, and nothing is touched.
#[test]
fn one_that_would_not_stay_as_it_is_is_refused() {
    let mut world = World::new(Link::unshaped());
    let program = OwnProgram::new(&mut world);
    connected(&world);
    let dir = tempfile::tempdir().unwrap();
    let script = script(dir.path());
    let spec = with_card(&format!("script={script},downscript={script}"), "");
    let guest = world.boot_by(&spec, &program.path, &[]);
    let before = known(&world);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let why = world.refuses(Side::A, &["upgrade", "web1"]);
    assert!(why.contains(&format!("would not run {script} for the tap {TAP}")), "{why}");
    world.assert_stayed(&guest, Side::A, pid);
    world.says(Side::A, &["stop", "web1", "--force"]);
    drop(guest);

    let spec = with_card(&format!("script={script},downscript=no"), "");
    let guest = world.boot_by(&spec, &program.path, &[]);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    ip(&world, &format!("link set {BRIDGE} type bridge stp_state 1"));
    let why = world.refuses(Side::A, &["upgrade", "web1"]);
    assert!(why.contains(&format!("the bridge of the tap {TAP} runs the spanning tree")), "{why}");
    world.assert_stayed(&guest, Side::A, pid);
    ip(&world, &format!("link set {BRIDGE} type bridge stp_state 0"));
    assert_ne!(known(&world).number, before.number, "it was made anew");
    drop(world.upgrade(&guest, Side::A, &[]));
}

/// Before anything of the tap was touched. What becomes of RAM that is handed over is tested
/// without taps.
#[test]
fn the_next_qemu_dies_before_it_has_the_vm() {
    let made = Made::new(RAMS[0]);
    let former = made.pid();
    let slow = Traced::slow_within(made.world.agent(Side::A).pid(), STEP * 3);
    let moving = made.world.begin_upgrade(&[&made.guest], Side::A, &["web1"]);
    let mut next = None;
    until("the journals are open", || {
        next = made.world.arriving_qemu(Side::A, former);
        next.is_some() && phase_within(&made.world, Side::A) != "- / -"
    });
    kill(next.unwrap());
    drop((moving.wait_any(), slow));
    until("it is settled", || phase_within(&made.world, Side::A) == "- / -");
    made.assert_has_it(former);
}

/// The agent has the tap open as well, which would vanish otherwise.
#[test]
fn the_former_qemu_dies_after_the_commit() {
    let made = Made::new(RAMS[0]);
    let former = made.pid();
    let slow = Traced::slow_within(made.world.agent(Side::A).pid(), STEP * 3);
    let moving = made.world.begin_upgrade(&[&made.guest], Side::A, &["web1"]);
    let mut next = None;
    until("it is committed", || {
        next = made.world.arriving_qemu(Side::A, former).or(next);
        phase_within(&made.world, Side::A).starts_with("committed")
    });
    kill(former);
    drop((moving.wait_any(), slow));
    until("it is settled", || phase_within(&made.world, Side::A) == "- / -");
    made.assert_has_it(next.unwrap());
}

/// When it had begun to give the tap to the next QEMU: from there on only that one can have the VM.
#[test]
fn the_agent_dies_while_the_tap_has_no_qemu() {
    // Further and further on.
    for (options, steps) in [(RAMS[0], 0), (RAMS[1], 2), (RAMS[0], 5)] {
        let mut made = Made::new(options);
        let former = made.pid();
        let slow = Traced::slow_commands(made.world.agent(Side::A).pid(), STEP);
        let moving = made.world.begin_upgrade(&[&made.guest], Side::A, &["web1"]);
        let noted = made.world.host(Side::A).inside("state/vms/web1/taps");
        let mut next = None;
        until("it is noted how the tap is given to the next QEMU", || {
            next = made.world.arriving_qemu(Side::A, former).or(next);
            noted.exists()
        });
        thread::sleep(STEP * steps);
        made.world.kill_agent(Side::A);
        drop((slow, moving.wait_any()));
        made.world.start_agent(Side::A);
        until("it is settled", || phase_within(&made.world, Side::A) == "- / -");
        made.assert_has_it(next.unwrap());
    }
}
