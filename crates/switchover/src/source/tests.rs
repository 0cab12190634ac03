mod driver;

use super::*;
use crate::Found;

fn id() -> MigrationId {
    MigrationId::new("m1").unwrap()
}

fn received(message: ToSource) -> Event {
    Event::Received(Envelope { migration: id(), message })
}

fn send(message: ToDestination) -> Action {
    Action::Send(Envelope { migration: id(), message })
}

fn go() -> Action {
    send(ToDestination::Go { run: true })
}

fn go_on() -> Action {
    Action::QemuGoOn { run: true }
}

fn forgets(outcome: Outcome) -> Vec<Action> {
    vec![Action::Done(outcome), Action::Forget, send(ToDestination::Unknown)]
}

fn reason() -> Reason {
    "a lock".into()
}

fn reclaimed(by: By, reason: &str, runs_there: bool) -> Record {
    Record::Reclaimed { by, reason: reason.into(), runs_there }
}

/// A source after these events.
fn after(events: impl IntoIterator<Item = Event>) -> Machine {
    let mut machine = Machine::new(id(), true);
    for event in events {
        let _ = machine.step(event);
    }
    machine
}

fn committed() -> Machine {
    let machine =
        after([Event::Stopped { run: true }, Event::Completed, received(ToSource::Loaded)]);
    assert!(machine.is_committed());
    machine
}

#[test]
fn it_commits_when_it_is_loaded_and_completed_in_either_order() {
    let commits = [Action::Journal(Record::Committed { run: true }), go()];
    let mut machine = after([Event::Stopped { run: true }]);
    assert_eq!(machine.step(Event::Completed), []);
    assert_eq!(machine.step(received(ToSource::Loaded)), commits);
    let mut machine = after([Event::Stopped { run: true }]);
    assert_eq!(machine.step(received(ToSource::Loaded)), [Action::QemuAwaitCompleted]);
    assert_eq!(machine.step(Event::Completed), commits);
}

#[test]
fn a_vm_that_its_owner_paused_arrives_paused() {
    let events = [Event::Stopped { run: false }, Event::Completed];
    let actions = after(events).step(received(ToSource::Loaded));
    assert_eq!(actions[1], send(ToDestination::Go { run: false }));
}

#[test]
fn pauses_by_the_owner_are_noted_once() {
    let noted = |run| [Action::Note(Record::Stopped { run })];
    let mut machine = after([]);
    assert_eq!(machine.step(Event::ByOwner { run: true }), [], "it runs");
    assert_eq!(machine.step(Event::ByOwner { run: false }), noted(false));
    assert_eq!(machine.step(Event::ByOwner { run: false }), []);
    assert_eq!(machine.step(Event::ByOwner { run: true }), noted(true));
    // Also if QEMU was seen to stop the VM: its owner may have stopped it.
    let mut machine = after([Event::Stopped { run: true }]);
    assert_eq!(machine.step(Event::ByOwner { run: false }), noted(false));
    let _ = machine.step(Event::Completed);
    let commits = machine.step(received(ToSource::Loaded));
    assert_eq!(commits[0], Action::Journal(Record::Committed { run: false }));
    assert_eq!(commits[1], send(ToDestination::Go { run: false }));
    assert_eq!(machine.step(Event::ByOwner { run: true }), [], "it is the destination's");
}

#[test]
fn a_vm_that_its_owner_paused_stays_paused_when_it_stays() {
    let mut machine = after([Event::ByOwner { run: false }]);
    let actions = machine.step(Event::GiveUp { reason: reason() });
    assert_eq!(actions[1], Action::QemuGoOn { run: false });
}

