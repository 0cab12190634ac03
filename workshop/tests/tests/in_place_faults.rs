//! Something fails while a VM gets another QEMU on its host: the agent, the next QEMU, or the
//! former one. Then the VM runs exactly once, with all that its guest wrote.

use std::time::Duration;

use api::{VmStatus, VmSummary};
use end_to_end::addresses::{addresses, assert_addresses};
use end_to_end::faults::{Traced, phase_within};
use end_to_end::{Frozen, Moving, OwnProgram, Side, World, bare, kill, reached, until};
use lab::guest::Guest;
use lab::hosts::Link;
use qemu::process::Process;
use qemu::qmp::RunState;

/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "262296k";
const RATE: u64 = 2_000_000;
/// By which options of `run` a VM has RAM of QEMU's own, or in files of the agent's.
const RAMS: [&[&str]; 2] = [&[], &["--hand-over"]];
/// How long a note in a journal takes: there is time for a fault between any two.
const STEP: Duration = Duration::from_millis(600);
/// For a killed QEMU, on a busy machine too.
const ENDS_MAX: Duration = Duration::from_secs(60);
/// How often it is tried to stop the agent in a phase: on a busy machine that may come too late.
const HELD_TRIES: usize = 5;

/// Phases in the journals, in order; the last two are after the commit.
const PHASES: [&str; 5] = [OPENED, STOPPED, LOADED, COMMITTED, STARTING];
const OPENED: &str = "opened / opened";
const STOPPED: &str = "stopped / opened";
const LOADED: &str = "stopped / loaded";
const COMMITTED: &str = "committed / loaded";
const STARTING: &str = "committed / starting";

/// A VM whose program is a script, so that it may get another QEMU of the same program.
fn by_script(options: &[&str]) -> (World, OwnProgram, Guest) {
    let mut world = World::new(Link::unshaped());
    let program = OwnProgram::new(&mut world);
    let mut spec = bare(ODD, RATE);
    spec.extra.extend(["-device", "virtio-balloon-pci"].map(str::to_owned));
    spec.extra.extend(addresses());
    let guest = world.boot_by(&spec, &program.path, options);
    (world, program, guest)
}

/// A VM that is getting another QEMU, with its journals in a phase: on a busy machine perhaps in a
/// later one.
struct Halfway {
    world: World,
    guest: Guest,
    moving: Moving,
    slow: Traced,
    /// The QEMU that has the VM.
    former: u32,
    /// The one that gets it.
    next: u32,
}

impl Halfway {
    fn new(options: &[&str], phase: &str) -> Self {
        let (world, _, guest) = by_script(options);
        let former = world.vm(Side::A, "web1").unwrap().pid;
        let slow = Traced::slow_within(world.agent(Side::A).pid(), STEP);
        let moving = world.begin_upgrade(&[&guest], Side::A, &["web1"]);
        let nth = |phase: &str| PHASES.iter().position(|one| *one == phase);
        let mut next = None;
        until(&format!("the journals are at {phase}"), || {
            next = world.arriving_qemu(Side::A, former);
            next.is_some() && nth(&phase_within(&world, Side::A)) >= nth(phase)
        });
        let next = next.expect("it runs");
        Self { world, guest, moving, slow, former, next }
    }

    /// The same in exactly that phase. The agent stands still: what is done until that ends comes
    /// before anything else that it does.
    fn held(options: &[&str], phase: &str) -> (Self, Frozen) {
        for _ in 0..HELD_TRIES {
            let halfway = Self::new(options, phase);
            let agent = Frozen::new(halfway.world.agent(Side::A).pid());
            if phase_within(&halfway.world, Side::A) == phase {
                return (halfway, agent);
            }
            drop(agent);
            drop(halfway.settle());
        }
        panic!("the agent was never stopped at {phase}");
    }

    /// Has a client of one of its monitors order the former one to run the VM.
    fn order_former(&self) {
        let owners = self.world.own_qmp(Side::A, "web1");
        owners.cont().unwrap();
        assert_eq!(owners.run_state().unwrap(), RunState::Running);
    }

