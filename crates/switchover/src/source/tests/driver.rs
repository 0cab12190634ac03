//! The state machine with its journal, performed by a driver.

use std::path::Path;

use serde_json::json;

use super::*;
use crate::Kept;
use crate::journal::{JournalDir, Opened, Reopened};

/// Effects that record the calls.
#[derive(Default)]
struct Notes {
    done: Vec<String>,
}

impl Effects for Notes {
    fn send(&mut self, said: &Envelope<ToDestination>) {
        self.done.push(format!("send {:?}", said.message));
    }

    fn await_completed(&mut self) -> Event {
        self.done.push("await".to_owned());
        Event::Completed
    }

    fn go_on(&mut self, run: bool) -> Event {
        self.done.push(format!("go on {run}"));
        Event::WentOn
    }

    fn quit(&mut self) -> bool {
        self.done.push("quit".to_owned());
        true
    }

    fn in_doubt(&mut self, doubt: &Doubt) {
        self.done.push(format!("doubt {doubt:?}"));
    }

    fn done(&mut self, outcome: Outcome) {
        self.done.push(format!("done {outcome:?}"));
    }
}

fn opened() -> Opened {
    Opened {
        migration: id(),
        vm: "web1".to_owned(),
        peer: "host-b".to_owned(),
        peer_address: "10.0.0.2:7800".to_owned(),
        run: true,
        qemu: json!({}),
        listed: None,
        handed_over: false,
    }
}

fn kept(dir: &Path) -> Option<Reopened<Record>> {
    let journals = JournalDir::open(&dir.join("journals")).unwrap();
    match journals.contents().unwrap().pop()? {
        Kept::Source(kept) => Some(kept),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_driver_performs_a_whole_switchover() {
    let dir = tempfile::tempdir().unwrap();
    let journals = JournalDir::open(&dir.path().join("journals")).unwrap();
    let mut effects = Notes::default();
    let mut driver = Driver::new(journals.create(opened()).unwrap());
    driver.step(Event::Stopped { run: true }, &mut effects);
    driver.step(received(ToSource::Loaded), &mut effects);
    assert_eq!(effects.done, ["await", "send Go { run: true }"]);
    assert_eq!(kept(dir.path()).unwrap().noted().phase, Phase::Committed);
    driver.step(received(ToSource::Running), &mut effects);
    assert_eq!(effects.done[2..], ["quit", "done Moved", "send Unknown"]);
    assert!(driver.machine().has_ended() && kept(dir.path()).is_none());
}

#[test]
fn a_driver_restarts_from_its_journal() {
    let dir = tempfile::tempdir().unwrap();
    let journals = JournalDir::open(&dir.path().join("journals")).unwrap();
    let mut driver = Driver::new(journals.create(opened()).unwrap());
    driver.step(Event::Completed, &mut Notes::default());
    driver.step(received(ToSource::Loaded), &mut Notes::default());
    drop(driver);
    let mut effects = Notes::default();
    let kept = kept(dir.path()).unwrap();
    let mut driver = Driver::restart(kept, Found::Stopped, &mut effects);
    assert_eq!(effects.done, ["send Go { run: true }", "doubt Unanswered"]);
    driver.step(received(ToSource::Refused { reason: reason() }), &mut effects);
    assert_eq!(effects.done[2], "go on true");
    assert!(driver.machine().has_ended());
}

/// The journal was created while the VM ran.
#[test]
fn a_vm_that_its_owner_paused_stays_paused_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let journals = JournalDir::open(&dir.path().join("journals")).unwrap();
    let mut driver = Driver::new(journals.create(opened()).unwrap());
    driver.step(Event::ByOwner { run: false }, &mut Notes::default());
    drop(driver);
    let mut effects = Notes::default();
    let driver = Driver::restart(kept(dir.path()).unwrap(), Found::Runs, &mut effects);
    assert_eq!(effects.done[0], "go on false");
    assert!(driver.machine().has_ended());
}

/// The agent that received it has ended since.
#[test]
fn a_vm_that_runs_there_is_not_tried_after_a_restart_before_the_operator_decides_again() {
    let dir = tempfile::tempdir().unwrap();
    let journals = JournalDir::open(&dir.path().join("journals")).unwrap();
    let mut journal = journals.create(opened()).unwrap();
    journal.append(&Record::Committed { run: true }).unwrap();
    journal.append(&reclaimed(By::Operator, "why", false)).unwrap();
    assert_eq!(kept(dir.path()).unwrap().noted().phase, Phase::Reclaimed(By::Operator));
    journal.note(&reclaimed(By::Operator, "why", true)).unwrap();
    drop(journal);
    let mut effects = Notes::default();
    let mut driver = Driver::restart(kept(dir.path()).unwrap(), Found::Stopped, &mut effects);
    driver.step(Event::Timeout, &mut effects);
    assert_eq!(effects.done, ["doubt RunsThereToo"]);
    driver.step(Event::Resolve(Resolution::Here), &mut effects);
    assert_eq!(effects.done[1], "go on true");
    assert_eq!(kept(dir.path()).unwrap().noted().phase, Phase::Reclaimed(By::Operator));
}

/// The journal is full, so nothing can be written.
#[test]
fn a_driver_sends_nothing_that_it_could_not_write() {
    let dir = tempfile::tempdir().unwrap();
    let journals = JournalDir::open(&dir.path().join("journals")).unwrap();
    let mut huge = opened();
    huge.qemu = json!("x".repeat((1 << 20) - 10_000));
    let mut effects = Notes::default();
    let mut journal = journals.create(huge).unwrap();
    // Fills the journal.
    while journal.append(&Record::Aborted { reason: "y".repeat(999).into() }).is_ok() {}
    while journal.append(&Record::Dropped).is_ok() {}
    let mut driver = Driver::new(journal);
    driver.step(Event::Completed, &mut effects);
    driver.step(received(ToSource::Loaded), &mut effects);
    let sent_go = effects.done.iter().any(|done| done.starts_with("send Go"));
    assert!(!sent_go && !driver.machine().is_committed(), "{:?}", effects.done);
    let went_on = effects.done.iter().any(|done| done.starts_with("go on"));
    assert!(!went_on && driver.machine().doubt().is_some(), "{:?}", effects.done);
}
