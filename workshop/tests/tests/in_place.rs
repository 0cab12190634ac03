//! A VM gets another QEMU on the host where it runs, and notices nothing: its RAM stays where it
//! is, or is copied within the host.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::Duration;

use api::{UpgradeHow, VmSummary};
use end_to_end::disk::{assert_disk_intact, with_disk};
use end_to_end::faults::Traced;
use end_to_end::{Frozen, MIB, OwnProgram, Side, World, bare, guest, note, until};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Link, Outside, RUN_DIR};
use lab::setup::{self, Accelerator, Qemu};
use lab_guest::net::ADDRESS;
use marks::runs;

/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "262296k";
const RATE: u64 = 2_000_000;
const HAND_OVER: &[&str] = &["--hand-over"];
/// By which options a VM starts, and how it gets another QEMU then.
const BOTH: [(&[&str], UpgradeHow); 2] =
    [(HAND_OVER, UpgradeHow::HandedOver), (&[], UpgradeHow::Copied)];

/// From the oldest to the newest.
fn qemus() -> Vec<Qemu> {
    setup::qemus(&setup::ensure().unwrap()).unwrap()
}

/// Those from which a VM can be copied under TCG as well.
fn correct(world: &World) -> Vec<Qemu> {
    qemus().into_iter().filter(|qemu| !world.kit.loses_writes(qemu)).collect()
}

/// Gives a guest one QEMU after the other.
fn along(world: &World, spec: &GuestSpec, (options, how): (&[&str], UpgradeHow), there: &[&Qemu]) {
    let guest = world.boot_by(spec, &there[0].program, options);
    for pair in there.windows(2) {
        let before = guest.pulse().written.pages;
        let program = pair[1].program.display().to_string();
        let report = world.upgrade(&guest, Side::A, how, &["--qemu", &program]);
        let versions = [0, 1].map(|nth| pair[nth].version.to_string());
        assert_eq!(report.qemu, versions);
        assert_eq!((report.from.as_str(), report.to.as_str()), ("host-a", "host-a"));
        let vm = world.vm(Side::A, "web1").unwrap();
        assert_eq!((&vm.qemu, vm.program_replaced), (&versions[1], false));
        assert!(guest.pulse().written.pages > before, "it does not write");
    }
    assert_eq!(guest.pulse().boots, 1);
}

/// A guest for all of these QEMUs, with the machine type of the oldest.
fn of_the_oldest(mut spec: GuestSpec) -> GuestSpec {
    spec.machine = qemus()[0].machine();
    spec
}

#[runs(promised)]
#[test]
fn handed_over_to_the_newest_and_back() {
    let all = qemus();
    let (oldest, newest) = (&all[0], &all[all.len() - 1]);
    let world = World::new(Link::unshaped());
    along(&world, &of_the_oldest(bare(ODD, RATE)), BOTH[0], &[oldest, newest, oldest]);
}

#[runs(promised)]
#[test]
fn copied_to_the_newest_and_back() {
    let world = World::new(Link::unshaped());
    let all = correct(&world);
    let (first, newest) = (&all[0], &all[all.len() - 1]);
    along(&world, &of_the_oldest(bare(ODD, RATE)), BOTH[1], &[first, newest, first]);
}

/// Each to each other one, and to itself.
#[test]
fn handed_over_from_each_to_each() {
    let all = qemus();
    let mut there: Vec<&Qemu> = all.iter().chain(all.iter().rev()).collect();
    there.extend([&all[all.len() - 1], &all[0]]);
    let world = World::new(Link::unshaped());
    along(&world, &of_the_oldest(guest(ODD, RATE)), BOTH[0], &there);
}

/// The oldest one comes last, since a guest under TCG may lose writes when it leaves that.
#[test]
fn copied_from_each_to_each() {
    let world = World::new(Link::unshaped());
    let (all, every) = (correct(&world), qemus());
    let there: Vec<&Qemu> = all.iter().chain(all.iter().rev()).chain(every.first()).collect();
    along(&world, &of_the_oldest(guest(ODD, RATE)), BOTH[1], &there);
}

/// The owner's own file, which stays where it is.
#[test]
fn handed_over_in_a_file_of_the_owner() {
    let world = World::new(Link::unshaped());
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("ram");
    let mut spec = of_the_oldest(bare(ODD, RATE));
    spec.machine += ",memory-backend=ram";
    let backend =
        format!("memory-backend-file,id=ram,size={ODD},share=on,mem-path={}", path.display());
    spec.extra.extend(["-object".to_owned(), backend]);
    let all = qemus();
    let there: Vec<&Qemu> = all.iter().chain([&all[0]]).collect();
    along(&world, &spec, (&[], UpgradeHow::HandedOver), &there);
    let vm = world.vm(Side::A, "web1").unwrap();
    let maps = fs::read_to_string(format!("/proc/{}/maps", vm.pid)).unwrap();
    assert!(maps.lines().any(|line| line.ends_with(&path.display().to_string())), "{maps}");
}

