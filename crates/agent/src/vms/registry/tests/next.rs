//! VMs that were getting another QEMU when an earlier run of the agent ended.

use std::path::PathBuf;

use engine::{NotAlone, RamBack};
use qemu::process::Until;
use qemu::qmp::RunState;
use qemu::ram_blocks::RamBlocks;

use super::*;
use crate::vms::ram_before;
use crate::vms::record::may_have_next;
use crate::vms::registry::alone::{Released, Silent};

/// A byte of RAM that is kept for a load that fails. SeaBIOS clears what is below 576 KiB as it
/// starts.
const KEPT_AT: u64 = 600 << 10;

/// A VM that is here, and its next QEMU with a record, in the second seat.
struct Left {
    dir: TestDir,
    vm: PathBuf,
    former: u32,
    next: machine::Record,
}

impl Left {
    fn new(standing: Standing, incoming: bool) -> Self {
        let dir = TestDir::new();
        let former = leave_behind(dir.path(), Some(Standing::Here), false);
        let vm = StateDir::open(dir.path()).unwrap().vm("web1");
        let home = vm.join("2");
        let argv = request("web1").argv;
        let start = Start {
            name: "web1",
            argv: &argv,
            cwd: Path::new("/"),
            dir: &home,
            incoming,
            machine: None,
            by: By::Operator,
            user: None,
            guest_port: GuestPort::None,
            knows_legacy_ack: false,
            up_max: UP_MAX,
            idle_max: UP_MAX,
        };
        let next = machine::start(&start).unwrap().record();
        let noted = (standing != Standing::Starting).then(|| next.clone());
        Record::new(standing, noted, 32 << 20, "", "tenant-7").write_next(&vm).unwrap();
        Self { dir, vm, former, next }
    }

    fn pid(&self) -> u32 {
        self.next.pid()
    }
}

#[test]
fn one_that_never_had_the_vm_is_ended() {
    for standing in [Standing::Starting, Standing::Arriving] {
        let left = Left::new(standing, true);
        let registry = open(left.dir.path());
        assert!(is_alive(left.former) && !is_alive(left.pid()), "{standing:?}");
        let shown = registry.show("web1").unwrap();
        assert_eq!((shown.pid, shown.left_over), (left.former, None));
        assert!(!may_have_next(&left.vm) && !left.vm.join("2").exists());
        registry.stop("web1", FORCE).unwrap();
    }
}

#[test]
fn one_that_may_have_it_is_left_alone_and_no_other_one_is_started() {
    let left = Left::new(Standing::Arriving, false);
    let registry = open(left.dir.path());
    assert!(is_alive(left.former) && is_alive(left.pid()));
    assert!(may_have_next(&left.vm));
    let vm = registry.vm("web1").unwrap();
    let refused = registry.seat(&vm, &vm.machine().unwrap()).err().unwrap().to_string();
    assert!(refused.contains("an earlier upgrade of web1 may have left"), "{refused}");
    let shown = registry.show("web1").unwrap().left_over.unwrap();
    assert!(shown.contains(&format!("left a QEMU (process {})", left.pid())), "{shown}");
    assert!(shown.contains("2/qmp` adopts it"), "{shown}");
    assert_eq!(registry.left_over(), [shown]);
    assert!(left.vm.join("2/qmp").exists() && is_alive(left.pid()));
    machine::reopen(&left.next, &left.vm).unwrap().quit().unwrap();
    registry.stop("web1", FORCE).unwrap();
}

/// The agent ended between the two files, with the journal of the next one or without.
#[test]
fn one_that_has_it_by_the_vms_record_needs_no_record_of_its_own() {
    for is_held in [false, true] {
        let left = Left::new(Standing::Arriving, true);
        let machine = Some(left.next.clone());
        Record::new(Standing::Here, machine, 32 << 20, "", "tenant-7").write(&left.vm).unwrap();
        let held = is_held.then(|| ("web1".to_owned(), Some(left.next.clone())));
        let state = StateDir::open(left.dir.path()).unwrap();
        let registry = Registry::open(state, &Held(held.into_iter().collect())).unwrap();
        let registry = Arc::new(registry);
        assert_eq!(registry.is_unsettled("web1"), is_held);
        assert_eq!(registry.show("web1").unwrap().pid, left.pid());
        assert!(!may_have_next(&left.vm) && is_alive(left.pid()));
        assert_eq!(registry.settled_here("web1"), is_held);
        // Once is enough: after that, another operation may have the VM.
        assert!(!registry.settled_here("web1"));
        registry.free_upgraded("web1");
        registry.stop("web1", FORCE).unwrap();
        Process::now(left.former).unwrap().kill().unwrap();
    }
}

