//! The source's side: it has the VM until it gives it up, once.

mod effects;
mod noted;
mod received;
mod restarted;
#[cfg(test)]
mod tests;

use crate::doubt::Doubt;
use crate::message::{Envelope, ToDestination, ToSource};
use crate::migration_id::MigrationId;
use crate::reason::Reason;
use crate::{Resolution, Wait};

pub use effects::Effects;
pub use noted::{By, Noted, Phase, Record};

/// The source's machine with its journal.
pub type Driver = crate::Driver<Machine>;

/// An event.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// QEMU has stopped the VM to finish its migration.
    Stopped {
        /// Whether the VM ran before.
        run: bool,
    },
    /// The owner wants the VM to run or to be paused, which can change while it moves. Repeating it
    /// changes nothing.
    ByOwner {
        /// Whether the VM is to run.
        run: bool,
    },
    /// QEMU reports `completed` and `postmigrate`: it has released the VM, and never runs it again
    /// by itself.
    Completed,
    /// QEMU's migration ended otherwise (and then it runs the VM again by itself), or has not ended
    /// in time.
    NotCompleted {
        /// QEMU's error.
        reason: Reason,
    },
    /// The destination sent a message.
    Received(Envelope<ToSource>),
    /// The control connection has ended.
    ConnectionLost {
        /// Why it ended.
        reason: Reason,
    },
    /// Something else went wrong, or the operator cancels.
    GiveUp {
        /// What went wrong.
        reason: Reason,
    },
    /// The wait of [`Machine::wait`] has timed out.
    Timeout,
    /// The VM continues, as [`Action::QemuGoOn`] requested.
    WentOn,
    /// QEMU does not let the VM continue.
    CannotGoOn {
        /// QEMU's error.
        reason: Reason,
    },
    /// QEMU's process has ended, for whatever reason.
    QemuExited,
    /// The [`Action::Journal`] or [`Action::Forget`] of the last step failed, and the actions after
    /// it were not done. The record may be on disk or not.
    JournalFailed {
        /// The system's error.
        reason: Reason,
    },
    /// The operator has decided.
    Resolve(Resolution),
}

/// An action. A step's actions are done in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Write the record, and continue when it is on disk. If that fails, drop the rest of this step
    /// and step with [`Event::JournalFailed`].
    Journal(Record),
    /// Write the record without waiting for it; this may fail.
    Note(Record),
    /// Remove the journal, durably. A failure is handled as that of a record.
    Forget,
    /// Send the message over any connection to the destination. It may be lost.
    Send(Envelope<ToDestination>),
    /// Wait until QEMU reports how its migration ended. Results in [`Event::Completed`],
    /// [`Event::NotCompleted`] or [`Event::QemuExited`].
    QemuAwaitCompleted,
    /// End QEMU's migration in whatever state it is; let the VM continue and announce itself, if
    /// `run`; restore QEMU's settings. Results in [`Event::WentOn`], [`Event::CannotGoOn`] or
    /// [`Event::QemuExited`]. Repeating it is harmless.
    QemuGoOn {
        /// Whether the VM ran.
        run: bool,
    },
    /// End QEMU. Results in [`Event::QemuExited`], or nothing if it doesn't end.
    QemuQuit,
    /// Show the operator what this side can't know or do.
    KeepInDoubt(Doubt),
    /// The VM's fate is decided. The machine may still have to inform the other side, until
    /// [`Machine::has_ended`].
    Done(Outcome),
}

/// The VM's fate.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It is the destination's.
    Moved,
    /// It stays here, and continues.
    Stays {
        /// Why it did not move.
        reason: Reason,
    },
    /// It died with its QEMU.
    Lost {
        /// How it died.
        reason: Reason,
    },
}

/// The copy of the VM on this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Copy {
    /// Its QEMU holds it. Once the VM was given up, QEMU does not run it.
    Kept,
    /// The VM was given up, but runs: something else sent `cont` to its QEMU.
    Runs,
    /// Its QEMU has ended.
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    /// The VM is this side's. QEMU streams it, or has stopped it.
    Ours { stopped: bool, loaded: bool, completed: bool },
    /// The VM was given up.
    Committed,
    /// The VM was given up, and the operator has given up the copy here too.
    Dropped,
    /// The VM was not released, and continues here. `risky`: `committed` may be on disk anyway,
    /// until `aborted` is.
    Aborting { risky: bool },
    /// The destination refused the VM, so it continues here.
    Reclaiming,
    /// The operator took the VM back, so it continues here.
    TakingBack,
    /// The operator took the VM back, and it continued here. The destination may not know.
    TakenBack,
    /// The destination has the VM: QEMU ends here.
    Leaving,
    /// The operator gave the VM away: QEMU ends here.
    Dropping,
    /// Only removing the journal is left.
    Forgetting,
    /// Nothing is left to do.
    Over,
}