/// Both QEMUs open the image, past the page cache, and one after the other they write to it.
#[test]
fn with_a_disk_that_the_guest_writes_to() {
    for (options, how) in BOTH {
        let world = World::new(Link::unshaped());
        let mut spec = with_disk(&world, "qcow2", 2_000_000);
        let drives = spec.extra.iter_mut().filter(|word| word.starts_with("file="));
        drives.for_each(|drive| drive.push_str(",cache=none"));
        let guest = world.boot_by(&spec, &world.kit.qemu, options);
        for _ in 0..3 {
            let before = guest.pulse().written.disk_pages;
            drop(world.upgrade(&guest, Side::A, how, &[]));
            assert_disk_intact(&guest);
            until("it writes to its disk", || guest.pulse().written.disk_pages > before);
        }
    }
}

/// To most of its memory.
#[test]
fn while_the_guest_writes_all_the_time() {
    for (options, how) in BOTH {
        let world = World::new(Link::unshaped());
        let mut spec = bare(ODD, 40_000_000);
        spec.orders.working_set_bytes = 160 * MIB;
        spec.orders.write_step_ms = 1;
        let guest = world.boot_by(&spec, &world.kit.qemu, options);
        for _ in 0..3 {
            drop(world.upgrade(&guest, Side::A, how, &[]));
        }
    }
}

/// What has got another QEMU moves, reboots, and gets another QEMU, as before.
#[test]
fn before_and_after_moves_and_a_reboot() {
    for (options, how) in BOTH {
        let world = World::new(Link::one(1000));
        let mut spec = bare(ODD, RATE);
        spec.no_reboot = false;
        let guest = world.boot_by(&spec, &world.kit.qemu, options);
        drop(world.upgrade(&guest, Side::A, how, &[]));
        drop(world.migrate(&guest, Side::A, &[]));
        drop(world.upgrade(&guest, Side::B, how, &[]));
        let pid = world.vm(Side::B, "web1").unwrap().pid;
        guest.tell("reboot").unwrap();
        guest.wait_boots(2).unwrap();
        world.assert_stayed(&guest, Side::B, pid);
        drop(world.migrate(&guest, Side::B, &[]));
        drop(world.upgrade(&guest, Side::A, how, &[]));
    }
}

#[test]
fn under_kvm() {
    let world = World::new(Link::unshaped());
    if !setup::kvm_runs_bare(&world.kit).unwrap() {
        note("KVM runs no guest on this machine: none got another QEMU under it");
        return;
    }
    for choice in BOTH {
        let mut spec = of_the_oldest(bare("32M", 500_000));
        spec.accelerator = Some(Accelerator::Kvm);
        spec.orders.repeated = true;
        (spec.orders.random_bytes, spec.orders.text_bytes) = (2 * MIB, 0);
        spec.orders.working_set_bytes = 2 * MIB;
        let all = qemus();
        let (oldest, newest) = (&all[0], &all[all.len() - 1]);
        along(&world, &spec, choice, &[oldest, newest, oldest]);
        world.says(Side::A, &["stop", "web1", "--force"]);
        world.remove_own_sockets(Side::A, "web1");
    }
}

/// Several at once, of each kind; those that can't are left as they are.
#[test]
fn all_of_a_host() {
    let world = World::new(Link::unshaped());
    let boot = |name: &str, options: &[&str], more: &[String]| {
        let mut spec = bare("96M", RATE);
        spec.name = name.to_owned();
        spec.extra.extend_from_slice(more);
        world.boot_by(&spec, &world.kit.qemu, options)
    };
    let names = ["web1", "web2", "web3", "web4"];
    let guests = names.map(|name| boot(name, if name < "web3" { HAND_OVER } else { &[] }, &[]));
    let refused = boot("web5", HAND_OVER, &libvirts());
    let pid = |name: &str| world.vm(Side::A, name).unwrap().pid;
    let before = guests.each_ref().map(|guest| pid(&guest.spec.name));
    let refuseds = pid("web5");
    let upgraded: Vec<&Guest> = guests.iter().collect();
    let moving = world.begin_upgrade(&upgraded, Side::A, &["--all", "--parallel", "2"]);
    // Whether a VM that is left out is a failure doesn't matter here.
    let (_, output, said) = moving.wait_any();
    for (guest, before) in guests.iter().zip(before) {
        let vm = world.vm(Side::A, &guest.spec.name).unwrap();
        assert_ne!(vm.pid, before, "{vm:?}\n{output}\n{said}");
        world.assert_runs(Side::A, &vm);
        world.assert_intact(guest);
    }
    assert_eq!(pid("web5"), refuseds, "{output}\n{said}");
    world.assert_intact(&refused);
    world.assert_nothing_else(Side::A);
}

/// By these arguments a VM is one of libvirt's.
fn libvirts() -> [String; 2] {
    let monitor = format!("socket,id=charmonitor,path={RUN_DIR}/web5.own,server=on,wait=off");
    ["-chardev".to_owned(), monitor]
}

