//! The destination's side: it gets the VM when the source says so, and decides
//! nothing by itself before that.

mod driver;
mod heard;
mod noted;
mod restarted;
#[cfg(test)]
mod tests;

use crate::doubt::Doubt;
use crate::message::{Envelope, ToDestination, ToSource};
use crate::migration_id::MigrationId;
use crate::reason::Reason;
use crate::{Resolution, Wait};

pub use driver::{Driver, Effects};
pub use noted::{Noted, Record};

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// QEMU has loaded the VM, and is paused.
    Loaded,
    /// The source said something.
    Heard(Envelope<ToDestination>),
    /// The control connection has ended.
    ConnectionLost {
        /// How.
        reason: Reason,
    },
    /// Something else went wrong before QEMU has loaded the VM.
    GiveUp {
        /// What.
        reason: Reason,
    },
    /// What [`Machine::wait`] waits for did not happen in time.
    Timeout,
    /// As [`Action::QemuCont`] wanted it.
    Runs,
    /// QEMU does not run the VM.
    ContFailed {
        /// QEMU's words.
        reason: Reason,
        /// QEMU itself refused, so the VM never ran, not even briefly. A
        /// missing answer proves nothing.
        never_ran: bool,
    },
    /// QEMU's process has ended, whoever ended it.
    QemuGone,
    /// The VM was shut down here, or moves on, as its owner wants. Sent before
    /// its QEMU ends for that.
    Left,
    /// The [`Action::Journal`] or [`Action::Forget`] of the last step failed,
    /// and what came behind it was not done. The record may be on disk or not.
    JournalFailed {
        /// The system's words.
        reason: Reason,
    },
    /// The operator decided.
    Resolve(Resolution),
}

/// What to do, one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Write it, and go on when it is on disk. If that fails, drop the rest of
    /// this step and step with [`Event::JournalFailed`].
    Journal(Record),
    /// Remove the journal, durably; if that fails, as with a record.
    Forget,
    /// Send it, over whatever connection there is. It may be lost.
    Say(Envelope<ToSource>),
    /// Run the VM: [`Event::Runs`], [`Event::ContFailed`] or
    /// [`Event::QemuGone`]. Doing it to a VM that runs is [`Event::Runs`].
    QemuCont,
    /// Tell the network where the VM is, if it runs, and put QEMU's settings
    /// back.
    QemuSettle,
    /// Kill QEMU: [`Event::QemuGone`] once its process is gone, or nothing if
    /// it doesn't end.
    QemuKill,
    /// Show the operator what can't be known or done.
    KeepInDoubt(Doubt),
    /// It is decided what became of the VM. The machine may still have to see
    /// to the other side, until [`Machine::is_over`].
    Done(Outcome),
}

/// What became of the VM.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It is here.
    Here,
    /// It did not come, and never ran here.
    NotHere {
        /// Why.
        reason: Reason,
    },
    /// It was here, or may have been, and died.
    Lost {
        /// How.
        reason: Reason,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    /// QEMU waits for the VM, or loads it.
    Arriving,
    /// The VM is loaded; whose it is, the source knows.
    Loaded,
    /// The VM is to run here. With `fresh`, on the word of a source that keeps
    /// its copy until it hears, and it certainly has not run yet: so it may
    /// still be refused.
    Starting { fresh: bool },
    /// The VM is here. The source may not know.
    Running,
    /// As `Running`, and what becomes of the VM is its owner's matter.
    Left,
    /// The VM doesn't come: QEMU ends. `known` if the source may ask.
    Ending { known: bool },
    /// The VM never ran here and never will. The source may not know.
    Refused,
    /// The VM ran here, or may have, and died. The source may not know.
    Lost,
    /// Nothing is left to do but to remove the journal.
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
    /// The last step wanted something written.
    wrote: bool,
    /// What is in the journal is what the state says.
    noted: bool,
}

impl Machine {
    /// A migration that begins.
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