#[test]
fn whatever_goes_wrong_before_the_commit_leaves_the_vm_here() {
    let failures = [
        Event::NotCompleted { reason: reason() },
        Event::ConnectionLost { reason: reason() },
        Event::GiveUp { reason: reason() },
        Event::Timeout,
        received(ToSource::Refused { reason: reason() }),
        received(ToSource::Unknown),
    ];
    for failure in failures {
        for stopped in [Vec::new(), vec![Event::Stopped { run: true }]] {
            let mut machine = after(stopped);
            let actions = machine.step(failure.clone());
            let aborted = matches!(actions[0], Action::Journal(Record::Aborted { .. }));
            assert!(aborted && actions[1] == go_on(), "{failure:?}: {actions:?}");
            let actions = machine.step(Event::WentOn);
            assert!(matches!(&actions[0], Action::Done(Outcome::Stays { .. })));
            assert!(machine.has_ended());
        }
    }
}

#[test]
fn after_the_commit_none_of_it_matters() {
    let mut machine = committed();
    for event in [
        Event::NotCompleted { reason: reason() },
        Event::GiveUp { reason: reason() },
        Event::WentOn,
        Event::CannotGoOn { reason: reason() },
        Event::QemuExited,
        Event::Stopped { run: true },
        Event::Completed,
    ] {
        assert_eq!(machine.step(event), []);
        assert!(machine.is_committed());
    }
    assert_eq!(machine.step(Event::ConnectionLost { reason: reason() }), [go()]);
    assert_eq!(machine.step(Event::Timeout), [go(), Action::KeepInDoubt(Doubt::Unanswered)]);
    assert_eq!(machine.step(Event::Timeout), [go()], "it asks on, and says so once");
    assert_eq!(machine.step(received(ToSource::Loaded)), [go()]);
}

#[test]
fn it_quits_on_running_and_removes_its_journal_when_qemu_has_ended() {
    let mut machine = committed();
    assert_eq!(machine.step(received(ToSource::Running)), [Action::QemuQuit]);
    assert_eq!(machine.step(Event::Timeout), [Action::QemuQuit], "it did not end");
    assert_eq!(machine.step(Event::QemuExited), forgets(Outcome::Moved));
    assert!(machine.has_ended() && machine.wait().is_none());
    assert_eq!(machine.step(received(ToSource::Running)), [send(ToDestination::Unknown)]);
}

/// The destination has all of it, or will.
#[test]
fn a_vm_whose_qemu_ends_when_it_has_released_it_is_the_destinations() {
    let mut machine = after([Event::Stopped { run: true }]);
    assert!(!machine.is_released());
    assert_eq!(machine.step(Event::Completed), []);
    assert!(machine.is_released());
    assert_eq!(machine.step(Event::QemuExited), []);
    assert!(machine.is_released() && !machine.has_ended());
    let commits = [Action::Journal(Record::Committed { run: true }), go()];
    assert_eq!(machine.step(received(ToSource::Loaded)), commits);
    assert!(!machine.is_released() && machine.is_committed());
    assert_eq!(machine.step(received(ToSource::Running)), forgets(Outcome::Moved));
    // It does not load it.
    let mut machine = after([Event::Completed, Event::QemuExited]);
    let lost = machine.step(received(ToSource::Refused { reason: reason() }));
    assert_eq!(lost, forgets(Outcome::Lost { reason: reason() }));
}

#[test]
fn a_vm_that_was_refused_goes_on() {
    let mut machine = committed();
    let actions = machine.step(received(ToSource::Refused { reason: reason() }));
    let record = reclaimed(By::Destination, "a lock", false);
    assert_eq!(actions, [Action::Journal(record), go_on()]);
    let doubt = Doubt::CannotGoOn { reason: reason() };
    let cannot = machine.step(Event::CannotGoOn { reason: reason() });
    assert_eq!(cannot, [Action::KeepInDoubt(doubt)]);
    assert_eq!(machine.step(Event::Timeout), [go_on()]);
    assert_eq!(machine.step(Event::WentOn), forgets(Outcome::Stays { reason: reason() }));
}

