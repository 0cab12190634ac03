//! The destination's side: it gets the VM when the source gives it up, and decides nothing by
//! itself before that.

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
pub use noted::{Noted, Record};

/// The destination's machine with its journal.
pub type Driver = crate::Driver<Machine>;

/// An event.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// QEMU has loaded the VM, and is paused.
    Loaded,
    /// The source sent a message.
    Received(Envelope<ToDestination>),
    /// The control connection has ended.
    ConnectionLost {
        /// Why it ended.
        reason: Reason,
    },
    /// Something else went wrong before QEMU has loaded the VM.
    GiveUp {
        /// What went wrong.
        reason: Reason,
    },
    /// The wait of [`Machine::wait`] has timed out.
    Timeout,
    /// QEMU runs the VM, as [`Action::QemuCont`] requested.
    Runs,
    /// QEMU does not run the VM.
    ContFailed {
        /// QEMU's error.
        reason: Reason,
        /// QEMU itself refused, or was not ordered to, so the VM never ran, not even briefly. A
        /// missing answer proves nothing.
        never_ran: bool,
    },
    /// QEMU's process has ended, for whatever reason.
    QemuExited,
    /// The VM was shut down here, or moves on, as its owner wants. Sent before its QEMU ends for
    /// that reason.
    Left,
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
    /// Send the message over any connection to the source. It may be lost.
    Send(Envelope<ToSource>),
    /// Run the VM. Results in [`Event::Runs`], [`Event::ContFailed`] or [`Event::QemuExited`]. If the
    /// VM runs already, the result is [`Event::Runs`].
    QemuCont,
    /// Announce the VM on the network if it runs, and restore QEMU's settings.
    QemuSettle,
    /// Kill QEMU. Results in [`Event::QemuExited`] once its process has ended, or nothing if it
    /// doesn't end.
    QemuKill,
    /// Show the operator what this side can't know or do.
    KeepInDoubt(Doubt),
    /// The VM's fate is decided. The machine may still have to inform the other side, until
    /// [`Machine::has_ended`].
    Done(Outcome),
}

/// The VM's fate.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The VM is here.
    Here,
    /// The VM did not arrive, and never ran here.
    NotHere {
        /// Why.
        reason: Reason,
    },
    /// The VM was here, or may have been, and died.
    Lost {
        /// How.
        reason: Reason,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    /// QEMU waits for the VM, or loads it.
    Arriving,
    /// The VM is loaded. The source knows whose it is.
    Loaded,
    /// The VM is to run here. `fresh`: the source ordered it and keeps its copy until it receives
    /// `running`, and the VM certainly has not run yet, so it may still be refused.
    Starting { fresh: bool },
    /// The VM is here. The source may not know.
    Running,
    /// As `Running`, but the VM is in its owner's hands now.
    Left,
    /// The VM doesn't come, and QEMU ends. `known`: the source may ask about it.
    Ending { known: bool },
    /// The VM never ran here and never will. The source may not know.
    Refused,
    /// The VM ran here, or may have, and died. The source may not know.
    Lost,
    /// Only removing the journal is left.
    Forgetting,
    /// Nothing is left to do.
    Over,
}

/// The destination of one migration, from the moment its journal is opened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Machine {
    id: MigrationId,
    run: bool,
    state: State,
    reason: Reason,
    doubt: Option<Doubt>,
    /// Whether the last step wrote to the journal.
    wrote: bool,
    /// Whether the journal has the state's record.
    noted: bool,
}

impl Machine {
    /// A machine for a new migration.
    #[must_use]
    pub fn new(id: MigrationId) -> Self {
        Self {
            id,
            run: true,
            state: State::Arriving,
            reason: Reason::default(),
            doubt: None,
            wrote: false,
            noted: true,
        }
    }

    /// The actions that follow from an event.
    #[must_use = "what a machine wants done must be done"]
    pub fn step(&mut self, event: Event) -> Vec<Action> {
        let wrote = std::mem::take(&mut self.wrote);
        let actions = match event {
            Event::Received(said) if said.migration != self.id => Vec::new(),
            Event::Received(said) => self.received(said.message),
            Event::JournalFailed { reason } if wrote => self.unwritten(reason),
            Event::Loaded => self.loaded(),
            Event::ConnectionLost { reason } => self.cut_off(reason),
            Event::GiveUp { reason } if self.state == State::Arriving => self.end(reason),
            Event::JournalFailed { .. } | Event::GiveUp { .. } => Vec::new(),
            Event::Timeout => self.late(),
            Event::Runs => self.runs(),
            Event::ContFailed { reason, never_ran } => self.cont_failed(reason, never_ran),
            Event::QemuExited => self.qemu_exited(),
            Event::Left => self.left(),
            Event::Resolve(resolution) => self.resolved(resolution),
        };
        self.wrote = writes(&actions);
        actions
    }

