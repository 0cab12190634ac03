//! Joins the source's machine and its journal, for a blocking thread.

use super::{Action, Event, Machine, Outcome, Record};
use crate::Found;
use crate::doubt::Doubt;
use crate::journal::{Journal, Reopened};
use crate::message::{Envelope, ToDestination};

/// The operations that a source's driver needs. Every method may block.
pub trait Effects {
    /// See [`Action::Say`].
    fn say(&mut self, said: &Envelope<ToDestination>);
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
        let opened = journal.opened();
        Self { machine: Machine::new(opened.migration.clone(), opened.run), journal }
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
                Action::Journal(record) => self.journal.append(&record),
                Action::Forget => self.journal.forget(),
                Action::Note(record) => {
                    let _ = self.journal.note(&record);
                    Ok(())
                }
                action => {
                    outcome = perform_one(action, effects).or(outcome);
                    Ok(())
                }
            };
            if let Err(error) = written {
                return Some(Event::JournalFailed { reason: error.to_string().into() });
            }
        }
        outcome
    }
}

fn perform_one(action: Action, effects: &mut impl Effects) -> Option<Event> {
    match action {
        Action::Say(said) => effects.say(&said),
        Action::KeepInDoubt(doubt) => effects.in_doubt(&doubt),
        Action::Done(outcome) => effects.done(outcome),
        Action::QemuAwaitCompleted => return Some(effects.await_completed()),
        Action::QemuGoOn { run } => return Some(effects.go_on(run)),
        Action::QemuQuit => return effects.quit().then_some(Event::QemuExited),
        Action::Journal(_) | Action::Note(_) | Action::Forget => {}
    }
    None
}
