//! Journals that an earlier run left: of a VM that has lost its name to another since, of one that
//! came and was leaving, and of one that was taken back.

use std::fs;
use std::sync::Barrier;

use api::{ErrorCode, Outcome, ResolveRequest, ResolveSide, RunRequest, StopHow, VmStatus};
use crossbeam_channel::unbounded;
use identity::Security;
use qemu::probe::Probes;
use qemu::programs::Programs;
use serde_json::{Value, json};
use switchover::journal::{Journal, JournalDir, Listed, Opened, Side};
use switchover::{Kept, MigrationId};
use test_scope::TestDir;

use super::super::{Desk, JOURNALS_MAX, Settlers};
use super::*;
use crate::events::{Events, Limits};
use crate::moves::history::History;
use crate::peers::Peers;
use crate::state::StateDir;
use crate::vms::registry::{Held, Registry};

mod within;

/// A host with a VM, `web1`: a QEMU without a guest.
fn host(dir: &TestDir) -> Arc<Registry> {
    let state = StateDir::open(dir.path()).unwrap();
    let registry = Arc::new(Registry::open(state, &Held::default()).unwrap());
    let qemu = std::env::var("DROVEWAY_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".to_owned());
    let rest = "-machine q35,accel=tcg -m 32 -nodefaults -display none -S";
    let request = RunRequest {
        name: "web1".to_owned(),
        argv: std::iter::once(qemu).chain(rest.split(' ').map(str::to_owned)).collect(),
        cwd: "/".to_owned(),
        share_domain: String::new(),
        guest_port: false,
        free_page_hint: false,
        hand_over: false,
    };
    registry.run(&request, &Probes::new(Arc::new(Programs::usual(None)))).unwrap();
    registry
}

/// The journal of a migration of this QEMU.
fn opened(qemu: &Value) -> Opened {
    Opened {
        migration: MigrationId::random().unwrap(),
        vm: "web1".to_owned(),
        peer: "host-b".to_owned(),
        // Nothing listens there.
        peer_address: "127.0.0.1:1".to_owned(),
        run: false,
        qemu: qemu.clone(),
        listed: None,
        handed_over: false,
    }
}

fn settlers(registry: &Arc<Registry>, journals: &JournalDir) -> Arc<Settlers> {
    Settlers::new(
        Arc::clone(registry),
        Events::new(Limits::default()).unwrap(),
        Arc::new(History::open("host-a", registry.state().reports())),
        journals.clone(),
        "host-a",
        Security::Plaintext,
        Peers::default(),
    )
}

/// As an agent does that starts and soon ends.
fn take_up(registry: &Arc<Registry>, journals: &JournalDir) {
    let settlers = settlers(registry, journals);
    settlers.take_up(journals.contents().unwrap());
    settlers.close();
}

fn stop(registry: &Registry) {
    registry.stop("web1", StopHow { force: true, timeout_s: 0 }).unwrap();
}

#[test]
fn no_vm_arrives_where_too_many_switchovers_are_not_settled() {
    let dir = TestDir::new();
    let state = StateDir::open(dir.path()).unwrap();
    let registry = Arc::new(Registry::open(state, &Held::default()).unwrap());
    let journals = JournalDir::open(&registry.state().journals()).unwrap();
    let settlers = settlers(&registry, &journals);
    let file = |nth| registry.state().journals().join(format!("m{nth}.destination"));
    for nth in 1..JOURNALS_MAX {
        fs::write(file(nth), "").unwrap();
    }
    settlers.have_room().unwrap();
    fs::write(file(0), "").unwrap();
    let refused = settlers.have_room().unwrap_err().to_string();
    assert!(refused.contains("2048 switchovers"), "{refused}");
    fs::remove_file(file(0)).unwrap();
    settlers.have_room().unwrap();
}