    /// Waits until the agent is through with it.
    fn settle(self) -> (World, Guest, String) {
        let Self { world, guest, moving, slow, .. } = self;
        let (_, output, said) = moving.wait_any();
        drop(slow);
        until("it is settled", || phase_within(&world, Side::A) == "- / -");
        (world, guest, output + &said)
    }
}

/// Kills a QEMU, and waits until it has ended.
fn end(pid: u32) {
    let process = Process::now(pid).unwrap();
    process.kill().unwrap();
    process.wait_exited(ENDS_MAX).unwrap();
}

/// Asserts that exactly one of two QEMUs has the VM, with all addresses, that it is that one, and
/// that the VM gets another QEMU when nothing fails.
fn assert_has_it(world: &World, guest: &Guest, pid: u32, said: &str) {
    let vm = || world.vm(Side::A, "web1").expect("its VM is listed");
    let runs = || vm().status == VmStatus::Running && vm().migration.is_none();
    assert!(reached(runs), "{:?}\n{said}\n{}", vm(), world.agent(Side::A).log_text());
    assert_eq!(vm().pid, pid, "{said}\n{}", world.agent(Side::A).log_text());
    world.assert_stayed(guest, Side::A, pid);
    world.assert_nothing_else(Side::A);
    assert_addresses(world, Side::A);
    drop(world.upgrade(guest, Side::A, &[]));
    assert_addresses(world, Side::A);
}

/// The agent dies in a phase of the journals, and comes back.
fn agent_killed(phase: &str) {
    for options in RAMS {
        let mut halfway = Halfway::new(options, phase);
        halfway.world.kill_agent(Side::A);
        let then = phase_within(&halfway.world, Side::A);
        let (former, next) = (halfway.former, halfway.next);
        let Halfway { mut world, guest, moving, slow, .. } = halfway;
        drop((slow, moving.wait_any()));
        world.start_agent(Side::A);
        until("it is settled", || phase_within(&world, Side::A) == "- / -");
        let stays = ["opened", "stopped"].iter().any(|before| then.starts_with(before));
        let pid = if stays { former } else { next };
        assert_has_it(&world, &guest, pid, &then);
    }
}

#[test]
fn the_agent_dies_before_the_vm_is_stopped() {
    agent_killed(OPENED);
}

#[test]
fn the_agent_dies_before_the_vm_is_loaded() {
    agent_killed(STOPPED);
}

#[test]
fn the_agent_dies_when_the_vm_is_loaded() {
    agent_killed(LOADED);
}

#[test]
fn the_agent_dies_after_the_commit() {
    agent_killed(COMMITTED);
}

#[test]
fn the_agent_dies_while_the_vm_starts() {
    agent_killed(STARTING);
}

/// Until it has the VM, the former QEMU continues: with its RAM as it was, whatever the next one
/// has mapped or loaded.
#[test]
fn the_next_qemu_dies_before_it_has_the_vm() {
    for options in RAMS {
        for phase in [OPENED, STOPPED, LOADED, COMMITTED] {
            let (halfway, agent) = Halfway::held(options, phase);
            end(halfway.next);
            drop(agent);
            let former = halfway.former;
            let (world, guest, said) = halfway.settle();
            assert_has_it(&world, &guest, former, &said);
        }
    }
}

/// The next one has all of it by then. The VM runs there if the former one had reported that it
/// released the VM, as it has to before RAM that is handed over is loaded. It is dead otherwise, but
/// runs nowhere else.
#[test]
fn the_former_qemu_dies_when_the_vm_is_loaded() {
    for options in RAMS {
        let (halfway, agent) = Halfway::held(options, LOADED);
        end(halfway.former);
        drop(agent);
        let next = halfway.next;
        let (world, guest, said) = halfway.settle();
        let is_dead = || world.vm(Side::A, "web1").is_some_and(|vm| vm.status == VmStatus::Dead);
        let runs = || world.vm(Side::A, "web1").is_some_and(|vm| vm.pid == next);
        until("it runs, or is dead", || is_dead() || runs());
        if is_dead() {
            assert!(options.is_empty(), "{said}\n{}", world.agent(Side::A).log_text());
            assert_is_gone(&world, guest, options);
        } else {
            assert_has_it(&world, &guest, next, &said);
        }
    }
}

