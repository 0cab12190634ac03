//! The effects of the source's actions.

use super::{Action, Event, Machine, Noted, Outcome, Record};
use crate::Found;
use crate::doubt::Doubt;
use crate::driver::{self, Performs};
use crate::journal::{Journal, Opened};
use crate::message::{Envelope, ToDestination};
use crate::migration_id::MigrationId;
use crate::reason::Reason;

/// The operations that a source's driver needs. Every method may block.
pub trait Effects {
    /// See [`Action::Send`].
    fn send(&mut self, said: &Envelope<ToDestination>);
    /// See [`Action::QemuAwaitCompleted`].
    fn await_completed(&mut self) -> Event;
    /// See [`Action::QemuGoOn`].
    fn go_on(&mut self, run: bool) -> Event;
    /// Whether QEMU has ended: see [`Action::QemuQuit`].
    fn quit(&mut self) -> bool;
    /// See [`Action::KeepInDoubt`].
    fn in_doubt(&mut self, doubt: &Doubt);
    /// See [`Action::Done`].
    fn done(&mut self, outcome: Outcome);
}

impl driver::Machine for Machine {
    type Event = Event;
    type Action = Action;
    type Record = Record;

    fn of(opened: &Opened) -> Self {
        Self::new(opened.migration.clone(), opened.run)
    }

    fn restart(id: MigrationId, noted: Noted, found: Found) -> (Self, Vec<Action>) {
        Self::restart(id, noted, found)
    }

    fn step(&mut self, event: Event) -> Vec<Action> {
        self.step(event)
    }

    fn journal_failed(reason: Reason) -> Event {
        Event::JournalFailed { reason }
    }
}

impl<E: Effects> Performs<E> for Machine {
    fn perform(
        journal: &mut Journal<Record>,
        action: Action,
        effects: &mut E,
    ) -> Result<Option<Event>, Reason> {
        match action {
            Action::Journal(record) => journal.append(&record)?,
            Action::Note(record) => {
                let _ = journal.note(&record);
            }
            Action::Forget => journal.forget()?,
            Action::Send(said) => effects.send(&said),
            Action::KeepInDoubt(doubt) => effects.in_doubt(&doubt),
            Action::Done(outcome) => effects.done(outcome),
            Action::QemuAwaitCompleted => return Ok(Some(effects.await_completed())),
            Action::QemuGoOn { run } => return Ok(Some(effects.go_on(run))),
            Action::QemuQuit => return Ok(effects.quit().then_some(Event::QemuExited)),
        }
        Ok(None)
    }
}
