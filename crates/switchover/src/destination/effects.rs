//! The effects of the destination's actions.

use super::{Action, Event, Machine, Noted, Outcome, Record};
use crate::Found;
use crate::doubt::Doubt;
use crate::driver::{self, Performs};
use crate::journal::{Journal, Opened};
use crate::message::{Envelope, ToSource};
use crate::migration_id::MigrationId;
use crate::reason::Reason;

/// The operations that a destination's driver needs. Every method may block.
pub trait Effects {
    /// See [`Action::Send`].
    fn send(&mut self, said: &Envelope<ToSource>);
    /// See [`Action::QemuCont`].
    fn cont(&mut self) -> Event;
    /// See [`Action::QemuSettle`].
    fn settle(&mut self);
    /// Whether QEMU's process has ended: see [`Action::QemuKill`].
    fn kill(&mut self) -> bool;
    /// See [`Action::KeepInDoubt`].
    fn in_doubt(&mut self, doubt: &Doubt);
    /// See [`Action::Done`].
    fn done(&mut self, outcome: Outcome);
    /// Makes sure that the VM's fate is on disk elsewhere, so that the journal may be removed. If
    /// it is not, this is called again later.
    ///
    /// # Errors
    /// The reason why it is not.
    fn noted(&mut self) -> Result<(), Reason>;
}

impl driver::Machine for Machine {
    type Event = Event;
    type Action = Action;
    type Record = Record;

    fn of(opened: &Opened) -> Self {
        Self::new(opened.migration.clone())
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
            // Without the journal, there would be no record that the VM is here.
            Action::Forget => {
                effects.noted()?;
                journal.forget()?;
            }
            Action::Send(said) => effects.send(&said),
            Action::QemuSettle => effects.settle(),
            Action::KeepInDoubt(doubt) => effects.in_doubt(&doubt),
            Action::Done(outcome) => effects.done(outcome),
            Action::QemuCont => return Ok(Some(effects.cont())),
            Action::QemuKill => return Ok(effects.kill().then_some(Event::QemuExited)),
        }
        Ok(None)
    }
}
