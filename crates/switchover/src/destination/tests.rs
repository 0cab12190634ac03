use serde_json::json;

use super::*;
use crate::journal::{JournalDir, Opened};
use crate::{Found, Kept};

fn id() -> MigrationId {
    MigrationId::new("m1").unwrap()
}

fn received(message: ToDestination) -> Event {
    Event::Received(Envelope { migration: id(), message })
}

fn send(message: ToSource) -> Action {
    Action::Send(Envelope { migration: id(), message })
}

fn reason() -> Reason {
    "a lock".into()
}

fn go() -> Event {
    received(ToDestination::Go { run: true })
}

fn aborted() -> Event {
    received(ToDestination::Aborted { reason: reason() })
}

fn refused() -> Action {
    Action::Journal(Record::Refused { reason: reason() })
}

fn starting(taken_back: bool) -> Record {
    Record::Starting { taken_back }
}

fn after(events: impl IntoIterator<Item = Event>) -> Machine {
    let mut machine = Machine::new(id());
    for event in events {
        let _ = machine.step(event);
    }
    machine
}

fn refused_by(machine: &mut Machine) -> Vec<Action> {
    machine.step(Event::ContFailed { reason: reason(), never_ran: true })
}

#[test]
fn it_runs_the_vm_on_go_and_not_before() {
    let mut machine = after([]);
    assert_eq!(machine.step(go()), [], "it is not loaded");
    let loads = machine.step(Event::Loaded);
    assert_eq!(loads, [Action::Journal(Record::Loaded), send(ToSource::Loaded)]);
    assert_eq!(machine.step(go()), [Action::Journal(starting(false)), Action::QemuCont]);
    let runs = [
        Action::QemuSettle,
        Action::Done(Outcome::Here),
        Action::Journal(Record::Running),
        send(ToSource::Running),
    ];
    assert_eq!(machine.step(Event::Runs), runs);
    assert_eq!(machine.step(go()), [send(ToSource::Running)], "it was not received");
    assert_eq!(machine.step(Event::Timeout), [send(ToSource::Running)]);
    assert_eq!(machine.step(received(ToDestination::Unknown)), [Action::Forget]);
    assert!(machine.has_ended());
}

#[test]
fn a_vm_that_its_owner_paused_stays_paused() {
    let actions = after([Event::Loaded]).step(received(ToDestination::Go { run: false }));
    assert_eq!(actions[..2], [Action::Journal(Record::Running), send(ToSource::Running)]);
    assert!(!actions.contains(&Action::QemuCont));
}

#[test]
fn a_loaded_vm_waits_for_the_sources_decision_and_asks() {
    let mut machine = after([Event::Loaded]);
    let asks = machine.step(Event::Timeout);
    assert_eq!(asks, [send(ToSource::Loaded), Action::KeepInDoubt(Doubt::NoVerdict)]);
    assert_eq!(machine.step(Event::Timeout), [send(ToSource::Loaded)]);
    let cut_off = Event::ConnectionLost { reason: reason() };
    assert_eq!(machine.step(cut_off), [send(ToSource::Loaded)]);
    assert_eq!(machine.step(Event::GiveUp { reason: reason() }), []);
    assert_eq!(machine.wait(), Some(Wait::Answer));
    assert_eq!(machine.step(aborted()), [refused(), Action::QemuKill]);
}

#[test]
fn a_source_that_knows_nothing_never_gave_the_vm_up() {
    let mut machine = after([Event::Loaded]);
    let actions = machine.step(received(ToDestination::Unknown));
    assert_eq!(actions[1], Action::QemuKill);
    let actions = machine.step(Event::QemuExited);
    assert!(matches!(&actions[0], Action::Done(Outcome::NotHere { .. })));
}

#[test]
fn before_it_is_loaded_anything_ends_it_and_nothing_is_kept() {
    let cut_off = Event::ConnectionLost { reason: reason() };
    let give_up = Event::GiveUp { reason: reason() };
    for event in [cut_off, give_up, Event::Timeout, aborted(), received(ToDestination::Unknown)] {
        let mut machine = after([]);
        assert_eq!(machine.step(event), [Action::QemuKill]);
        let actions = machine.step(Event::QemuExited);
        assert_eq!(actions.last(), Some(&Action::Forget));
        assert!(machine.has_ended());
    }
}

