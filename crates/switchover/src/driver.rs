//! Joins a machine and its journal, for a blocking thread. Both sides have the same: that a record
//! is on disk before anything acts on it is decided here, once.

use crate::Found;
use crate::journal::{Journal, Keeps, Opened, Reopened};
use crate::migration_id::MigrationId;
use crate::reason::Reason;

/// The state machine of a side, for its driver.
pub trait Machine: Sized {
    /// What happens.
    type Event;
    /// What follows from it.
    type Action;
    /// What the journal keeps.
    type Record: Keeps;

    /// A machine for a new migration.
    fn of(opened: &Opened) -> Self;

    /// A machine after a restart of the agent, and its first actions.
    fn restart(
        id: MigrationId,
        noted: <Self::Record as Keeps>::Noted,
        found: Found,
    ) -> (Self, Vec<Self::Action>);

    /// The actions that follow from an event.
    fn step(&mut self, event: Self::Event) -> Vec<Self::Action>;

    /// The event if an action is not on disk.
    fn journal_failed(reason: Reason) -> Self::Event;
}

/// A machine whose actions can be performed by these effects.
pub trait Performs<E>: Machine {
    /// Performs an action; its result may be the next event.
    ///
    /// # Errors
    /// If it is not on disk: the actions after it must not be performed.
    fn perform(
        journal: &mut Journal<Self::Record>,
        action: Self::Action,
        effects: &mut E,
    ) -> Result<Option<Self::Event>, Reason>;
}

/// A machine with its journal: every step is on disk before its consequences are carried out.
#[derive(Debug)]
pub struct Driver<M: Machine> {
    machine: M,
    journal: Journal<M::Record>,
}

impl<M: Machine> Driver<M> {
    /// A driver for a new migration.
    #[must_use]
    pub fn new(journal: Journal<M::Record>) -> Self {
        Self { machine: M::of(journal.opened()), journal }
    }

    /// A driver for a migration that an earlier run of the agent left.
    pub fn restart<E>(kept: Reopened<M::Record>, found: Found, effects: &mut E) -> Self
    where
        M: Performs<E>,
    {
        let found = if kept.same_boot { found } else { Found::Missing };
        let id = kept.journal.opened().migration.clone();
        let (machine, actions) = M::restart(id, kept.noted(), found);
        let mut driver = Self { machine, journal: kept.journal };
        driver.perform(actions, effects);
        driver
    }

    /// Passes an event to the machine, and performs its actions.
    pub fn step<E>(&mut self, event: M::Event, effects: &mut E)
    where
        M: Performs<E>,
    {
        let actions = self.machine.step(event);
        self.perform(actions, effects);
    }

    /// The machine.
    #[must_use]
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// The journal.
    #[must_use]
    pub fn journal(&self) -> &Journal<M::Record> {
        &self.journal
    }

    fn perform<E>(&mut self, mut actions: Vec<M::Action>, effects: &mut E)
    where
        M: Performs<E>,
    {
        while let Some(event) = self.perform_step(actions, effects) {
            actions = self.machine.step(event);
        }
    }

    /// Performs one step. The result of its last action is the next event.
    fn perform_step<E>(&mut self, actions: Vec<M::Action>, effects: &mut E) -> Option<M::Event>
    where
        M: Performs<E>,
    {
        let mut outcome = None;
        for action in actions {
            match M::perform(&mut self.journal, action, effects) {
                Ok(event) => outcome = event.or(outcome),
                Err(reason) => return Some(M::journal_failed(reason)),
            }
        }
        outcome
    }
}