    /// What is to be done, now that this has happened.
    #[must_use = "what a machine wants done must be done"]
    pub fn step(&mut self, event: Event) -> Vec<Action> {
        let wrote = std::mem::take(&mut self.wrote);
        let actions = match event {
            Event::Heard(said) if said.migration != self.id => Vec::new(),
            Event::Heard(said) => self.heard(said.message),
            Event::JournalFailed { reason } if wrote => self.unwritten(reason),
            Event::Loaded => self.loaded(),
            Event::ConnectionLost { reason } => self.cut_off(reason),
            Event::GiveUp { reason } if self.state == State::Arriving => self.end(reason),
            Event::JournalFailed { .. } | Event::GiveUp { .. } => Vec::new(),
            Event::Timeout => self.late(),
            Event::Runs => self.runs(),
            Event::ContFailed { reason, never_ran } => self.cont_failed(reason, never_ran),
            Event::QemuGone => self.qemu_gone(),
            Event::Left => self.left(),
            Event::Resolve(resolution) => self.resolved(resolution),
        };
        self.wrote = writes(&actions);
        actions
    }

    /// What it waits for.
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

    /// What can't be known or done just now.
    #[must_use]
    pub fn doubt(&self) -> Option<&Doubt> {
        self.doubt.as_ref()
    }

    /// Nothing is left to do, and the journal is gone.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// The VM is this side's.
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
        vec![Action::Journal(Record::Loaded), self.say(ToSource::Loaded)]
    }

    fn cut_off(&mut self, reason: Reason) -> Vec<Action> {
        match self.state {
            State::Arriving => self.end(reason),
            State::Loaded => vec![self.say(ToSource::Loaded)],
            _ => Vec::new(),
        }
    }

    /// The VM is written down as to be run, and run. What is not on disk
    /// before may not be denied after: a journal without this record is the
    /// proof that the VM never ran here.
    fn start(&mut self, fresh: bool) -> Vec<Action> {
        self.state = State::Starting { fresh };
        self.doubt = None;
        vec![Action::Journal(Record::Starting), Action::QemuCont]
    }

    /// The VM doesn't come, and its QEMU ends. First that is written down, so
    /// that a restart between the two has no doubt that the VM never ran.
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
            // The source has not heard of it.
            State::Loaded => {
                self.state = State::Arriving;
                self.end(reason)
            }
            State::Starting { fresh: true } => self.end(reason),
            // The operator's word, or an earlier run's: nobody keeps another
            // copy for us. Try again.
            State::Starting { fresh: false } => {
                self.state = State::Loaded;
                self.doubting(Doubt::CannotNote { reason }, Vec::new())
            }
            // `starting` is on disk: a restart finds the VM running, or lost.
            State::Running if self.run => vec![self.say(ToSource::Running)],
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
                vec![self.say_refused()]
            }
            State::Lost => vec![self.say_lost()],
            State::Over => {
                self.state = State::Forgetting;
                Vec::new()
            }
            State::Arriving | State::Left | State::Forgetting => Vec::new(),
        }
    }

    fn late(&mut self) -> Vec<Action> {
        match self.state {
            State::Arriving => self.end(Reason::new("the VM did not come in time")),
            State::Loaded => {
                let said = self.say(ToSource::Loaded);
                match self.doubt {
                    None => self.doubting(Doubt::NoVerdict, vec![said]),
                    Some(_) => vec![said],
                }
            }
            State::Starting { .. } => vec![Action::QemuCont],
            State::Running | State::Left => vec![self.say(ToSource::Running)],
            State::Ending { .. } => vec![Action::QemuKill],
            State::Refused if self.noted => vec![self.say_refused()],
            State::Refused => {
                self.noted = true;
                vec![self.refused_record(), self.say_refused()]
            }
            State::Lost => vec![self.say_lost()],
            State::Forgetting => self.forget(),
            State::Over => Vec::new(),
        }
    }

    fn refused_record(&self) -> Action {
        Action::Journal(Record::Refused { reason: self.reason.clone() })
    }

    fn say_refused(&self) -> Action {
        self.say(ToSource::Refused { reason: self.reason.clone() })
    }

    fn say_lost(&self) -> Action {
        self.say(ToSource::Lost { reason: self.reason.clone() })
    }

    fn say(&self, message: ToSource) -> Action {
        Action::Say(Envelope { migration: self.id.clone(), message })
    }

    fn doubting(&mut self, doubt: Doubt, mut actions: Vec<Action>) -> Vec<Action> {
        if self.doubt.as_ref() != Some(&doubt) {
            self.doubt = Some(doubt.clone());
            actions.push(Action::KeepInDoubt(doubt));
        }
        actions
    }

    /// The last step: from now on an agent without a journal answers.
    fn forget(&mut self) -> Vec<Action> {
        self.state = State::Over;
        self.doubt = None;
        vec![Action::Forget]
    }
}

fn writes(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::Journal(_) | Action::Forget))
}