#[test]
fn a_vm_that_cannot_run_is_refused_once_its_qemu_has_ended() {
    let mut machine = after([Event::Loaded, go()]);
    assert_eq!(refused_by(&mut machine), [refused(), Action::QemuKill]);
    assert_eq!(machine.step(Event::Timeout), [Action::QemuKill], "it did not end");
    let not_here = Action::Done(Outcome::NotHere { reason: reason() });
    let send_refused = send(ToSource::Refused { reason: reason() });
    assert_eq!(machine.step(Event::QemuExited), [not_here, send_refused.clone()]);
    assert_eq!(machine.step(go()), std::slice::from_ref(&send_refused));
    assert_eq!(machine.step(aborted()), [send_refused]);
    assert_eq!(machine.step(received(ToDestination::Unknown)), [Action::Forget]);
}

#[test]
fn a_vm_that_may_have_run_is_never_refused() {
    let mut machine = after([Event::Loaded, go()]);
    let doubt = Action::KeepInDoubt(Doubt::CannotRun { reason: reason() });
    let unclear = Event::ContFailed { reason: reason(), never_ran: false };
    assert_eq!(machine.step(unclear), [doubt]);
    assert_eq!(refused_by(&mut machine), [], "it may have run before");
    assert_eq!(machine.step(Event::Timeout), [Action::QemuCont]);
    let actions = machine.step(Event::QemuExited);
    assert!(matches!(&actions[1], Action::Journal(Record::Lost { .. })), "{actions:?}");
}

#[test]
fn a_vm_that_died_here_is_reported_as_lost_until_acknowledged() {
    let mut machine = after([Event::Loaded, go(), Event::Runs]);
    let actions = machine.step(Event::QemuExited);
    let lost = send(ToSource::Lost { reason: "its QEMU ended".into() });
    assert_eq!(actions[2], lost);
    assert_eq!(machine.step(go()), std::slice::from_ref(&lost));
    assert_eq!(machine.step(Event::Timeout), [lost]);
}

#[test]
fn a_vm_that_its_owner_ended_is_not_lost() {
    let mut machine = after([Event::Loaded, go(), Event::Runs]);
    assert_eq!(machine.step(Event::Left), [Action::Journal(Record::Left)]);
    assert_eq!(machine.step(Event::QemuExited), []);
    assert_eq!(machine.step(go()), [send(ToSource::Running)]);
}

#[test]
fn a_host_that_cannot_write_its_journal_refuses() {
    let failed = || Event::JournalFailed { reason: reason() };
    let mut machine = after([Event::Loaded]);
    assert_eq!(machine.step(failed()), [Action::QemuKill], "nobody was told");
    let mut machine = after([Event::Loaded, go()]);
    assert_eq!(machine.step(failed()), [refused(), Action::QemuKill]);
    assert_eq!(machine.step(failed()), [Action::QemuKill]);
    assert_eq!(machine.step(Event::QemuExited).len(), 2);
    assert_eq!(machine.step(Event::Timeout)[0], refused(), "it is written down later");
    let mut machine = after([Event::Loaded, go(), Event::Runs]);
    assert_eq!(machine.step(failed()), [send(ToSource::Running)], "`starting` is on disk");
}

#[test]
fn the_operators_decision_is_enough() {
    let mut machine = after([Event::Loaded]);
    let actions = machine.step(Event::Resolve(Resolution::Here));
    assert_eq!(actions, [Action::Journal(starting(false)), Action::QemuCont]);
    // There is no other copy, so it is kept, and tried again.
    assert!(matches!(refused_by(&mut machine)[..], [Action::KeepInDoubt(_)]));
    assert!(machine.takes(Resolution::There));
    let actions = machine.step(Event::Resolve(Resolution::There));
    assert_eq!(actions[1], Action::QemuKill);
    let mut machine = after([Event::Loaded, go(), Event::Runs]);
    assert!(!machine.takes(Resolution::Here));
    assert_eq!(machine.step(Event::Resolve(Resolution::There)), []);
}

#[test]
fn a_vm_that_was_taken_back_is_not_ended_here() {
    let mut machine = after([Event::Loaded, go(), Event::Runs]);
    let both = Action::KeepInDoubt(Doubt::TakenBack { reason: reason() });
    assert_eq!(machine.step(aborted()), [send(ToSource::Running), both]);
    assert!(machine.is_here());
}