/// It is not waited for beyond the blackout bound. The VM continues there as soon as it answers.
#[test]
fn the_former_qemu_hangs_when_the_vm_is_loaded() {
    for options in RAMS {
        let (halfway, agent) = Halfway::held(options, LOADED);
        let hangs = Frozen::new(halfway.former);
        drop(agent);
        let Halfway { world, guest, moving, slow, former, .. } = halfway;
        let (has_moved, _, said) = moving.wait_any();
        drop((hangs, slow));
        assert!(!has_moved, "{said}");
        until("it is settled", || phase_within(&world, Side::A) == "- / -");
        assert_has_it(&world, &guest, former, &said);
    }
}

/// A client of one of its monitors has the former one run the VM before the commit. The VM runs on
/// there, and nothing is written into its RAM.
#[test]
fn the_former_qemu_is_ordered_to_run_the_vm_when_that_is_loaded() {
    for options in RAMS {
        let (halfway, agent) = Halfway::held(options, LOADED);
        halfway.order_former();
        drop(agent);
        let Halfway { world, guest, moving, slow, former, .. } = halfway;
        let (has_moved, _, said) = moving.wait_any();
        drop(slow);
        until("it is settled", || phase_within(&world, Side::A) == "- / -");
        assert!(!has_moved, "{said}");
        let problem = world.vm(Side::A, "web1").unwrap().problem.unwrap_or_default();
        let is_reported = problem.contains("ordered the former QEMU to run the VM");
        assert_eq!(is_reported, !options.is_empty(), "{problem}");
        assert_has_it(&world, &guest, former, &said);
    }
}

/// The same after the commit. Both have the same RAM: the next one may run only if the former one
/// has not since.
#[test]
fn the_former_qemu_is_ordered_to_run_the_vm_after_the_commit() {
    let (halfway, agent) = Halfway::held(RAMS[1], COMMITTED);
    halfway.order_former();
    drop(agent);
    let Halfway { world, guest, moving, slow, former, .. } = halfway;
    let (has_moved, _, said) = moving.wait_any();
    drop(slow);
    until("it is settled", || phase_within(&world, Side::A) == "- / -");
    assert!(!has_moved, "{said}");
    assert_has_it(&world, &guest, former, &said);
}

#[test]
fn the_former_qemu_dies_after_the_commit() {
    for options in RAMS {
        let (halfway, agent) = Halfway::held(options, COMMITTED);
        end(halfway.former);
        drop(agent);
        let next = halfway.next;
        let (world, guest, said) = halfway.settle();
        assert_has_it(&world, &guest, next, &said);
    }
}

/// Gives a VM a program by which it can't arrive, and then one that is right.
fn refused(on_arrival: &str) {
    for options in RAMS {
        let (world, program, guest) = by_script(options);
        let pid = world.vm(Side::A, "web1").unwrap().pid;
        program.script(&world.kit.qemu, on_arrival);
        let moving = world.begin_upgrade(&[&guest], Side::A, &["web1"]);
        let (success, output, said) = moving.wait_any();
        assert!(!success, "{output}\n{said}");
        program.script(&world.kit.qemu, ":");
        assert_has_it(&world, &guest, pid, &said);
    }
}