#[test]
fn a_vm_that_died_there_does_not_go_on_here_by_itself() {
    let mut machine = committed();
    let doubt = Doubt::LostThere { reason: reason() };
    let lost = received(ToSource::Lost { reason: reason() });
    assert_eq!(machine.step(lost.clone()), [Action::KeepInDoubt(doubt)]);
    assert_eq!(machine.step(lost), []);
    assert!(machine.takes(Resolution::Here) && machine.takes(Resolution::There));
}

#[test]
fn the_operator_takes_it_back_or_gives_it_away() {
    let mut machine = committed();
    let actions = machine.step(Event::Resolve(Resolution::Here));
    let by_operator = reclaimed(By::Operator, "the operator decided", false);
    assert_eq!(actions, [Action::Journal(by_operator), go_on()]);
    let actions = machine.step(Event::WentOn);
    assert!(matches!(actions[0], Action::Done(Outcome::Stays { .. })));
    assert_eq!(machine.wait(), Some(Wait::Settled), "the destination may come back");
    let both = machine.step(received(ToSource::Running));
    assert_eq!(both, [Action::KeepInDoubt(Doubt::RunsThereToo)]);
    let _ = machine.step(received(ToSource::Lost { reason: reason() }));
    assert!(machine.has_ended());

    let mut machine = committed();
    let actions = machine.step(Event::Resolve(Resolution::There));
    assert_eq!(actions, [Action::Journal(Record::Dropped), Action::QemuQuit]);
    assert_eq!(machine.step(Event::QemuExited), [Action::Done(Outcome::Moved), go()]);
    assert_eq!(machine.step(Event::Timeout), [go()], "it still has the destination run it");
    let _ = machine.step(received(ToSource::Running));
    assert!(machine.has_ended());
}

/// Something sent `cont` to its QEMU, and then its agent was restarted.
#[test]
fn a_vm_that_runs_at_both_ends_is_ended_here_or_goes_on_here() {
    let noted = Noted { phase: Phase::Committed, run: true };
    let at_both = || {
        let (mut machine, actions) = Machine::restart(id(), noted, Found::Runs);
        assert_eq!(actions, [go(), Action::KeepInDoubt(Doubt::RunsHere)]);
        let both = machine.step(received(ToSource::Running));
        assert_eq!(both, [Action::KeepInDoubt(Doubt::RunsAtBoth)]);
        assert_eq!(machine.step(Event::Timeout), [go()]);
        assert_eq!(machine.step(received(ToSource::Running)), [], "it says so once");
        machine
    };
    let mut machine = at_both();
    let actions = machine.step(Event::Resolve(Resolution::There));
    assert_eq!(actions, [Action::Journal(Record::Dropped), Action::QemuQuit]);
    assert_eq!(machine.step(Event::QemuExited), [Action::Done(Outcome::Moved), go()]);
    let _ = machine.step(received(ToSource::Running));
    assert!(machine.has_ended());

    // The operator stops it at the destination, which continues saying that it has the VM.
    let mut machine = at_both();
    let actions = machine.step(Event::Resolve(Resolution::Here));
    assert_eq!(actions[1], go_on());
    let _ = machine.step(Event::WentOn);
    let both = machine.step(received(ToSource::Running));
    assert_eq!(both, [Action::KeepInDoubt(Doubt::RunsThereToo)]);
    let _ = machine.step(Event::Resolve(Resolution::Here));
    assert!(machine.has_ended());
}