/// It is held until then, so that only the operator's decision can end it.
#[test]
fn a_vm_that_was_taken_back_while_it_could_not_run_is_ended_by_the_operator() {
    let (mut machine, _) = Machine::restart(id(), Noted::Starting, Found::Stopped);
    let unclear = Event::ContFailed { reason: reason(), never_ran: false };
    assert!(matches!(machine.step(unclear.clone())[..], [Action::KeepInDoubt(_)]));
    let doubt = Doubt::TakenBackMeanwhile { reason: reason() };
    let noted = |taken_back| Action::Note(starting(taken_back));
    assert_eq!(machine.step(aborted()), [noted(true), Action::KeepInDoubt(doubt.clone())]);
    assert_eq!(machine.step(aborted()), []);
    assert_eq!(machine.step(Event::Timeout), [], "the disks may change meanwhile");
    assert_eq!(machine.step(unclear), [], "the worse doubt stays shown");
    assert_eq!(machine.doubt(), Some(&doubt));
    // The operator keeps this copy; or the source has the VM given up anyway.
    let mut kept = machine.clone();
    let again = [noted(false), Action::QemuCont];
    assert_eq!(kept.step(Event::Resolve(Resolution::Here)), again);
    assert!(kept.doubt().is_none());
    assert_eq!(kept.step(Event::Timeout), [Action::QemuCont]);
    assert_eq!(machine.clone().step(go()), again);
    // It runs, though QEMU did not report it.
    assert_eq!(machine.clone().step(Event::Runs)[1], Action::Done(Outcome::Here));
    assert!(machine.takes(Resolution::There) && machine.takes(Resolution::Here));
    let actions = machine.step(Event::Resolve(Resolution::There));
    assert_eq!(actions[1], Action::QemuKill);
    let actions = machine.step(Event::QemuExited);
    assert!(matches!(&actions[0], Action::Done(Outcome::NotHere { .. })), "{actions:?}");
    let refused = ToSource::Refused { reason: "the operator decided".into() };
    assert_eq!(machine.step(aborted()), [send(refused)]);
}

#[test]
fn another_migrations_messages_are_not_for_it() {
    let mut machine = after([Event::Loaded]);
    let migration = MigrationId::new("m2").unwrap();
    let message = ToDestination::Go { run: true };
    assert_eq!(machine.step(Event::Received(Envelope { migration, message })), []);
}

#[test]
fn a_restart_goes_on_where_it_was() {
    let restart = |noted, found| Machine::restart(id(), noted, found).1;
    let no_verdict = Action::KeepInDoubt(Doubt::NoVerdict);
    assert_eq!(restart(Noted::Opened, Found::Stopped), [Action::QemuKill]);
    assert_eq!(restart(Noted::Opened, Found::Missing).last(), Some(&Action::Forget));
    assert_eq!(restart(Noted::Loaded, Found::Stopped), [send(ToSource::Loaded), no_verdict]);
    let gone = restart(Noted::Loaded, Found::Missing);
    assert!(matches!(gone[1], Action::Journal(Record::Refused { .. })), "it never ran: {gone:?}");
    assert_eq!(restart(Noted::Starting, Found::Stopped), [Action::QemuCont]);
    assert_eq!(restart(Noted::Starting, Found::Runs)[2], Action::Journal(Record::Running));
    let taken_back = restart(Noted::TakenBackMeanwhile, Found::Stopped);
    assert!(
        matches!(taken_back[..], [Action::KeepInDoubt(Doubt::TakenBackMeanwhile { .. })]),
        "it is not tried: {taken_back:?}"
    );
    let runs = restart(Noted::TakenBackMeanwhile, Found::Runs);
    assert_eq!(runs[2], Action::Journal(Record::Running));
    let gone = restart(Noted::Starting, Found::Missing);
    assert!(matches!(gone[1], Action::Journal(Record::Lost { .. })), "it may have: {gone:?}");
    assert_eq!(restart(Noted::Running, Found::Runs), [send(ToSource::Running)]);
    let gone = restart(Noted::Running, Found::Missing);
    assert!(matches!(gone[1], Action::Journal(Record::Lost { .. })), "{gone:?}");
    assert_eq!(restart(Noted::Left, Found::Missing), [send(ToSource::Running)]);
    assert_eq!(restart(Noted::Refused, Found::Stopped), [Action::QemuKill]);
    assert_eq!(restart(Noted::Refused, Found::Missing).len(), 1);
    assert_eq!(restart(Noted::Lost, Found::Missing).len(), 1);
}

/// Effects whose QEMU always obeys, and that record the calls.
#[derive(Default)]
struct Notes {
    done: Vec<String>,
    cont_fails: bool,
    cannot_note: bool,
}

impl Effects for Notes {
    fn send(&mut self, said: &Envelope<ToSource>) {
        self.done.push(format!("send {:?}", said.message));
    }

    fn cont(&mut self) -> Event {
        self.done.push("cont".to_owned());
        match self.cont_fails {
            true => Event::ContFailed { reason: reason(), never_ran: true },
            false => Event::Runs,
        }
    }