/// If the next one may have had the VM, the agent lets the former one have it by itself no more: an
/// operator ends it. It continues if the next one had ended before the order to run it.
#[test]
fn the_next_qemu_dies_while_it_starts_the_vm() {
    for options in RAMS {
        let halfway = Halfway::new(options, STARTING);
        kill(halfway.next);
        let Halfway { world, guest, moving, slow, former, .. } = halfway;
        let (_, output, said) = moving.wait_any();
        drop(slow);
        let vm = || world.vm(Side::A, "web1").expect("its VM is listed");
        let in_doubt = |vm: &VmSummary| vm.status == VmStatus::InDoubt && vm.problem.is_some();
        // It is dead if the next one had it already.
        let is_back = |vm: &VmSummary| vm.status == VmStatus::Running && vm.pid == former;
        let is_known = || {
            let vm = vm();
            in_doubt(&vm) || vm.status == VmStatus::Dead || is_back(&vm)
        };
        assert!(reached(is_known), "{:?}\n{}", vm(), world.agent(Side::A).log_text());
        if is_back(&vm()) {
            let why = format!("{output}{said}");
            assert!(why.contains("had ended before it was to run the VM"), "{why}");
            until("it is settled", || phase_within(&world, Side::A) == "- / -");
            assert_has_it(&world, &guest, former, &said);
            continue;
        }
        if in_doubt(&vm()) {
            let problem = vm().problem.unwrap_or_default();
            assert!(problem.contains("ended when it had been ordered to run it"), "{problem}");
            drop(world.refuses(Side::A, &["upgrade", "web1"]));
            world.says(Side::A, &["resolve", "web1", "--there", "--yes"]);
        }
        assert_is_gone(&world, guest, options);
    }
}

/// Asserts that nothing is left of a VM but a note that it is dead, and starts it anew.
fn assert_is_gone(world: &World, guest: Guest, options: &[&str]) {
    if world.vm(Side::A, "web1").is_some() {
        world.wait_dead(Side::A, "web1");
        world.says(Side::A, &["stop", "web1"]);
    }
    world.remove_own_sockets(Side::A, "web1");
    world.assert_nothing_else(Side::A);
    assert_eq!(world.vms(Side::A).len(), 0);
    drop(guest);
    let again = world.boot_by(&bare(ODD, RATE), &world.kit.qemu, options);
    world.assert_intact(&again);
}

/// The next one has not even started: the VM is dead, as after any end of its QEMU, and another of
/// that name can be started.
#[test]
fn the_former_qemu_dies_before_the_vm_is_stopped() {
    for options in RAMS {
        let (world, program, guest) = by_script(options);
        let pid = world.vm(Side::A, "web1").unwrap().pid;
        program.script(&world.kit.qemu, "while :; do sleep 1; done");
        let moving = world.begin_upgrade(&[&guest], Side::A, &["web1"]);
        until("the next QEMU starts", || world.arriving_qemu(Side::A, pid).is_some());
        kill(pid);
        let (success, output, said) = moving.wait_any();
        assert!(!success, "{output}\n{said}");
        world.wait_dead(Side::A, "web1");
        assert_is_gone(&world, guest, options);
    }
}

#[test]
fn a_next_qemu_that_does_not_start() {
    refused("echo 'there is no such device' >&2; exit 1");
}

#[test]
fn a_next_qemu_that_dies_of_a_signal() {
    refused("kill -s KILL $$");
}

/// Its balloon has other registers, as with a version that breaks its machine type.
#[test]
fn a_next_qemu_that_refuses_the_device_state() {
    refused(
        "for word; do\n\
         shift\n\
         case $word in virtio-balloon-pci*) word=$word,disable-modern=on ;; esac\n\
         set -- \"$@\" \"$word\"\n\
         done",
    );
}

/// The journals of both sides can't be made any more: they are on one disk.
#[test]
fn the_disk_with_the_journals_is_full() {
    for options in RAMS {
        let (world, _, guest) = by_script(options);
        let pid = world.vm(Side::A, "web1").unwrap().pid;
        let full = Traced::full(world.agent(Side::A).pid());
        let moving = world.begin_upgrade(&[&guest], Side::A, &["web1"]);
        let (success, output, said) = moving.wait_any();
        assert!(!success, "{output}\n{said}");
        drop(full);
        until("it is settled", || phase_within(&world, Side::A) == "- / -");
        assert_has_it(&world, &guest, pid, &said);
    }
}