/// Its operator was mistaken: the destination runs it, and holds its disks.
#[test]
fn a_vm_that_was_taken_back_and_runs_there_is_not_tried_until_the_operator_decides_again() {
    let noted =
        |runs_there| Action::Note(reclaimed(By::Operator, "the operator decided", runs_there));
    let taking_back = || {
        let mut machine = committed();
        let _ = machine.step(Event::Resolve(Resolution::Here));
        let _ = machine.step(Event::CannotGoOn { reason: reason() });
        assert!(!machine.takes(Resolution::Here) && !machine.takes(Resolution::There));
        assert_eq!(machine.step(Event::Timeout), [go_on()]);
        let _ = machine.step(Event::CannotGoOn { reason: reason() });
        let both = machine.step(received(ToSource::Running));
        assert_eq!(both, [noted(true), Action::KeepInDoubt(Doubt::RunsThereToo)]);
        assert_eq!(machine.step(received(ToSource::Running)), [], "it says so once");
        assert_eq!(machine.step(Event::Timeout), [], "the disks may change meanwhile");
        assert_eq!(machine.doubt(), Some(&Doubt::RunsThereToo));
        assert!(machine.takes(Resolution::Here) && machine.takes(Resolution::There));
        machine
    };
    let mut machine = taking_back();
    let actions = machine.step(Event::Resolve(Resolution::There));
    assert_eq!(actions, [Action::Journal(Record::Dropped), Action::QemuQuit]);
    assert_eq!(machine.step(Event::Timeout), [Action::QemuQuit], "it did not end");
    assert_eq!(machine.step(Event::QemuExited), [Action::Done(Outcome::Moved), go()]);
    let _ = machine.step(received(ToSource::Running));
    assert!(machine.has_ended());

    // The record can't be written: the destination's next word ends the copy here.
    let mut machine = taking_back();
    let _ = machine.step(Event::Resolve(Resolution::There));
    let doubt = Action::KeepInDoubt(Doubt::CannotNote { reason: reason() });
    assert_eq!(machine.step(Event::JournalFailed { reason: reason() }), [doubt]);
    assert_eq!(machine.step(Event::Timeout), [go()]);
    assert_eq!(machine.step(received(ToSource::Running)), [Action::QemuQuit]);

    // The operator has ended the other one.
    let mut machine = taking_back();
    assert_eq!(machine.step(Event::Resolve(Resolution::Here)), [noted(false), go_on()]);
    assert!(machine.doubt().is_none() && !machine.takes(Resolution::There));
    let actions = machine.step(Event::WentOn);
    assert!(matches!(actions[0], Action::Done(Outcome::Stays { .. })), "{actions:?}");
}

/// `droveway stop` is refused for a VM that is held, so it is named for the other host only.
#[test]
fn a_vm_that_is_held_here_is_ended_by_resolving() {
    let advice = Doubt::RunsAtBoth.advice("web1", "host-b");
    assert!(advice.contains("the copy here now with `droveway resolve web1 --there`"), "{advice}");
    assert!(advice.contains("`droveway stop web1 --force` on host-b,"), "{advice}");
    let meanwhile = Doubt::TakenBackMeanwhile { reason: reason() };
    let advice = meanwhile.advice("web1", "host-a");
    assert!(advice.contains("the copy here now with `droveway resolve web1 --there`"), "{advice}");
    assert!(advice.contains("`droveway stop web1 --force` on host-a,"), "{advice}");
    let advice = Doubt::RunsThereToo.advice("web1", "host-b");
    assert!(advice.contains("shows it in doubt, with `droveway resolve web1 --there`"), "{advice}");
}

/// There is no other host to power off.
#[test]
fn within_a_host_the_advice_names_both_qemus() {
    for doubt in [
        Doubt::Unanswered,
        Doubt::LostThere { reason: reason() },
        Doubt::RunsAtBoth,
        Doubt::CannotRun { reason: reason() },
        Doubt::TakenBack { reason: reason() },
    ] {
        let advice = doubt.advice_within_host("web1");
        assert!(advice.contains("`droveway resolve web1 --here`"), "{advice}");
        assert!(advice.contains("next"), "{advice}");
        assert!(!advice.contains("host") && !advice.contains("power"), "{advice}");
    }
    let advice = Doubt::CannotNote { reason: reason() }.advice_within_host("web1");
    assert!(advice.contains("the disk of the agent's state directory"), "{advice}");
}