/// The source of one migration, from the moment its journal is opened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Machine {
    id: MigrationId,
    run: bool,
    state: State,
    copy: Copy,
    reason: Reason,
    doubt: Option<Doubt>,
    /// Whether the last step wrote to the journal.
    wrote: bool,
}

impl Machine {
    /// A machine for a new migration; `run` tells whether the VM runs.
    #[must_use]
    pub fn new(id: MigrationId, run: bool) -> Self {
        let state = State::Ours { stopped: false, loaded: false, completed: false };
        let (copy, reason) = (Copy::Kept, Reason::default());
        Self { id, run, state, copy, reason, doubt: None, wrote: false }
    }

    /// The actions that follow from an event.
    #[must_use = "what a machine wants done must be done"]
    pub fn step(&mut self, event: Event) -> Vec<Action> {
        let wrote = std::mem::take(&mut self.wrote);
        let actions = match event {
            Event::Received(said) if said.migration != self.id => Vec::new(),
            Event::Received(said) => self.received(said.message),
            Event::JournalFailed { reason } if wrote => self.unwritten(reason),
            Event::JournalFailed { .. } => Vec::new(),
            Event::Resolve(resolution) => self.resolved(resolution),
            Event::QemuExited => self.qemu_exited(),
            Event::WentOn => self.went_on(),
            Event::CannotGoOn { reason } => self.cannot_go_on(reason),
            Event::Timeout => self.late(),
            event => self.before_commit(event),
        };
        self.wrote = writes(&actions);
        actions
    }

    /// What the machine waits for.
    #[must_use]
    pub fn wait(&self) -> Option<Wait> {
        match self.state {
            State::Ours { stopped, .. } => stopped.then_some(Wait::Peer),
            State::Committed => Some(Wait::Answer),
            State::Dropped | State::TakenBack => Some(Wait::Settled),
            State::Over => None,
            _ => Some(Wait::Retry),
        }
    }

    /// What this side can't know or do at the moment.
    #[must_use]
    pub fn doubt(&self) -> Option<&Doubt> {
        self.doubt.as_ref()
    }

