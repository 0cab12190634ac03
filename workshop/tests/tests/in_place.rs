//! A VM gets another QEMU on the host where it runs, and notices nothing.

use std::time::Duration;

use api::{Report, UpgradeHow, VmSummary};
use end_to_end::disk::{assert_disk_intact, with_disk};
use end_to_end::faults::Traced;
use end_to_end::{Frozen, MIB, OwnProgram, Side, World, bare, guest, note, until};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Link, RUN_DIR};
use lab::setup::{self, Accelerator, Qemu};
use marks::runs;

/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "262296k";
const RATE: u64 = 2_000_000;
const HAND_OVER: &[&str] = &["--hand-over"];
/// By which options of `run` a VM has RAM of QEMU's own, or in files of the agent's.
const RAMS: [&[&str]; 2] = [&[], HAND_OVER];

/// From the oldest to the newest.
fn qemus() -> Vec<Qemu> {
    setup::qemus(&setup::ensure().unwrap()).unwrap()
}

/// A world, and a program for its VMs: a VM gets another QEMU of the same program only if that may
/// have changed, as that of a script may.
fn world(link: Link) -> (World, OwnProgram) {
    let mut world = World::new(link);
    let program = OwnProgram::new(&mut world);
    (world, program)
}

/// Gives a guest one QEMU after the other.
fn along(world: &World, spec: &GuestSpec, options: &[&str], there: &[&Qemu]) {
    let guest = world.boot_by(spec, &there[0].program, options);
    let how = if options == HAND_OVER { UpgradeHow::HandedOver } else { UpgradeHow::Copied };
    for pair in there.windows(2) {
        let before = guest.pulse().written.pages;
        let program = pair[1].program.display().to_string();
        let [plan] =
            world.upgrade_plans(Side::A, &["web1", "--qemu", &program]).try_into().unwrap();
        assert_eq!(plan.how, how, "{plan:?}");
        let report = world.upgrade(&guest, Side::A, &["--qemu", &program]);
        let versions = [0, 1].map(|nth| pair[nth].version.to_string());
        assert_eq!(report.qemu, versions);
        assert_eq!((report.from.as_str(), report.to.as_str()), ("host-a", "host-a"));
        let vm = world.vm(Side::A, "web1").unwrap();
        assert_eq!((&vm.qemu, vm.program_replaced), (&versions[1], false));
        until("it writes", || guest.pulse().written.pages > before);
    }
    assert_eq!(guest.pulse().boots, 1);
}

/// A guest for all of these QEMUs, with the machine type of the oldest.
fn of_the_oldest(mut spec: GuestSpec) -> GuestSpec {
    spec.machine = qemus()[0].machine();
    spec
}

/// A guest goes to the newest QEMU, and back to the oldest.
fn to_the_newest_and_back(spec: GuestSpec, options: &[&str]) {
    let all = qemus();
    let (oldest, newest) = (&all[0], &all[all.len() - 1]);
    if oldest.version == newest.version {
        note(&format!("only QEMU {} is here: no VM got another one in place", oldest.version));
        return;
    }
    let world = World::new(Link::unshaped());
    along(&world, &of_the_oldest(spec), options, &[oldest, newest, oldest]);
}

#[runs(promised)]
#[test]
fn to_the_newest_and_back_with_qemus_own_ram() {
    to_the_newest_and_back(bare(ODD, RATE), RAMS[0]);
}

#[runs(promised)]
#[test]
fn to_the_newest_and_back_with_ram_in_files() {
    to_the_newest_and_back(bare(ODD, RATE), RAMS[1]);
}

/// An operating system, up and down again, and past those between.
#[test]
fn from_each_to_each() {
    let all = qemus();
    let up_and_down = all.iter().chain(all.iter().rev().skip(1));
    let past = [all.last(), all.first()].into_iter().flatten();
    let mut there: Vec<&Qemu> = up_and_down.chain(past).collect();
    there.dedup_by_key(|qemu| qemu.program.clone());
    for options in RAMS {
        let world = World::new(Link::unshaped());
        along(&world, &of_the_oldest(guest(ODD, RATE)), options, &there);
    }
}

/// Both QEMUs open the image, past the page cache, and one after the other they write to it.
#[test]
fn with_a_disk_that_the_guest_writes_to() {
    for options in RAMS {
        let (world, program) = world(Link::unshaped());
        let mut spec = with_disk(&world, "qcow2", 2_000_000);
        let drives = spec.extra.iter_mut().filter(|word| word.starts_with("file="));
        drives.for_each(|drive| drive.push_str(",cache=none"));
        let guest = world.boot_by(&spec, &program.path, options);
        for _ in 0..3 {
            let before = guest.pulse().written.disk_pages;
            drop(world.upgrade(&guest, Side::A, &[]));
            assert_disk_intact(&guest);
            until("it writes to its disk", || guest.pulse().written.disk_pages > before);
        }
    }
}

/// To most of its memory.
#[test]
fn while_the_guest_writes_all_the_time() {
    for options in RAMS {
        let (world, program) = world(Link::unshaped());
        let mut spec = bare(ODD, 40_000_000);
        spec.orders.working_set_bytes = 160 * MIB;
        spec.orders.write_step_ms = 1;
        let guest = world.boot_by(&spec, &program.path, options);
        for _ in 0..3 {
            drop(world.upgrade(&guest, Side::A, &[]));
        }
    }
}

