//! Joins the destination's machine and its journal, for a blocking thread.

use super::{Action, Event, Machine, Outcome, Record};
use crate::Found;
use crate::doubt::Doubt;
use crate::journal::{Journal, JournalError, Reopened};
use crate::message::{Envelope, ToSource};
use crate::reason::Reason;

/// The operations that a destination's driver needs. Every method may block.
pub trait Effects {
    /// See [`Action::Say`].
    fn say(&mut self, said: &Envelope<ToSource>);
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

/// A machine with its journal: every step is on disk before its consequences are carried out.
#[derive(Debug)]
pub struct Driver {
    machine: Machine,
    journal: Journal<Record>,
}

impl Driver {
    /// A driver for a new migration.
    #[must_use]
    pub fn new(journal: Journal<Record>) -> Self {
        Self { machine: Machine::new(journal.opened().migration.clone()), journal }
    }

    /// A driver for a migration that an earlier run of the agent left.
    pub fn restart(kept: Reopened<Record>, found: Found, effects: &mut impl Effects) -> Self {
        let found = if kept.same_boot { found } else { Found::Missing };
        let id = kept.journal.opened().migration.clone();
        let (machine, actions) = Machine::restart(id, kept.noted(), found);
        let mut driver = Self { machine, journal: kept.journal };
        driver.perform(actions, effects);
        driver
    }

    /// Passes an event to the machine, and performs its actions.
    pub fn step(&mut self, event: Event, effects: &mut impl Effects) {
        let actions = self.machine.step(event);
        self.perform(actions, effects);
    }

    /// The machine.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The journal.
    #[must_use]
    pub fn journal(&self) -> &Journal<Record> {
        &self.journal
    }

    fn perform(&mut self, mut actions: Vec<Action>, effects: &mut impl Effects) {
        while let Some(event) = self.perform_step(actions, effects) {
            actions = self.machine.step(event);
        }
    }

    /// Performs one step. The result of its last action is the next event.
    fn perform_step(&mut self, actions: Vec<Action>, effects: &mut impl Effects) -> Option<Event> {
        let mut outcome = None;
        for action in actions {
            let written = match action {
                Action::Journal(record) => self.journal.append(&record).map_err(worded),
                // Without the journal, there would be no record that the VM is here.
                Action::Forget => {
                    effects.noted().and_then(|()| self.journal.forget().map_err(worded))
                }
                Action::Note(record) => {
                    let _ = self.journal.note(&record);
                    Ok(())
                }
                action => {
                    outcome = perform_one(action, effects).or(outcome);
                    Ok(())
                }
            };
            if let Err(reason) = written {
                return Some(Event::JournalFailed { reason });
            }
        }
        outcome
    }
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn worded(error: JournalError) -> Reason {
    error.to_string().into()
}

fn perform_one(action: Action, effects: &mut impl Effects) -> Option<Event> {
    match action {
        Action::Say(said) => effects.say(&said),
        Action::QemuSettle => effects.settle(),
        Action::KeepInDoubt(doubt) => effects.in_doubt(&doubt),
        Action::Done(outcome) => effects.done(outcome),
        Action::QemuCont => return Some(effects.cont()),
        Action::QemuKill => return effects.kill().then_some(Event::QemuExited),
        Action::Journal(_) | Action::Note(_) | Action::Forget => {}
    }
    None
}