#[test]
fn a_journal_decides_about_it() {
    for has_it in [true, false] {
        let left = Left::new(Standing::Arriving, true);
        let held = Held(vec![("web1".to_owned(), Some(left.next.clone()))]);
        let former = Record::read(&left.vm).unwrap().machine.unwrap();
        let state = StateDir::open(left.dir.path()).unwrap();
        let registry = Arc::new(Registry::open(state, &held).unwrap());
        assert!(registry.is_unsettled("web1") && is_alive(left.pid()));

        let machine = Arc::new(machine::reopen(&left.next, &left.vm).unwrap());
        machine.is_one_of_two(true);
        let mut seat = registry.seat_found("web1", Some(machine), &left.next).unwrap();
        assert_eq!(registry.who_has(left.pid()).as_deref(), Some("web1"));
        if has_it {
            seat.adopt().unwrap();
        }
        drop(seat);
        assert_eq!(is_alive(left.pid()), has_it);
        assert!(!may_have_next(&left.vm));
        let pid = if has_it { left.pid() } else { left.former };
        assert_eq!(registry.show("web1").unwrap().pid, pid);
        if has_it {
            assert!(registry.seat_found("web1", None, &left.next).is_none());
            assert!(registry.may_live_besides("web1", &former));
            assert!(Record::read(&left.vm).unwrap().machine.unwrap().is_of(&left.next));
            Process::now(left.former).unwrap().kill().unwrap();
            registry.empty_seat("web1", &former);
            assert!(!left.vm.join("qmp").exists() && left.vm.join("2/qmp").exists());
        } else {
            assert!(!registry.may_live_besides("web1", &former));
        }
        assert!(registry.settled_here("web1"));
        registry.free_upgraded("web1");
        registry.stop("web1", FORCE).unwrap();
    }
}

/// Its next QEMU has a record of its own, which says in what domain the VM shares.
#[test]
fn a_journal_decides_about_it_where_the_vms_record_is_damaged() {
    for has_it in [true, false] {
        let left = Left::new(Standing::Arriving, true);
        std::fs::write(left.vm.join("record.json"), "{").unwrap();
        let registry = with_journal(&left);
        let machine = Arc::new(machine::reopen(&left.next, &left.vm).unwrap());
        machine.is_one_of_two(true);
        let mut seat = registry.seat_found("web1", Some(machine), &left.next).unwrap();
        if has_it {
            seat.adopt().unwrap();
        }
        drop(seat);
        assert_eq!(is_alive(left.pid()), has_it);
        assert!(is_alive(left.former) && !may_have_next(&left.vm));
        // What the former one had is not known any more, so it is the operator's.
        assert_eq!(registry.vm("web1").unwrap().unreadable_why().is_none(), has_it);
        if has_it {
            assert!(registry.seat_found("web1", None, &left.next).is_none());
            let record = Record::read(&left.vm).unwrap();
            assert!(record.machine.unwrap().is_of(&left.next));
            assert_eq!(record.share_domain, "tenant-7");
            registry.free_upgraded("web1");
            registry.stop("web1", FORCE).unwrap();
        }
        Process::now(left.former).unwrap().kill().unwrap();
    }
}

/// A journal that is left when the VM is settled, and long after it, concerns no later upgrade.
#[test]
fn a_journal_of_a_vm_that_is_free_takes_no_seat() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    registry.run(&request("web1"), &probes()).unwrap();
    registry.run(&request("web2"), &probes()).unwrap();
    let vm = registry.vm("web1").unwrap();
    let ended = registry.vm("web2").unwrap().machine().unwrap();
    registry.stop("web2", FORCE).unwrap();
    let seat = registry.seat(&vm, &vm.machine().unwrap()).unwrap();
    seat.note_starting().unwrap();
    assert!(registry.seat_found("web1", None, &ended.record()).is_none());
    assert!(may_have_next(&vm.dir) && seat.home.is_dir());
    drop(seat);
    registry.stop("web1", FORCE).unwrap();
}