/// What has got another QEMU moves, reboots, and gets another QEMU, as before.
#[test]
fn before_and_after_moves_and_a_reboot() {
    for options in RAMS {
        let (world, program) = world(Link::one(1000));
        let mut spec = bare(ODD, RATE);
        spec.no_reboot = false;
        let guest = world.boot_by(&spec, &program.path, options);
        drop(world.upgrade(&guest, Side::A, &[]));
        drop(world.migrate(&guest, Side::A, &[]));
        drop(world.upgrade(&guest, Side::B, &[]));
        let pid = world.vm(Side::B, "web1").unwrap().pid;
        guest.tell("reboot").unwrap();
        guest.wait_boots(2).unwrap();
        world.assert_stayed(&guest, Side::B, pid);
        drop(world.migrate(&guest, Side::B, &[]));
        drop(world.upgrade(&guest, Side::A, &[]));
    }
}

#[test]
fn under_kvm() {
    if !setup::kvm_runs_bare(&setup::ensure().unwrap()).unwrap() {
        note("KVM runs no guest on this machine: none got another QEMU under it");
        return;
    }
    for options in RAMS {
        let mut spec = bare("32M", 500_000);
        spec.accelerator = Some(Accelerator::Kvm);
        spec.orders.repeated = true;
        (spec.orders.random_bytes, spec.orders.text_bytes) = (2 * MIB, 0);
        spec.orders.working_set_bytes = 2 * MIB;
        to_the_newest_and_back(spec, options);
    }
}

/// Two at a time, of each kind; one that can't is left as it is, and holds up no other.
#[test]
fn all_of_a_host() {
    let (world, program) = world(Link::unshaped());
    let boot = |name: &str, options: &[&str], more: &[String]| {
        let mut spec = bare("96M", RATE);
        spec.name = name.to_owned();
        spec.extra.extend_from_slice(more);
        world.boot_by(&spec, &program.path, options)
    };
    let names = ["web1", "web2", "web3", "web4"];
    let guests = names.map(|name| boot(name, if name < "web3" { HAND_OVER } else { &[] }, &[]));
    let refused = boot("web5", HAND_OVER, &libvirts());
    let pid = |name: &str| world.vm(Side::A, name).unwrap().pid;
    let before = guests.each_ref().map(|guest| pid(&guest.spec.name));
    let refuseds = pid("web5");
    let upgraded: Vec<&Guest> = guests.iter().collect();
    let moving = world.begin_upgrade(&upgraded, Side::A, &["--all", "--parallel", "2"]);
    let (success, output, said) = moving.wait_any();
    assert!(!success && said.contains("1 of 5 VMs have not got it: web5"), "{said}");
    let reports: Vec<Report> = serde_json::from_str(&output).unwrap();
    assert_eq!(reports.len(), guests.len(), "{said}");
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
    let (world, program) = world(Link::unshaped());
    let guest = world.boot_by(spec, &program.path, HAND_OVER);
    let pid = world.vm(Side::A, &spec.name).unwrap().pid;
    let why = world.refuses(Side::A, &[&["upgrade", spec.name.as_str()][..], args].concat());
    world.assert_stayed(&guest, Side::A, pid);
    world.assert_nothing_else(Side::A);
    why
}

/// Once handed over, the file has the RAM of the next QEMU too.
#[test]
fn with_ram_in_a_file_of_its_owner() {
    let (world, program) = world(Link::unshaped());
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = dir.path().join("ram").display().to_string();
    let backend = format!("memory-backend-file,id=ram,size=96M,share=on,mem-path={file}");
    let mut spec = bare("96M", RATE);
    spec.machine += ",memory-backend=ram";
    spec.extra.extend(["-object".to_owned(), backend]);
    let guest = world.boot_by(&spec, &program.path, &[]);
    for _ in 0..2 {
        let [plan] = world.upgrade_plans(Side::A, &["web1"]).try_into().unwrap();
        assert_eq!(plan.how, UpgradeHow::HandedOver);
        drop(world.upgrade(&guest, Side::A, &[]));
    }
}

#[test]
fn one_that_cannot_is_refused_before_anything_is_touched() {
    let spec = bare("96M", RATE);
    let why = refused(&spec, &["--qemu", "/usr/bin/qemu-missing"]);
    assert!(why.contains("qemu-missing"), "{why}");
    let why = refused(&spec, &["--qemu", "/bin/false"]);
    assert!(why.contains("/bin/false"), "{why}");
    let mut spec = bare("96M", RATE);
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
    for options in RAMS {
        let (world, program) = world(Link::unshaped());
        let guest = world.boot_by(&bare(ODD, RATE), &program.path, options);
        let pid = world.vm(Side::A, "web1").unwrap().pid;
        let slow = Traced::slow_within(world.agent(Side::A).pid(), STEP);
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
        drop(world.upgrade(&guest, Side::A, &[]));
    }
}

/// As after an upgrade of QEMU's package: one command, and no VM runs the former program.
#[test]
fn after_the_program_was_replaced_on_disk() {
    let (world, program) = world(Link::unshaped());
    let qemu = world.kit.qemu_system.canonicalize().unwrap();
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