#[test]
fn the_end_of_an_earlier_switchover_leaves_another_vm_of_that_name_alone() {
    let dir = TestDir::new();
    let registry = host(&dir);
    let machine = registry.vm("web1").unwrap().machine().unwrap();
    // The QEMU of the VM that had the name before.
    let mut gone = serde_json::to_value(machine.record()).unwrap();
    gone["process"]["start_time"] = json!(1);
    let journals = JournalDir::open(&registry.state().journals()).unwrap();
    let mut left: Journal<source::Record> = journals.create(opened(&gone)).unwrap();
    for record in [
        source::Record::Stopped { run: false },
        source::Record::Committed { run: false },
        source::Record::Dropped,
    ] {
        left.append(&record).unwrap();
    }
    let mut came: Journal<destination::Record> = journals.create(opened(&gone)).unwrap();
    let reason = "as a test wants it".into();
    came.append(&destination::Record::Refused { reason }).unwrap();
    drop((left, came));
    // Its own switchover is unsettled too.
    registry.unsettled("web1");
    take_up(&registry, &journals);
    assert!(registry.is_unsettled("web1") && machine.process.is_alive());
    assert!(registry.state().vm("web1").join("record.json").exists());
    registry.stays("web1");
    assert_eq!(registry.show("web1").unwrap().status, VmStatus::Paused);
    stop(&registry);
}

/// The other host of that one never came back.
#[test]
fn an_earlier_vm_of_that_name_takes_no_decision_and_holds_up_no_move() {
    let dir = TestDir::new();
    let registry = host(&dir);
    let machine = registry.vm("web1").unwrap().machine().unwrap();
    let qemu = serde_json::to_value(machine.record()).unwrap();
    let mut gone = qemu.clone();
    gone["process"]["start_time"] = json!(1);
    let journals = JournalDir::open(&registry.state().journals()).unwrap();
    let mut left: Journal<source::Record> = journals.create(opened(&gone)).unwrap();
    let (by, reason) = (source::By::Operator, "as a test wants it".into());
    left.append(&source::Record::Reclaimed { by, reason, runs_there: false }).unwrap();
    drop(left);
    let settlers = settlers(&registry, &journals);
    settlers.take_up(journals.contents().unwrap());
    let here = ResolveRequest { side: ResolveSide::Here, certain: true };
    let denied = settlers.decide("web1", here).unwrap_err();
    assert_eq!(denied.code(), ErrorCode::VmNotInDoubt, "{denied}");
    assert_eq!(settlers.keeps_here("web1"), Ok(()));
    assert_eq!(journals.contents().unwrap().len(), 1, "that one still waits for its other host");

    let mut left: Journal<source::Record> = journals.create(opened(&qemu)).unwrap();
    left.append(&source::Record::Committed { run: false }).unwrap();
    drop(left);
    let kept = settlers.kept_leaving("web1");
    let Some(Kept::Source(its_own)) = &kept else { panic!("{kept:?}") };
    assert_eq!(its_own.journal.opened().qemu, qemu);
    assert!(settlers.take_up_after_fault("web1", kept));
    let denied = settlers.keeps_here("web1").unwrap_err();
    assert_eq!(denied.code(), ErrorCode::VmInDoubt, "{denied}");
    settlers.decide("web1", here).unwrap();
    assert_eq!(registry.show("web1").unwrap().status, VmStatus::Paused);
    settlers.close();
    assert_eq!(journals.contents().unwrap().len(), 2);
    stop(&registry);
}

/// The source of its arrival has not received yet that it is here.
#[test]
fn a_vm_that_was_leaving_is_not_freed_by_the_journal_of_its_arrival() {
    let dir = TestDir::new();
    let registry = host(&dir);
    let machine = registry.vm("web1").unwrap().machine().unwrap();
    let qemu = serde_json::to_value(machine.record()).unwrap();
    let journals = JournalDir::open(&registry.state().journals()).unwrap();
    let mut left: Journal<source::Record> = journals.create(opened(&qemu)).unwrap();
    left.append(&source::Record::Committed { run: false }).unwrap();
    let arrival = |record: &destination::Record| {
        let mut came: Journal<destination::Record> = journals.create(opened(&qemu)).unwrap();
        came.append(record).unwrap();
        came
    };
    for record in [destination::Record::Running, destination::Record::Left] {
        let mut came = arrival(&record);
        registry.unsettled("web1");
        take_up(&registry, &journals);
        assert!(registry.is_unsettled("web1"), "{record:?}");
        let denied = registry.stop("web1", StopHow { force: true, timeout_s: 0 }).unwrap_err();
        assert_eq!(denied.code(), ErrorCode::VmInDoubt, "{denied}");
        came.forget().unwrap();
    }
    left.forget().unwrap();
    drop(arrival(&destination::Record::Left));
    take_up(&registry, &journals);
    assert!(!registry.is_unsettled("web1"), "nothing else says whose it is");
    assert!(machine.process.is_alive());
    stop(&registry);
}

