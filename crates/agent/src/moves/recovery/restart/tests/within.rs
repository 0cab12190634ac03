//! Both journals of a migration within this host.

use std::path::{Path, PathBuf};
use std::time::Instant;

use qemu::machine::{By, GuestPort, Start, UP_MAX};
use qemu::process::Process;
use qemu::ram_blocks::RamBlocks;

use super::*;
use crate::vms::ram_before;
use crate::vms::record::{self, Record, Standing};

/// A VM whose next QEMU waits for it, as a killed agent leaves both.
struct Left {
    registry: Arc<Registry>,
    journals: JournalDir,
    vm: PathBuf,
    former: machine::Record,
    next: machine::Record,
    /// Its id is in both journals.
    migration: MigrationId,
    /// Whether both have the same RAM, as the journals say.
    handed_over: bool,
}

impl Left {
    fn new(dir: &TestDir) -> Self {
        let registry = host(dir);
        let former = registry.vm("web1").unwrap().machine().unwrap();
        let vm = registry.state().vm("web1");
        let next = start(&former.argv, &vm.join("2"));
        let record = Record::new(Standing::Arriving, Some(next.record()), 32 << 20, "", "");
        record.write_next(&vm).unwrap();
        registry.unsettled("web1");
        let journals = JournalDir::open(&registry.state().journals()).unwrap();
        let migration = MigrationId::random().unwrap();
        let (former, next, handed_over) = (former.record(), next.record(), false);
        Self { registry, journals, vm, former, next, migration, handed_over }
    }

    fn opened(&self, qemu: &machine::Record) -> Opened {
        Opened {
            migration: self.migration.clone(),
            peer: "host-a".to_owned(),
            peer_address: Opened::SAME_HOST.to_owned(),
            handed_over: self.handed_over,
            ..opened(&serde_json::to_value(qemu).unwrap())
        }
    }

    fn note(&self, left: &[source::Record], came: &[destination::Record]) {
        let opened = self.opened(&self.former);
        let mut source: Journal<source::Record> = self.journals.create(opened).unwrap();
        left.iter().for_each(|record| source.append(record).unwrap());
        let opened = self.opened(&self.next);
        let mut destination: Journal<destination::Record> = self.journals.create(opened).unwrap();
        came.iter().for_each(|record| destination.append(record).unwrap());
    }

    /// As an agent does that starts, until all is settled; with the operator's decision, if given.
    fn settle(&self, decided: Option<ResolveSide>) -> bool {
        let settlers = settlers(&self.registry, &self.journals);
        settlers.take_up(self.journals.contents().unwrap());
        if let Some(side) = decided {
            settlers.decide("web1", ResolveRequest { side, certain: true }).unwrap();
        }
        let until = Instant::now() + Duration::from_secs(30);
        while self.registry.is_unsettled("web1") && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        settlers.close();
        !self.registry.is_unsettled("web1")
    }

    fn has(&self) -> u32 {
        self.registry.show("web1").unwrap().pid
    }

    fn is_alive(record: &machine::Record) -> bool {
        Process::now(record.pid()).is_ok_and(|process| process.is_alive())
    }