/// The former one goes on if the next one did not take the VM after all.
#[test]
fn a_seat_that_is_dropped_leaves_nothing() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    registry.run(&request("web1"), &probes()).unwrap();
    let vm = registry.vm("web1").unwrap();
    let former = vm.machine().unwrap();
    let seat = registry.seat(&vm, &former).unwrap();
    assert!(registry.seat(&vm, &former).is_err(), "one at a time");
    seat.promise(7, |promised| {
        assert_eq!(promised, 0);
        Ok(())
    })
    .unwrap();
    assert_eq!(registry.promised(), 7);
    seat.note_starting().unwrap();
    assert!(may_have_next(&vm.dir) && seat.home.is_dir());
    drop(seat);
    assert_eq!(registry.promised(), 0);
    assert!(!may_have_next(&vm.dir) && !vm.dir.join("2").exists());
    registry.keeps("web1", &former);
    assert!(Arc::ptr_eq(&registry.vm("web1").unwrap(), &vm), "it had never lost it");
    registry.stop("web1", FORCE).unwrap();
}

/// Opens a registry with a journal of the next QEMU, which decides about it.
fn with_journal(left: &Left) -> Arc<Registry> {
    let held = Held(vec![("web1".to_owned(), Some(left.next.clone()))]);
    let state = StateDir::open(left.dir.path()).unwrap();
    Arc::new(Registry::open(state, &held).unwrap())
}