/// The agent was killed, so there is no report of the move.
#[test]
fn a_move_that_the_agents_end_interrupted_is_in_the_history() {
    let dir = TestDir::new();
    let registry = host(&dir);
    let qemu = registry.vm("web1").unwrap().machine().unwrap().record();
    let qemu = serde_json::to_value(qemu).unwrap();
    let journals = JournalDir::open(&registry.state().journals()).unwrap();
    let left = |id: &str, record: source::Record| {
        let listed = Listed { id: MigrationId::new(id).unwrap(), started_unix_s: 1_700_000_000 };
        let opened = Opened { listed: Some(listed), ..opened(&qemu) };
        let mut left: Journal<source::Record> = journals.create(opened).unwrap();
        left.append(&record).unwrap();
        registry.unsettled("web1");
    };
    let history = || History::open("host-a", registry.state().reports()).list();

    left("0000000a", source::Record::Stopped { run: false });
    take_up(&registry, &journals);
    let [stayed] = history().try_into().unwrap();
    assert_eq!((stayed.id.as_str(), stayed.vm.as_str()), ("0000000a", "web1"));
    assert_eq!((stayed.from.as_str(), stayed.to.as_str()), ("host-a", "host-b"));
    let why = "the agent was restarted. The VM stays where it was".to_owned();
    assert_eq!((stayed.outcome, stayed.in_doubt), (Some(Outcome::Failed(why)), false));

    left("0000000b", source::Record::Committed { run: false });
    let settlers = settlers(&registry, &journals);
    settlers.take_up(journals.contents().unwrap());
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while settlers.history.list().len() < 2 && std::time::Instant::now() < until {
        std::thread::yield_now();
    }
    let doubt = settlers.history.list().remove(0);
    assert!(doubt.id == "0000000b" && doubt.in_doubt, "{doubt:?}");
    let Some(Outcome::Failed(why)) = doubt.outcome else { panic!() };
    assert!(why.contains("`droveway show web1`"), "{why}");
    let there = ResolveRequest { side: ResolveSide::There, certain: true };
    settlers.decide("web1", there).unwrap();
    settlers.close();
    for list in [settlers.history.list(), history()] {
        let gone = list.iter().find(|one| one.id == "0000000b").unwrap();
        assert_eq!((gone.outcome.as_ref(), gone.in_doubt), (Some(&Outcome::Done), false));
        assert_eq!(list.len(), 2);
    }
    assert!(registry.vm("web1").is_none());
}

/// Its source has taken it back since, and a `cont` from before was carried out late.
#[test]
fn a_vm_that_was_taken_back_is_not_tried_and_is_here_if_it_runs_all_the_same() {
    let dir = TestDir::new();
    let registry = host(&dir);
    let machine = registry.vm("web1").unwrap().machine().unwrap();
    let qemu = serde_json::to_value(machine.record()).unwrap();
    let journals = JournalDir::open(&registry.state().journals()).unwrap();
    let mut came: Journal<destination::Record> = journals.create(opened(&qemu)).unwrap();
    came.append(&destination::Record::Starting { taken_back: true }).unwrap();
    drop(came);
    registry.unsettled("web1");
    let kept = match journals.contents().unwrap().pop() {
        Some(Kept::Destination(kept)) => kept,
        other => panic!("{other:?}"),
    };
    let place = Some(VmClaim::Found(registry.claim_found("web1")));
    let (registry_too, qemu) = (Arc::clone(&registry), Some(Arc::clone(&machine)));
    let opened = kept.journal.opened();
    let mut effects = DestinationEffects::new(registry_too, opened, qemu, None, place);
    let driver = destination::Driver::restart(kept, came_as(&machine), &mut effects);
    let mut case = Case::Destination(driver, effects);
    case.late();
    assert_eq!(came_as(&machine), Found::Stopped);
    assert!(case.doubt().is_some() && registry.is_unsettled("web1"));
    machine.qmp.cont().unwrap();
    case.late();
    assert_eq!(case.doubt(), None);
    assert!(!registry.is_unsettled("web1"), "its owner can stop it");
    stop(&registry);
}