    /// Whether nothing is left to do, and the journal is removed.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.state == State::Over
    }

    /// Whether the VM was given up, and not taken back.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        use State::{Committed, Dropped, Dropping, Leaving};
        matches!(self.state, Committed | Dropped | Dropping | Leaving)
    }

    /// Whether an operator's decision would change anything.
    #[must_use]
    pub fn takes(&self, resolution: Resolution) -> bool {
        match (self.state, resolution) {
            (State::Committed, Resolution::Here) => self.copy != Copy::Dead,
            // A VM that was taken back: the destination is waited for no longer.
            (State::Committed, Resolution::There) | (State::TakenBack, Resolution::Here) => true,
            // A VM that is not tried any more, because it runs there.
            (State::TakingBack, _) => self.doubt == Some(Doubt::RunsThereToo),
            _ => false,
        }
    }

    /// Handles QEMU's events, and those that end a migration before its commit. After the commit,
    /// none of them matters.
    fn before_commit(&mut self, event: Event) -> Vec<Action> {
        let State::Ours { stopped, completed, .. } = &mut self.state else {
            return match (event, self.state) {
                (Event::ConnectionLost { .. }, State::Committed) => vec![self.go()],
                _ => Vec::new(),
            };
        };
        match event {
            Event::Stopped { run } if !*stopped => {
                *stopped = true;
                self.run = run;
                vec![Action::Note(Record::Stopped { run })]
            }
            Event::ByOwner { run } if run != self.run => {
                self.run = run;
                vec![Action::Note(Record::Stopped { run })]
            }
            Event::Completed => {
                (*stopped, *completed) = (true, true);
                self.commit_if_ready()
            }
            Event::NotCompleted { reason }
            | Event::ConnectionLost { reason }
            | Event::GiveUp { reason } => self.abort(reason),
            _ => Vec::new(),
        }
    }

    /// Commits, which is the point of no return, if both QEMUs are ready.
    fn commit_if_ready(&mut self) -> Vec<Action> {
        match self.state {
            State::Ours { loaded: true, completed: true, .. } => {
                self.state = State::Committed;
                self.doubt = None;
                vec![Action::Journal(Record::Committed { run: self.run }), self.go()]
            }
            State::Ours { loaded: true, .. } => vec![Action::QemuAwaitCompleted],
            _ => Vec::new(),
        }
    }

    /// Keeps the VM. `aborted` is on disk before the VM continues. The VM continues before the
    /// destination is notified, because the destination may read slowly, or not at all.
    fn abort(&mut self, reason: Reason) -> Vec<Action> {
        self.reason = reason;
        if self.copy == Copy::Dead {
            return self.died();
        }
        self.state = State::Aborting { risky: false };
        self.write_aborted()
    }

    fn write_aborted(&self) -> Vec<Action> {
        let record = Record::Aborted { reason: self.reason.clone() };
        vec![Action::Journal(record), Action::QemuGoOn { run: self.run }, self.send_aborted()]
    }

    fn unwritten(&mut self, reason: Reason) -> Vec<Action> {
        match self.state {
            // The destination has the only copy, and was not ordered to run it: try again later.
            State::Committed if self.copy == Copy::Dead => {
                self.state = State::Ours { stopped: true, loaded: true, completed: true };
                self.doubting(Doubt::CannotNote { reason }, Vec::new())
            }
            // `go` was not sent, but the record may be on disk, and an agent that reads it would
            // send `go`. So the VM waits here until `aborted` is on disk, or the destination
            // has refused.
            State::Committed => {
                self.reason = reason;
                self.state = State::Aborting { risky: true };
                self.write_aborted()
            }
            State::Aborting { risky: true } => {
                let said = self.send_aborted();
                self.doubting(Doubt::CannotNote { reason }, vec![said])
            }
            // Without the record, a restart aborts too.
            State::Aborting { risky: false } => {
                vec![Action::QemuGoOn { run: self.run }, self.send_aborted()]
            }
            State::Reclaiming | State::TakingBack | State::Dropping | State::Dropped => {
                self.state = State::Committed;
                self.doubting(Doubt::CannotNote { reason }, Vec::new())
            }
            State::Over => {
                self.state = State::Forgetting;
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    fn late(&mut self) -> Vec<Action> {
        let go_on = Action::QemuGoOn { run: self.run };
        match self.state {
            State::Ours { completed: true, loaded: true, .. } if self.copy == Copy::Dead => {
                self.commit_if_ready()
            }
            State::Ours { .. } => self.abort(Reason::new("the destination did not answer in time")),
            State::Committed if self.doubt.is_none() => {
                let go = self.go();
                self.doubting(Doubt::Unanswered, vec![go])
            }
            State::Committed | State::Dropped => vec![self.go()],
            State::Aborting { risky: true } => self.write_aborted(),
            // QEMU refused while the other copy had the disks, and would not once that has ended,
            // on disks that it has changed. Only an operator knows whether it is to continue then.
            State::TakingBack if self.doubt == Some(Doubt::RunsThereToo) => Vec::new(),
            State::Aborting { .. } | State::Reclaiming | State::TakingBack => vec![go_on],
            State::TakenBack => vec![self.send_aborted()],
            State::Leaving | State::Dropping => vec![Action::QemuQuit],
            State::Forgetting => self.forget(Vec::new()),
            State::Over => Vec::new(),
        }
    }

    fn go(&self) -> Action {
        self.send(ToDestination::Go { run: self.run })
    }

    fn send_aborted(&self) -> Action {
        self.send(ToDestination::Aborted { reason: self.reason.clone() })
    }

    fn send(&self, message: ToDestination) -> Action {
        Action::Send(Envelope { migration: self.id.clone(), message })
    }

    fn doubting(&mut self, doubt: Doubt, mut actions: Vec<Action>) -> Vec<Action> {
        if self.doubt.as_ref() != Some(&doubt) {
            self.doubt = Some(doubt.clone());
            actions.push(Action::KeepInDoubt(doubt));
        }
        actions
    }

    /// The last step: from now on the agent answers without a journal.
    fn forget(&mut self, mut actions: Vec<Action>) -> Vec<Action> {
        self.state = State::Over;
        self.doubt = None;
        actions.extend([Action::Forget, self.send(ToDestination::Unknown)]);
        actions
    }
}

fn writes(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::Journal(_) | Action::Forget))
}