/// Asserts that a command leaves a VM in its QEMU; returns the reason.
fn refused(spec: &GuestSpec, args: &[&str]) -> String {
    let world = World::new(Link::unshaped());
    let guest = world.boot_by(spec, &world.kit.qemu, HAND_OVER);
    let pid = world.vm(Side::A, &spec.name).unwrap().pid;
    let why = world.refuses(Side::A, &[&["upgrade", spec.name.as_str()][..], args].concat());
    world.assert_stayed(&guest, Side::A, pid);
    world.assert_nothing_else(Side::A);
    why
}

#[test]
fn one_that_cannot_is_refused_before_anything_is_touched() {
    let mut spec = bare("96M", RATE);
    let why = refused(&spec, &["--qemu", "/usr/bin/qemu-missing"]);
    assert!(why.contains("qemu-missing"), "{why}");
    let why = refused(&spec, &["--qemu", "/bin/false"]);
    assert!(why.contains("/bin/false"), "{why}");
    spec.name = "web5".to_owned();
    spec.extra.extend(libvirts());
    let why = refused(&spec, &[]);
    assert!(why.contains("libvirt started it"), "{why}");
}

/// Longer than it takes to find the next QEMU, on a busy machine too.
const STEP: Duration = Duration::from_secs(2);

/// The next QEMU stands still before the VM is in it, so that it can't be too late.
#[test]
fn cancelled() {
    for (options, how) in BOTH {
        let world = World::new(Link::unshaped());
        let guest = world.boot_by(&bare(ODD, RATE), &world.kit.qemu, options);
        let pid = world.vm(Side::A, "web1").unwrap().pid;
        let slow = Traced::slow(world.agent(Side::A).pid(), STEP);
        let moving = world.begin_upgrade(&[&guest], Side::A, &["web1"]);
        let mut next = None;
        until("the next QEMU starts", || {
            next = world.arriving_qemu(Side::A, pid);
            next.is_some()
        });
        let frozen = next.map(Frozen::new);
        moving.interrupt();
        let (success, output, said) = moving.wait_any();
        assert!(!success, "{output}\n{said}");
        drop((frozen, slow));
        world.assert_stayed(&guest, Side::A, pid);
        world.assert_nothing_else(Side::A);
        drop(world.upgrade(&guest, Side::A, how, &[]));
    }
}

/// As after an upgrade of QEMU's package: one command, and no VM runs the former program.
#[test]
fn after_the_program_was_replaced_on_disk() {
    let mut world = World::new(Link::unshaped());
    let qemu = world.kit.qemu_system.canonicalize().unwrap();
    let program = OwnProgram::new(&mut world);
    program.copy(&qemu);
    let mut guests = Vec::new();
    for name in ["web1", "web2"] {
        let mut spec = bare(ODD, RATE);
        spec.name = name.to_owned();
        guests.push(world.boot_by(&spec, &program.path, HAND_OVER));
    }
    let replaced = |vms: Vec<VmSummary>| vms.iter().filter(|vm| vm.program_replaced).count();
    assert_eq!(replaced(world.vms(Side::A)), 0);
    program.copy(&qemu);
    assert_eq!(replaced(world.vms(Side::A)), 2);
    let all: Vec<&Guest> = guests.iter().collect();
    let moving = world.begin_upgrade(&all, Side::A, &["--all"]);
    assert_eq!(world.wait_upgraded(Side::A, moving).len(), 2);
    assert_eq!(replaced(world.vms(Side::A)), 0);
    let list = world.tells(Side::A, &["list"]);
    assert!(!list.lines().any(|line| line.ends_with("replaced")), "{list}");
    guests.iter().for_each(|guest| world.assert_intact(guest));
    world.assert_nothing_else(Side::A);
}

/// memcached's port.
const PORT: u16 = 11211;
/// What a client waits at most for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

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

/// Packets for the VM that A's kernel has dropped at its tap.
fn dropped(world: &World) -> u64 {
    let mut read = world.host(Side::A).command("cat");
    let output = read.arg("/sys/class/net/vmtap/statistics/tx_dropped").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

/// Two QEMUs can't have the tap, so nothing is touched: a connection to the guest goes on, and no
/// packet is lost at the tap.
#[test]
fn one_with_a_tap_is_refused_while_a_connection_goes_on() {
    let world = World::new(Link::unshaped());
    let outside = Outside::join(&world.hosts).unwrap();
    let mut spec = guest("256M", RATE);
    spec.orders.serve_bytes = 8 * MIB;
    spec.initrd = Some(setup::server_initrd(&world.kit).unwrap());
    spec.extra.extend(Outside::arguments());
    let guest = world.boot_by(&spec, &world.kit.qemu, HAND_OVER);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let connect = || outside.host.within(|| TcpStream::connect((ADDRESS, PORT)).ok());
    let mut connection = None;
    until("the server listens", || {
        connection = connect();
        connection.is_some()
    });
    let connection = connection.unwrap();
    let before = dropped(&world);
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
            let why = world.refuses(Side::A, &["upgrade", "web1"]);
            assert!(why.contains("is connected to a network of the host"), "{why}");
        }
        goes_on();
    });
    assert_eq!(dropped(&world), before, "packets were lost at the tap");
    world.assert_stayed(&guest, Side::A, pid);
}