/// A QEMU sends its VM, and releases it.
fn send(machine: &Machine) {
    machine.qmp.execute("migrate", json!({ "uri": "exec:cat > /dev/null" })).unwrap();
    while machine.qmp.run_state().unwrap() != RunState::PostMigrate {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Where both have the same RAM, the former one goes on only by itself, with what it had; and what
/// it has written since is not put back again.
#[test]
fn ram_is_put_back_once_and_when_the_next_one_has_ended() {
    let left = Left::new(Standing::Arriving, true);
    let registry = with_journal(&left);
    let former = registry.vm("web1").unwrap().machine().unwrap();
    send(&former);
    let blocks = RamBlocks::of(&former);
    let ram = Arc::clone(&blocks.reached[0].mapping);
    ram.write(KEPT_AT, &[1]).unwrap();
    ram_before::keep(&left.vm, &blocks).unwrap();
    for expected in [1, 2] {
        ram.write(KEPT_AT, &[2]).unwrap();
        assert_eq!(registry.take_ram_back("web1", &former), Ok(RamBack::PutBack));
        assert!(is_alive(left.former) && !is_alive(left.pid()));
        let mut byte = [0];
        ram.read(KEPT_AT, &mut byte).unwrap();
        assert_eq!(byte, [expected]);
    }
    ram_before::changed(&left.vm, "a page was changed");
    assert_eq!(registry.take_ram_back("web1", &former).unwrap_err(), "a page was changed");
    ram_before::forget(&left.vm).unwrap();
    registry.take_ram_back("web1", &former).unwrap();
    // What could not be written in full is not put back.
    fs::create_dir(left.vm.join("ram-before.new")).unwrap();
    ram_before::keep(&left.vm, &blocks).unwrap_err();
    registry.take_ram_back("web1", &former).unwrap();
    former.quit().unwrap();
}

/// A client of one of its monitors has ordered it to run, and perhaps to stop again.
#[test]
fn nothing_is_put_back_into_a_vm_that_has_run_since() {
    for is_stopped in [false, true] {
        let left = Left::new(Standing::Arriving, true);
        let registry = with_journal(&left);
        let former = registry.vm("web1").unwrap().machine().unwrap();
        send(&former);
        let blocks = RamBlocks::of(&former);
        let ram = Arc::clone(&blocks.reached[0].mapping);
        ram.write(KEPT_AT, &[1]).unwrap();
        ram_before::keep(&left.vm, &blocks).unwrap();
        ram.write(KEPT_AT, &[2]).unwrap();
        former.qmp.cont().unwrap();
        if is_stopped {
            former.qmp.stop().unwrap();
        }
        let back = registry.take_ram_back("web1", &former).unwrap();
        let RamBack::Ran(why) = back else { panic!("{back:?}") };
        assert!(why.contains("it goes on with its RAM as it is"), "{why}");
        assert!(why.contains("where a load may write, differs in "), "{why}");
        assert_eq!(registry.show("web1").unwrap().problem, Some(why));
        assert!(!is_alive(left.pid()));
        let mut byte = [0];
        ram.read(KEPT_AT, &mut byte).unwrap();
        assert_eq!(byte, [2]);
        // Nor later.
        assert_eq!(registry.take_ram_back("web1", &former), Ok(RamBack::PutBack));
        ram.read(KEPT_AT, &mut byte).unwrap();
        assert_eq!(byte, [2]);
        former.quit().unwrap();
    }
}

#[test]
fn the_former_one_is_ended_before_the_next_one_runs_with_its_ram() {
    for has_same_ram in [false, true] {
        let left = Left::new(Standing::Arriving, true);
        let registry = with_journal(&left);
        send(&registry.vm("web1").unwrap().machine().unwrap());
        let machine = Arc::new(machine::reopen(&left.next, &left.vm).unwrap());
        let mut seat = registry.seat_found("web1", Some(machine), &left.next).unwrap();
        if has_same_ram {
            seat.maps_ram();
        }
        seat.be_alone().unwrap();
        // One that can't run any more exits.
        if has_same_ram && let Ok(former) = Process::now(left.former) {
            former.wait_exited(UP_MAX).unwrap();
        }
        assert_eq!(is_alive(left.former), !has_same_ram);
        assert!(is_alive(left.pid()));
        // This ends the next one.
        drop(seat);
        let former = Process::now(left.former);
        former.iter().for_each(|former| former.kill().unwrap());
    }
}

/// The VM runs there, in RAM that the next one has as well.
#[test]
fn a_former_one_that_was_ordered_to_run_again_is_not_ended() {
    let left = Left::new(Standing::Arriving, true);
    let registry = with_journal(&left);
    let former = registry.vm("web1").unwrap().machine().unwrap();
    send(&former);
    former.qmp.cont().unwrap();
    let machine = Arc::new(machine::reopen(&left.next, &left.vm).unwrap());
    let mut seat = registry.seat_found("web1", Some(machine), &left.next).unwrap();
    seat.maps_ram();
    let refused = seat.be_alone();
    let Err(NotAlone::Runs(why)) = refused else { panic!("{refused:?}") };
    assert!(why.contains("which is running there"), "{why}");
    assert!(is_alive(left.former) && is_alive(left.pid()));
    drop(seat);
    former.quit().unwrap();
}

/// An order that comes between the query and the kill, when its answer was read and its event was
/// perhaps not.
#[test]
fn a_former_one_that_ran_just_before_it_was_ended_is_noticed() {
    for has_run in [false, true] {
        let left = Left::new(Standing::Arriving, true);
        let registry = with_journal(&left);
        let former = registry.vm("web1").unwrap().machine().unwrap();
        send(&former);
        let released = Released::of(&former, Silent::MayRun).unwrap();
        if has_run {
            former.qmp.cont().unwrap();
        }
        former.record().end(Until::Halted).unwrap();
        let checked = released.check_ended();
        assert_eq!(matches!(checked, Err(NotAlone::Ran(_))), has_run, "{checked:?}");
        assert!(has_run || checked.is_ok(), "{checked:?}");
        machine::reopen(&left.next, &left.vm).unwrap().quit().unwrap();
    }
}

/// Long after it has released the VM, as when the agent was restarted.
#[test]
fn a_former_one_that_does_not_answer_is_not_ended() {
    for was_reached in [false, true] {
        let left = Left::new(Standing::Arriving, true);
        let registry = with_journal(&left);
        let vm = registry.vm("web1").unwrap();
        let former = vm.machine().unwrap();
        send(&former);
        if was_reached {
            former.qmp.close();
        } else {
            vm.let_go();
        }
        let next = machine::reopen(&left.next, &left.vm).unwrap();
        let refused = registry.be_alone("web1", &next);
        let Err(NotAlone::MayLive(why)) = refused else { panic!("{refused:?}") };
        let expected = format!("process {}, runs the VM is not known", left.former);
        assert!(why.contains(&expected), "{why}");
        assert!(is_alive(left.former) && is_alive(left.pid()));
        next.quit().unwrap();
        former.process.kill().unwrap();
    }
}