/// Something that is not the agent's uses what was the target of a mirror.
#[test]
fn a_vm_goes_on_although_something_of_a_mirror_is_left() {
    let dir = TestDir::new();
    let registry = host(&dir);
    let machine = registry.vm("web1").unwrap().machine().unwrap();
    let target = format!("{}0", qemu::mirror::PREFIX);
    for node in [
        json!({ "driver": "null-co", "node-name": target }),
        json!({ "driver": "raw", "node-name": "user", "file": target }),
    ] {
        machine.qmp.execute("blockdev-add", node).unwrap();
    }
    let journals = JournalDir::open(&registry.state().journals()).unwrap();
    let qemu = serde_json::to_value(machine.record()).unwrap();
    let mut left: Journal<source::Record> = journals.create(opened(&qemu)).unwrap();
    left.append(&source::Record::Stopped { run: true }).unwrap();
    drop(left);
    registry.unsettled("web1");
    take_up(&registry, &journals);
    assert!(!registry.is_unsettled("web1"));
    let shown = registry.show("web1").unwrap();
    assert_eq!(shown.status, VmStatus::Running);
    let problem = shown.problem.unwrap();
    assert!(problem.contains(&target), "{problem}");
    stop(&registry);
}

#[test]
fn what_one_switchover_of_a_vm_has_shown_is_not_erased_by_another() {
    let dir = TestDir::new();
    let registry = host(&dir);
    let qemu = registry.vm("web1").unwrap().machine().unwrap().record();
    let qemu = serde_json::to_value(qemu).unwrap();
    let journals = JournalDir::open(&registry.state().journals()).unwrap();
    let settlers = settlers(&registry, &journals);
    let (_tell, told) = unbounded();
    let settler = |side| Settler::new(Arc::clone(&settlers), opened(&qemu), side, told.clone());
    let (came, left) = (settler(Side::Destination), settler(Side::Source));
    let problem = || registry.show("web1").unwrap().problem;
    came.show(None);
    assert_eq!(problem(), None);
    left.show(Some("it is in doubt".to_owned()));
    came.show(None);
    assert_eq!(problem().as_deref(), Some("it is in doubt"));
    left.show(None);
    assert_eq!(problem(), None);
    stop(&registry);
}

/// Each may be trying to reach a host that is down, which takes seconds.
#[test]
fn all_switchovers_hear_that_the_agent_ends_before_one_is_waited_for() {
    let dir = TestDir::new();
    let state = StateDir::open(dir.path()).unwrap();
    let registry = Arc::new(Registry::open(state, &Held::default()).unwrap());
    let journals = JournalDir::open(&registry.state().journals()).unwrap();
    let settlers = settlers(&registry, &journals);
    let all_heard = Arc::new(Barrier::new(3));
    for _ in 0..3 {
        let (tell, told) = unbounded::<Request>();
        let all_heard = Arc::clone(&all_heard);
        let thread = std::thread::spawn(move || {
            assert!(told.recv().is_err());
            all_heard.wait();
        });
        let opened = opened(&Value::Null);
        let key = (opened.migration.clone(), Side::Source);
        settlers.desks.lock().insert(key, Desk { opened, tell, thread: Some(thread) });
    }
    settlers.close();
}

#[test]
fn a_qemu_that_a_newer_release_describes_is_not_taken_for_one_that_has_exited() {
    let dir = TestDir::new();
    let registry = host(&dir);
    let journals = JournalDir::open(&registry.state().journals()).unwrap();
    let newer = json!({ "processes": [{ "pid": 7 }] });
    let mut left: Journal<source::Record> = journals.create(opened(&newer)).unwrap();
    left.append(&source::Record::Stopped { run: false }).unwrap();
    let mut came: Journal<destination::Record> = journals.create(opened(&newer)).unwrap();
    came.append(&destination::Record::Loaded).unwrap();
    drop((left, came));
    registry.unsettled("web1");
    take_up(&registry, &journals);
    assert!(registry.is_unsettled("web1"));
    assert_eq!(journals.contents().unwrap().len(), 2, "nothing was decided");
    let problem = registry.show("web1").unwrap().problem.unwrap();
    assert!(problem.contains("another release of Droveway"), "{problem}");
    registry.stays("web1");
    stop(&registry);
}