    /// What the machine waits for.
    #[must_use]
    pub fn wait(&self) -> Option<Wait> {
        match self.state {
            State::Arriving => Some(Wait::Peer),
            State::Loaded => Some(Wait::Answer),
            State::Running | State::Left | State::Refused | State::Lost => Some(Wait::Settled),
            State::Starting { .. } | State::Ending { .. } | State::Forgetting => Some(Wait::Retry),
            State::Over => None,
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

    /// Whether the VM is this side's.
    #[must_use]
    pub fn is_here(&self) -> bool {
        matches!(self.state, State::Running | State::Left)
    }

    /// Whether an operator's decision would change anything.
    #[must_use]
    pub fn takes(&self, _: Resolution) -> bool {
        matches!(self.state, State::Loaded | State::Starting { fresh: false })
    }

    fn loaded(&mut self) -> Vec<Action> {
        if self.state != State::Arriving {
            return Vec::new();
        }
        self.state = State::Loaded;
        vec![Action::Journal(Record::Loaded), self.send(ToSource::Loaded)]
    }

    fn cut_off(&mut self, reason: Reason) -> Vec<Action> {
        match self.state {
            State::Arriving => self.end(reason),
            State::Loaded => vec![self.send(ToSource::Loaded)],
            _ => Vec::new(),
        }
    }

    /// Records that the VM is to run, and runs it. The record must be on disk first: a journal
    /// without it proves that the VM never ran here.
    fn start(&mut self, fresh: bool) -> Vec<Action> {
        self.state = State::Starting { fresh };
        self.doubt = None;
        vec![Action::Journal(Record::Starting { taken_back: false }), Action::QemuCont]
    }

    /// Ends QEMU, because the VM doesn't come. That is recorded first, so that after a restart in
    /// between there is no doubt that the VM never ran.
    fn end(&mut self, reason: Reason) -> Vec<Action> {
        let known = self.state != State::Arriving;
        self.reason = reason;
        self.state = State::Ending { known };
        self.doubt = None;
        match known {
            true => vec![self.refused_record(), Action::QemuKill],
            false => vec![Action::QemuKill],
        }
    }

    fn unwritten(&mut self, reason: Reason) -> Vec<Action> {
        match self.state {
            // The source has not been notified yet.
            State::Loaded => {
                self.state = State::Arriving;
                self.end(reason)
            }
            State::Starting { fresh: true } => self.end(reason),
            // Ordered by the operator, or in an earlier run: the source may keep no other copy for
            // us. Try again.
            State::Starting { fresh: false } => {
                self.state = State::Loaded;
                self.doubting(Doubt::CannotNote { reason }, Vec::new())
            }
            // `starting` is on disk: a restart finds the VM running, or lost.
            State::Running if self.run => vec![self.send(ToSource::Running)],
            State::Running => {
                self.state = State::Loaded;
                self.end(reason)
            }
            State::Ending { .. } => {
                self.noted = false;
                vec![Action::QemuKill]
            }
            State::Refused => {
                self.noted = false;
                vec![self.send_refused()]
            }
            State::Lost => vec![self.send_lost()],
            State::Over => {
                self.state = State::Forgetting;
                Vec::new()
            }
            State::Arriving | State::Left | State::Forgetting => Vec::new(),
        }
    }

    fn late(&mut self) -> Vec<Action> {
        match self.state {
            State::Arriving => self.end(Reason::new("the VM did not arrive in time")),
            State::Loaded => {
                let said = self.send(ToSource::Loaded);
                match self.doubt {
                    None => self.doubting(Doubt::NoVerdict, vec![said]),
                    Some(_) => vec![said],
                }
            }
            // QEMU may refuse only as long as the other copy has the disks, and later the VM would
            // run on disks that the other copy has changed.
            State::Starting { fresh: false } if self.is_taken_back() => Vec::new(),
            State::Starting { .. } => vec![Action::QemuCont],
            State::Running | State::Left => vec![self.send(ToSource::Running)],
            State::Ending { .. } => vec![Action::QemuKill],
            State::Refused if self.noted => vec![self.send_refused()],
            State::Refused => {
                self.noted = true;
                vec![self.refused_record(), self.send_refused()]
            }
            State::Lost => vec![self.send_lost()],
            State::Forgetting => self.forget(),
            State::Over => Vec::new(),
        }
    }

    fn refused_record(&self) -> Action {
        Action::Journal(Record::Refused { reason: self.reason.clone() })
    }

    fn send_refused(&self) -> Action {
        self.send(ToSource::Refused { reason: self.reason.clone() })
    }

    fn send_lost(&self) -> Action {
        self.send(ToSource::Lost { reason: self.reason.clone() })
    }

    fn send(&self, message: ToSource) -> Action {
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
    fn forget(&mut self) -> Vec<Action> {
        self.state = State::Over;
        self.doubt = None;
        vec![Action::Forget]
    }
}

fn writes(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::Journal(_) | Action::Forget))
}