    fn settle(&mut self) {
        self.done.push("settle".to_owned());
    }

    fn kill(&mut self) -> bool {
        self.done.push("kill".to_owned());
        true
    }

    fn in_doubt(&mut self, doubt: &Doubt) {
        self.done.push(format!("doubt {doubt:?}"));
    }

    fn done(&mut self, outcome: Outcome) {
        self.done.push(format!("done {outcome:?}"));
    }

    fn noted(&mut self) -> Result<(), Reason> {
        if self.cannot_note { Err(reason()) } else { Ok(()) }
    }
}

fn opened() -> Opened {
    Opened {
        migration: id(),
        vm: "web1".to_owned(),
        peer: "host-a".to_owned(),
        peer_address: "10.0.0.1:7800".to_owned(),
        run: true,
        qemu: json!({}),
        listed: None,
        handed_over: false,
    }
}

#[test]
fn a_driver_receives_a_vm() {
    let dir = tempfile::tempdir().unwrap();
    let journals = JournalDir::open(&dir.path().join("journals")).unwrap();
    let mut effects = Notes::default();
    let mut driver = Driver::new(journals.create(opened()).unwrap());
    for event in [Event::Loaded, go(), received(ToDestination::Unknown)] {
        driver.step(event, &mut effects);
    }
    assert_eq!(effects.done, ["send Loaded", "cont", "settle", "done Here", "send Running"]);
    assert!(driver.machine().has_ended() && journals.contents().unwrap().is_empty());
}

#[test]
fn a_journal_stays_until_the_vm_is_noted_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let journals = JournalDir::open(&dir.path().join("journals")).unwrap();
    let mut effects = Notes { cannot_note: true, ..Notes::default() };
    let mut driver = Driver::new(journals.create(opened()).unwrap());
    for event in [Event::Loaded, go(), received(ToDestination::Unknown), Event::Timeout] {
        driver.step(event, &mut effects);
    }
    assert_eq!(driver.machine().wait(), Some(Wait::Retry));
    let Some(Kept::Destination(kept)) = journals.contents().unwrap().pop() else { panic!() };
    assert_eq!(kept.noted(), Noted::Running);
    effects.cannot_note = false;
    driver.step(Event::Timeout, &mut effects);
    assert!(driver.machine().has_ended() && journals.contents().unwrap().is_empty());
}

#[test]
fn a_driver_notes_that_the_vm_was_taken_back() {
    let dir = tempfile::tempdir().unwrap();
    let journals = JournalDir::open(&dir.path().join("journals")).unwrap();
    let mut journal = journals.create(opened()).unwrap();
    journal.append(&starting(false)).unwrap();
    let kept = || match journals.contents().unwrap().pop() {
        Some(Kept::Destination(kept)) => kept,
        other => panic!("{other:?}"),
    };
    drop(journal);
    let mut effects = Notes { cont_fails: true, ..Notes::default() };
    let mut driver = Driver::restart(kept(), Found::Stopped, &mut effects);
    driver.step(aborted(), &mut effects);
    assert_eq!(kept().noted(), Noted::TakenBackMeanwhile);
    let mut effects = Notes::default();
    let mut driver = Driver::restart(kept(), Found::Stopped, &mut effects);
    driver.step(Event::Timeout, &mut effects);
    assert!(matches!(&effects.done[..], [doubt] if doubt.starts_with("doubt TakenBack")));
    driver.step(Event::Resolve(Resolution::Here), &mut effects);
    assert_eq!(effects.done[1], "cont");
    assert_eq!(kept().noted(), Noted::Running);
}

#[test]
fn a_driver_refuses_and_records_it() {
    let dir = tempfile::tempdir().unwrap();
    let journals = JournalDir::open(&dir.path().join("journals")).unwrap();
    let mut effects = Notes { cont_fails: true, ..Notes::default() };
    let mut driver = Driver::new(journals.create(opened()).unwrap());
    driver.step(Event::Loaded, &mut effects);
    driver.step(go(), &mut effects);
    assert_eq!(effects.done[1..3], ["cont", "kill"]);
    let Some(Kept::Destination(kept)) = journals.contents().unwrap().pop() else { panic!() };
    assert_eq!(kept.noted(), Noted::Refused);
    let mut effects = Notes::default();
    let driver = Driver::restart(kept, Found::Missing, &mut effects);
    assert_eq!(effects.done.len(), 1);
    assert_eq!(driver.machine().wait(), Some(Wait::Settled));
}