    /// The former QEMU has sent the VM.
    fn sent(&self) {
        let former = self.registry.vm("web1").unwrap().machine().unwrap();
        let uri = json!({ "uri": "exec:cat > /dev/null" });
        former.qmp.execute("migrate", uri).unwrap();
        while former.qmp.run_state().unwrap() != RunState::PostMigrate {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn stop_former(left: &Left) {
    left.registry.vm("web1").unwrap().machine().unwrap().quit().unwrap();
}

fn start(argv: &[String], home: &Path) -> Machine {
    let start = Start {
        name: "web1",
        argv,
        cwd: Path::new("/"),
        dir: home,
        incoming: true,
        machine: None,
        by: By::Operator,
        user: None,
        guest_port: GuestPort::None,
        knows_legacy_ack: false,
        up_max: UP_MAX,
        idle_max: UP_MAX,
    };
    machine::start(&start).unwrap()
}

#[test]
fn before_the_commit_the_former_qemu_keeps_the_vm() {
    let dir = TestDir::new();
    let left = Left::new(&dir);
    left.note(&[source::Record::Stopped { run: false }], &[]);
    assert!(left.settle(None));
    assert_eq!(left.has(), left.former.pid());
    assert!(!Left::is_alive(&left.next));
    assert!(!record::may_have_next(&left.vm) && !left.vm.join("2").exists());
    assert!(left.journals.contents().unwrap().is_empty());
    stop(&left.registry);
}

/// What the next one may have written while it loaded the VM is put back, unless something else has
/// ordered the former one to run it.
#[test]
fn before_the_commit_the_former_qemu_keeps_ram_that_both_have() {
    // SeaBIOS clears what is below 576 KiB as it starts.
    const AT: u64 = 600 << 10;
    for (handed_over, has_run, expected) in [(false, false, 2), (true, false, 1), (true, true, 2)] {
        let dir = TestDir::new();
        let left = Left { handed_over, ..Left::new(&dir) };
        left.sent();
        let former = left.registry.vm("web1").unwrap().machine().unwrap();
        let ram = RamBlocks::of(&former).reached.remove(0).mapping;
        ram.write(AT, &[1]).unwrap();
        ram_before::keep(&left.vm, &RamBlocks::of(&former)).unwrap();
        ram.write(AT, &[2]).unwrap();
        if has_run {
            former.qmp.cont().unwrap();
        }
        left.note(&[source::Record::Stopped { run: false }], &[destination::Record::Loaded]);
        assert!(left.settle(None));
        assert_eq!(left.has(), left.former.pid());
        assert!(!Left::is_alive(&left.next));
        let mut byte = [0];
        ram.read(AT, &mut byte).unwrap();
        assert_eq!(byte, [expected]);
        assert_eq!(former.qmp.run_state().unwrap() == RunState::Running, has_run);
        stop(&left.registry);
    }
}

#[test]
fn after_the_commit_the_next_qemu_has_the_vm_and_the_former_one_ends() {
    let dir = TestDir::new();
    let left = Left::new(&dir);
    left.sent();
    let committed = source::Record::Committed { run: false };
    let loaded = destination::Record::Loaded;
    left.note(&[source::Record::Stopped { run: false }, committed], &[loaded]);
    assert!(left.settle(None));
    assert_eq!(left.has(), left.next.pid());
    let recorded = Record::read(&left.vm).unwrap();
    assert!(recorded.standing == Standing::Here && recorded.machine.unwrap().is_of(&left.next));
    assert!(!record::may_have_next(&left.vm));
    assert!(left.registry.vm("web1").unwrap().machine().is_some());
    assert!(!left.vm.join("qemu.log").exists(), "the former one's seat is empty");
    assert!(left.journals.contents().unwrap().is_empty());
    stop(&left.registry);
}

/// The next one never ran: the former one is ended before it could.
#[test]
fn the_former_qemu_is_not_ended_for_a_next_one_that_has_ended() {
    let dir = TestDir::new();
    let left = Left { handed_over: true, ..Left::new(&dir) };
    let next = Arc::new(machine::reopen(&left.next, &left.vm).unwrap());
    next.quit().unwrap();
    let (registry, opened) = (Arc::clone(&left.registry), left.opened(&left.next));
    let mut effects = DestinationEffects::new(registry, &opened, Some(next), None, None);
    assert_eq!(destination::Effects::cont(&mut effects), destination::Event::QemuExited);
    assert!(Left::is_alive(&left.former));
    stop_former(&left);
}

/// Its next one has the only RAM.
#[test]
fn the_next_qemu_is_not_ended_for_a_former_one_that_has_ended() {
    let dir = TestDir::new();
    let left = Left { handed_over: true, ..Left::new(&dir) };
    let settlers = settlers(&left.registry, &left.journals);
    let (tell, _told) = unbounded();
    for (side, qemu) in [(Side::Source, &left.former), (Side::Destination, &left.next)] {
        let desk = Desk { opened: left.opened(qemu), tell: tell.clone(), thread: None };
        settlers.desks.lock().insert((left.migration.clone(), side), desk);
    }
    stop_former(&left);
    let here = ResolveRequest { side: ResolveSide::Here, certain: true };
    let denied = settlers.decide("web1", here).err().unwrap().to_string();
    assert!(denied.contains("only that one can have web1"), "{denied}");
    assert!(Left::is_alive(&left.next));
    machine::reopen(&left.next, &left.vm).unwrap().quit().unwrap();
}

/// A thread that a fault has ended, or that waits for its QEMU, says nothing about the VM.
#[test]
fn a_missing_thread_is_no_proof_that_nothing_is_in_doubt() {
    let dir = TestDir::new();
    let left = Left::new(&dir);
    let settlers = settlers(&left.registry, &left.journals);
    let decide = |side| {
        let denied = settlers.decide("web1", ResolveRequest { side, certain: true }).unwrap_err();
        assert_eq!(denied.code(), ErrorCode::DoubtUnknown, "{denied}");
    };
    // None could be started.
    decide(ResolveSide::Here);
    decide(ResolveSide::There);
    for (side, qemu) in [(Side::Source, &left.former), (Side::Destination, &left.next)] {
        let (tell, _) = unbounded();
        let desk = Desk { opened: left.opened(qemu), tell, thread: None };
        settlers.desks.lock().insert((left.migration.clone(), side), desk);
    }
    decide(ResolveSide::Here);
    decide(ResolveSide::There);
    assert!(Left::is_alive(&left.former) && Left::is_alive(&left.next));
    stop_former(&left);
    machine::reopen(&left.next, &left.vm).unwrap().quit().unwrap();
}

/// The next one ended when it may have run the VM: only the operator knows what is left of it.
#[test]
fn the_operator_gives_a_vm_back_to_its_former_qemu() {
    let dir = TestDir::new();
    let left = Left::new(&dir);
    left.sent();
    machine::reopen(&left.next, &left.vm).unwrap().quit().unwrap();
    let committed = source::Record::Committed { run: false };
    let starting = destination::Record::Starting { taken_back: false };
    left.note(&[committed], &[destination::Record::Loaded, starting]);
    assert!(left.settle(Some(ResolveSide::Here)));
    assert_eq!(left.has(), left.former.pid());
    assert!(Left::is_alive(&left.former) && !record::may_have_next(&left.vm));
    stop(&left.registry);
}

/// Of the VM that has the name, only the journal of its next QEMU can be read.
#[test]
fn a_side_without_a_journal_that_can_be_read_is_waited_for() {
    let dir = TestDir::new();
    let left = Left::new(&dir);
    left.note(&[], &[destination::Record::Loaded]);
    let file = left.registry.state().journals().join(format!("{}.source", left.migration));
    assert!(file.exists());
    std::fs::write(file, "damaged").unwrap();
    let settlers = settlers(&left.registry, &left.journals);
    settlers.take_up(left.journals.contents().unwrap());
    let there = ResolveRequest { side: ResolveSide::There, certain: true };
    let refused = settlers.decide("web1", there).unwrap_err().to_string();
    assert!(refused.contains("the former QEMU of web1 lives"), "{refused}");
    let here = ResolveRequest { side: ResolveSide::Here, certain: true };
    let refused = settlers.decide("web1", here).unwrap_err().to_string();
    assert!(refused.contains("the journal of its former QEMU"), "{refused}");
    settlers.close();
    assert!(left.registry.is_unsettled("web1"));
    left.registry.vm("web1").unwrap().machine().unwrap().quit().unwrap();
    left.registry.next("web1").unwrap().machine().unwrap().quit().unwrap();
}

/// The next one can run the VM, and the journal of the former one keeps it in doubt.
#[test]
fn a_vm_whose_former_qemu_has_no_readable_journal_is_not_called_resolved() {
    let dir = TestDir::new();
    let left = Left::new(&dir);
    left.note(&[], &[destination::Record::Loaded]);
    let file = left.journals.path(&left.migration, Side::Source);
    std::fs::write(&file, "damaged").unwrap();
    stop_former(&left);
    let settlers = settlers(&left.registry, &left.journals);
    settlers.take_up(left.journals.contents().unwrap());
    let there = ResolveRequest { side: ResolveSide::There, certain: true };
    for _ in 0..2 {
        let refused = settlers.decide("web1", there).unwrap_err().to_string();
        assert!(refused.contains("web1 stays in doubt"), "{refused}");
        assert!(refused.contains(&*file.to_string_lossy()), "{refused}");
        assert!(Left::is_alive(&left.next));
        assert_eq!(left.has(), left.next.pid());
    }
    settlers.close();
    assert!(left.registry.is_unsettled("web1"));
    // As the message has it.
    std::fs::rename(&file, dir.path().join("damaged")).unwrap();
    assert!(left.settle(None));
    assert_eq!(left.has(), left.next.pid());
    stop(&left.registry);
}

/// The former one may be the only one that can have the VM.
#[test]
fn the_former_qemu_is_not_ended_for_a_next_one_without_a_readable_journal() {
    let dir = TestDir::new();
    let left = Left::new(&dir);
    let settlers = settlers(&left.registry, &left.journals);
    let (tell, told) = unbounded();
    let desk = Desk { opened: left.opened(&left.former), tell, thread: None };
    settlers.desks.lock().insert((left.migration.clone(), Side::Source), desk);
    std::fs::write(left.journals.path(&left.migration, Side::Destination), "damaged").unwrap();
    let there = ResolveRequest { side: ResolveSide::There, certain: true };
    let refused = settlers.decide("web1", there).unwrap_err().to_string();
    assert!(refused.contains("the journal of its next QEMU"), "{refused}");
    assert!(told.is_empty(), "the thread of the former one was asked");
    stop_former(&left);
    machine::reopen(&left.next, &left.vm).unwrap().quit().unwrap();
}

/// It has the VM by the operator's decision, and the journal of the next one keeps it in doubt.
#[test]
fn a_vm_whose_next_qemu_has_no_readable_journal_is_not_called_resolved() {
    let dir = TestDir::new();
    let left = Left::new(&dir);
    left.sent();
    machine::reopen(&left.next, &left.vm).unwrap().quit().unwrap();
    left.note(&[source::Record::Committed { run: false }], &[destination::Record::Loaded]);
    let file = left.journals.path(&left.migration, Side::Destination);
    std::fs::write(&file, "damaged").unwrap();
    let settlers = settlers(&left.registry, &left.journals);
    settlers.take_up(left.journals.contents().unwrap());
    let here = ResolveRequest { side: ResolveSide::Here, certain: true };
    let refused = settlers.decide("web1", here).unwrap_err().to_string();
    assert!(refused.contains("web1 stays in doubt"), "{refused}");
    assert!(refused.contains(&*file.to_string_lossy()), "{refused}");
    assert!(Left::is_alive(&left.former));
    settlers.close();
    assert!(left.registry.is_unsettled("web1"));
    // As the message has it.
    std::fs::rename(&file, dir.path().join("damaged")).unwrap();
    assert!(left.settle(None));
    assert_eq!(left.has(), left.former.pid());
    stop(&left.registry);
}

/// It would get RAM that the former one has written to since.
#[test]
fn the_next_qemu_does_not_get_a_vm_that_its_former_one_has_run_since() {
    let dir = TestDir::new();
    let left = Left { handed_over: true, ..Left::new(&dir) };
    left.sent();
    let former = left.registry.vm("web1").unwrap().machine().unwrap();
    former.qmp.cont().unwrap();
    let settlers = settlers(&left.registry, &left.journals);
    let (tell, told) = unbounded();
    let desk = Desk { opened: left.opened(&left.former), tell, thread: None };
    settlers.desks.lock().insert((left.migration.clone(), Side::Source), desk);
    let there = ResolveRequest { side: ResolveSide::There, certain: true };
    let refused = settlers.decide("web1", there).unwrap_err().to_string();
    assert!(refused.contains("was ordered to run it, and is running"), "{refused}");
    assert!(told.is_empty(), "the thread of the former one was asked");
    stop_former(&left);
    machine::reopen(&left.next, &left.vm).unwrap().quit().unwrap();
}

/// The next one may have been ordered to run it as well, so the agent decides nothing.
#[test]
fn a_vm_that_its_former_qemu_has_run_since_continues_there_by_the_operators_decision() {
    let dir = TestDir::new();
    let left = Left { handed_over: true, ..Left::new(&dir) };
    left.sent();
    let former = left.registry.vm("web1").unwrap().machine().unwrap();
    former.qmp.cont().unwrap();
    let starting = destination::Record::Starting { taken_back: false };
    let committed = source::Record::Committed { run: true };
    left.note(&[committed], &[destination::Record::Loaded, starting]);
    assert!(left.settle(Some(ResolveSide::Here)));
    assert_eq!(left.has(), left.former.pid());
    assert!(!Left::is_alive(&left.next));
    assert_eq!(former.qmp.run_state().unwrap(), RunState::Running);
    stop(&left.registry);
}

/// One that was killed and waits for storage may still write to the VM's disks.
#[test]
fn the_next_qemu_gets_the_vm_when_the_former_one_has_exited() {
    let dir = TestDir::new();
    let left = Left::new(&dir);
    let settlers = settlers(&left.registry, &left.journals);
    let ((former, former_told), (next, next_told)) = (unbounded(), unbounded());
    let sides = [(Side::Source, &left.former, former), (Side::Destination, &left.next, next)];
    for (side, qemu, tell) in sides {
        let desk = Desk { opened: left.opened(qemu), tell, thread: None };
        settlers.desks.lock().insert((left.migration.clone(), side), desk);
    }
    // As the former one's thread, which can't end it.
    let thread = std::thread::spawn(move || match former_told.recv() {
        Ok(Request::Resolve(_, reply)) => reply.send(Ok(())).unwrap(),
        _ => panic!("it was not asked to decide"),
    });
    let there = ResolveRequest { side: ResolveSide::There, certain: true };
    let refused = settlers.decide("web1", there).unwrap_err().to_string();
    thread.join().unwrap();
    assert!(refused.contains("was ended and still exists"), "{refused}");
    assert!(next_told.is_empty(), "the thread of the next one was asked");
    stop_former(&left);
    machine::reopen(&left.next, &left.vm).unwrap().quit().unwrap();
}