/// A QEMU that hangs in its migration runs the VM.
#[test]
fn a_vm_whose_qemu_does_not_end_the_migration_is_not_called_stopped() {
    let doubt = Doubt::CannotGoOn { reason: "it did not end within 10 s".into() };
    let advice = doubt.advice("web1", "host-b");
    assert!(advice.starts_with("QEMU did not end the migration of web1, or does not"), "{advice}");
    assert!(advice.contains("(it did not end within 10 s)"), "{advice}");
    assert!(advice.contains("If its guest answers, it runs"), "{advice}");
    assert!(advice.contains("shut the guest down and start web1 again"), "{advice}");
}

#[test]
fn two_copies_are_no_longer_in_doubt_when_the_one_here_has_ended() {
    let noted = Noted { phase: Phase::Reclaimed(By::Operator), run: true };
    let (mut machine, _) = Machine::restart(id(), noted, Found::Runs);
    let both = machine.step(received(ToSource::Running));
    assert_eq!(both, [Action::KeepInDoubt(Doubt::RunsThereToo)]);
    assert_eq!(machine.step(Event::QemuExited), []);
    let actions = machine.step(received(ToSource::Running));
    assert_eq!(actions, [Action::Forget, send(ToDestination::Unknown)]);
    assert!(machine.has_ended() && machine.doubt().is_none());
}

/// The destination may never come back.
#[test]
fn a_vm_that_was_taken_back_is_settled_when_the_operator_says_so_again() {
    let here = || Event::Resolve(Resolution::Here);
    let mut machine = committed();
    let _ = machine.step(here());
    assert!(!machine.takes(Resolution::Here), "it has not gone on yet");
    assert_eq!(machine.step(here()), []);
    let _ = machine.step(Event::WentOn);
    assert!(machine.takes(Resolution::Here) && !machine.takes(Resolution::There));
    assert_eq!(machine.step(Event::Resolve(Resolution::There)), []);
    let mut in_conflict = machine.clone();
    let settles = [Action::Forget, send(ToDestination::Unknown)];
    assert_eq!(machine.step(here()), settles);
    assert!(machine.has_ended() && machine.wait().is_none());
    // It comes back anyway.
    assert_eq!(machine.step(received(ToSource::Loaded)), [send(ToDestination::Unknown)]);
    assert_eq!(machine.step(here()), []);

    // The copy there was ended by its owner, which the destination does not report.
    let _ = in_conflict.step(received(ToSource::Running));
    assert_eq!(in_conflict.doubt(), Some(&Doubt::RunsThereToo));
    assert_eq!(in_conflict.step(here()), settles);
    assert!(in_conflict.doubt().is_none());
    assert_eq!(in_conflict.step(Event::JournalFailed { reason: reason() }), []);
    assert!(!in_conflict.has_ended());
    assert_eq!(in_conflict.step(Event::Timeout), settles, "it is removed later");
}

#[test]
fn the_operator_decides_only_what_is_in_doubt() {
    for resolution in [Resolution::Here, Resolution::There] {
        let mut machine = after([Event::Stopped { run: true }]);
        assert!(!machine.takes(resolution));
        assert_eq!(machine.step(Event::Resolve(resolution)), []);
    }
    let noted = Noted { phase: Phase::Committed, run: true };
    let (machine, _) = Machine::restart(id(), noted, Found::Missing);
    assert!(!machine.takes(Resolution::Here), "there is nothing here");
}

#[test]
fn a_commit_that_is_not_written_is_aborted() {
    let mut machine = committed();
    let actions = machine.step(Event::JournalFailed { reason: reason() });
    let aborted = Action::Journal(Record::Aborted { reason: reason() });
    let said = send(ToDestination::Aborted { reason: reason() });
    assert_eq!(actions, [aborted, go_on(), said.clone()]);
    // If that fails too, `committed` may be on disk, so the VM must not continue yet.
    let doubt = Action::KeepInDoubt(Doubt::CannotNote { reason: reason() });
    assert_eq!(machine.step(Event::JournalFailed { reason: reason() }), [said, doubt]);
    assert_eq!(machine.step(Event::Timeout).len(), 3, "it tries again");
    let _ = machine.step(Event::JournalFailed { reason: reason() });
    // The VM can't run there any more, whatever is on disk.
    assert_eq!(machine.step(received(ToSource::Refused { reason: reason() })), [go_on()]);
}

