//! The destination's machine and its journal, for a thread that blocks.

use super::{Action, Event, Machine, Outcome, Record};
use crate::Found;
use crate::doubt::Doubt;
use crate::journal::{Journal, JournalError, Reopened};
use crate::message::{Envelope, ToSource};
use crate::reason::Reason;

/// What a destination's driver has done for it. Every method may block.
pub trait Effects {
    /// See [`Action::Say`].
    fn say(&mut self, said: &Envelope<ToSource>);
    /// See [`Action::QemuCont`].
    fn cont(&mut self) -> Event;
    /// See [`Action::QemuSettle`].
    fn settle(&mut self);
    /// Whether QEMU's process is gone: see [`Action::QemuKill`].
    fn kill(&mut self) -> bool;
    /// See [`Action::KeepInDoubt`].
    fn in_doubt(&mut self, doubt: &Doubt);
    /// See [`Action::Done`].
    fn done(&mut self, outcome: Outcome);
    /// Whether what became of the VM is on disk elsewhere, so that the journal may
    /// go. If not, this is asked again later; what can be done about it is tried
    /// here.
    ///
    /// # Errors
    /// With what is in the way.
    fn noted(&mut self) -> Result<(), Reason>;
}

/// A machine that keeps its journal: every step is on disk before anything
/// that follows from it is done.
#[derive(Debug)]
pub struct Driver {
    machine: Machine,
    journal: Journal<Record>,
}

impl Driver {
    /// A migration that begins.
    #[must_use]
    pub fn new(journal: Journal<Record>) -> Self {
        Self { machine: Machine::new(journal.opened().migration.clone()), journal }
    }

    /// A migration that an earlier run of the agent left.
    pub fn restart(kept: Reopened<Record>, found: Found, effects: &mut impl Effects) -> Self {
        let found = if kept.same_boot { found } else { Found::Gone };
        let id = kept.journal.opened().migration.clone();
        let (machine, actions) = Machine::restart(id, kept.noted(), found);
        let mut driver = Self { machine, journal: kept.journal };
        driver.perform(actions, effects);
        driver
    }

    /// Tells it what happened, and does what follows.
    pub fn step(&mut self, event: Event, effects: &mut impl Effects) {
        let actions = self.machine.step(event);
        self.perform(actions, effects);
    }

    /// Where it is.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// What it keeps on disk.
    #[must_use]
    pub fn journal(&self) -> &Journal<Record> {
        &self.journal
    }

    fn perform(&mut self, mut actions: Vec<Action>, effects: &mut impl Effects) {
        while let Some(event) = self.perform_step(actions, effects) {
            actions = self.machine.step(event);
        }
    }

    /// One step; what came of its last action is the next event.
    fn perform_step(&mut self, actions: Vec<Action>, effects: &mut impl Effects) -> Option<Event> {
        let mut outcome = None;
        for action in actions {
            let written = match action {
                Action::Journal(record) => self.journal.append(&record).map_err(worded),
                // Without it nothing would say that the VM is here.
                Action::Forget => {
                    effects.noted().and_then(|()| self.journal.forget().map_err(worded))
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
        Action::QemuKill => return effects.kill().then_some(Event::QemuGone),
        Action::Journal(_) | Action::Forget => {}
    }
    None
}