#[test]
fn a_full_disk_before_the_commit_does_not_keep_the_vm_from_going_on() {
    let mut machine = after([Event::Stopped { run: true }]);
    let _ = machine.step(Event::Timeout);
    let actions = machine.step(Event::JournalFailed { reason: reason() });
    assert_eq!(actions[0], go_on());
}

#[test]
fn a_late_journal_failure_does_not_undo_the_commit() {
    let mut machine = committed();
    let _ = machine.step(Event::Timeout);
    assert_eq!(machine.step(Event::JournalFailed { reason: reason() }), []);
    assert!(machine.is_committed());
}

#[test]
fn a_qemu_that_ends_after_completion_does_not_stop_the_switchover() {
    let mut machine = after([Event::Stopped { run: true }, Event::Completed, Event::QemuExited]);
    assert_eq!(machine.step(received(ToSource::Loaded))[1], go());
    assert_eq!(machine.step(received(ToSource::Running)), forgets(Outcome::Moved));
    let mut machine = after([Event::Stopped { run: true }]);
    let lost = Outcome::Lost { reason: "its QEMU ended".into() };
    assert_eq!(machine.step(Event::QemuExited), forgets(lost));
}

#[test]
fn another_migrations_messages_are_not_for_it() {
    let other = MigrationId::new("m2").unwrap();
    for message in [ToSource::Loaded, ToSource::Running, ToSource::Unknown] {
        let mut machine = committed();
        let said = Envelope { migration: other.clone(), message };
        assert_eq!(machine.step(Event::Received(said)), []);
        assert!(machine.is_committed());
    }
}

#[test]
fn a_restart_goes_on_where_it_was() {
    let aborts = |actions: &[Action]| {
        matches!(actions[0], Action::Journal(Record::Aborted { .. })) && actions[1] == go_on()
    };
    let restart = |phase, found| Machine::restart(id(), Noted { phase, run: true }, found).1;
    assert!(aborts(&restart(Phase::Opened, Found::Runs)));
    assert!(aborts(&restart(Phase::Stopped, Found::Stopped)));
    let unanswered = Action::KeepInDoubt(Doubt::Unanswered);
    assert_eq!(restart(Phase::Committed, Found::Stopped), [go(), unanswered.clone()]);
    assert_eq!(restart(Phase::Committed, Found::Missing), [go(), unanswered]);
    let runs = Action::KeepInDoubt(Doubt::RunsHere);
    assert_eq!(restart(Phase::Committed, Found::Runs), [go(), runs]);
    assert_eq!(restart(Phase::Aborted, Found::Stopped), [go_on()]);
    assert_eq!(restart(Phase::Reclaimed(By::Destination), Found::Stopped), [go_on()]);
    assert_eq!(restart(Phase::Reclaimed(By::Operator), Found::Stopped), [go_on()]);
    let both = Action::KeepInDoubt(Doubt::RunsThereToo);
    assert_eq!(restart(Phase::RunsThereToo, Found::Stopped), [both]);
    let said = send(ToDestination::Aborted { reason: "the agent was restarted".into() });
    assert_eq!(restart(Phase::RunsThereToo, Found::Runs), [said]);
    let lost =
        || Outcome::Lost { reason: "its QEMU had exited when the agent was restarted".into() };
    assert_eq!(restart(Phase::Stopped, Found::Missing), forgets(lost()));
    assert_eq!(restart(Phase::Dropped, Found::Stopped), [Action::QemuQuit]);
    assert_eq!(restart(Phase::Dropped, Found::Missing), [go()]);
}
