//! The destination's reactions to the source's messages, to its QEMU, and to the operator's
//! decision.

use super::{Action, Machine, Outcome, Record, State};
use crate::Resolution;
use crate::doubt::Doubt;
use crate::message::{ToDestination, ToSource};
use crate::reason::{QEMU_ENDED, QEMU_ENDED_BEFORE, Reason};

impl Machine {
    pub(super) fn received(&mut self, said: ToDestination) -> Vec<Action> {
        match (said, self.state) {
            (ToDestination::Go { run }, State::Loaded) => self.take(run),
            (ToDestination::Aborted { reason }, State::Arriving | State::Loaded) => {
                self.end(reason)
            }
            // The source has no journal: it never gave the VM up, or an operator took it back.
            (ToDestination::Unknown, State::Arriving | State::Loaded) => {
                self.end(Reason::new("the source's agent knows nothing of this migration"))
            }
            (ToDestination::Go { .. }, State::Running | State::Left) => {
                vec![self.send(ToSource::Running)]
            }
            (ToDestination::Aborted { reason }, State::Running | State::Left) => {
                let said = self.send(ToSource::Running);
                self.doubting(Doubt::TakenBack { reason }, vec![said])
            }
            (ToDestination::Aborted { reason }, State::Starting { .. }) => {
                // So that the agent does not try it after a restart either.
                let noted = (!self.is_taken_back())
                    .then_some(Action::Note(Record::Starting { taken_back: true }));
                let noted = noted.into_iter().collect();
                self.doubting(Doubt::TakenBackMeanwhile { reason }, noted)
            }
            // The source has given it up anyway: what it said before came late.
            (ToDestination::Go { .. }, State::Starting { fresh: false })
                if self.is_taken_back() =>
            {
                self.try_again()
            }
            (ToDestination::Go { .. } | ToDestination::Aborted { .. }, State::Refused) => {
                vec![self.send_refused()]
            }
            (ToDestination::Go { .. } | ToDestination::Aborted { .. }, State::Lost) => {
                vec![self.send_lost()]
            }
            (
                ToDestination::Unknown,
                State::Running | State::Left | State::Refused | State::Lost,
            ) => self.forget(),
            (ToDestination::Go { .. } | ToDestination::Aborted { .. }, State::Over) => {
                vec![self.send(ToSource::Unknown)]
            }
            // QEMU is busy: its result will be reported.
            _ => Vec::new(),
        }
    }

    /// Takes the VM that the source gave up. A VM that its owner paused is here as soon as that is
    /// on disk; it never ran, and can be refused until then.
    fn take(&mut self, run: bool) -> Vec<Action> {
        self.run = run;
        if run {
            return self.start(true);
        }
        self.state = State::Running;
        self.doubt = None;
        vec![
            Action::Journal(Record::Running),
            self.send(ToSource::Running),
            Action::QemuSettle,
            Action::Done(Outcome::Here),
        ]
    }

    /// Whether the source says that the VM was taken back before it ran here.
    pub(super) fn is_taken_back(&self) -> bool {
        matches!(self.doubt, Some(Doubt::TakenBackMeanwhile { .. }))
    }

    fn try_again(&mut self) -> Vec<Action> {
        self.doubt = None;
        vec![Action::Note(Record::Starting { taken_back: false }), Action::QemuCont]
    }

    pub(super) fn runs(&mut self) -> Vec<Action> {
        if !matches!(self.state, State::Starting { .. }) {
            return Vec::new();
        }
        self.state = State::Running;
        self.doubt = None;
        vec![
            Action::QemuSettle,
            Action::Done(Outcome::Here),
            Action::Journal(Record::Running),
            self.send(ToSource::Running),
        ]
    }

    pub(super) fn cont_failed(&mut self, reason: Reason, never_ran: bool) -> Vec<Action> {
        match self.state {
            // The source keeps its copy until it receives `running`.
            State::Starting { fresh: true } if never_ran => self.end(reason),
            State::Starting { .. } => {
                self.state = State::Starting { fresh: false };
                // That two may run is worse, and the source does not say it again for a while.
                if self.is_taken_back() {
                    return Vec::new();
                }
                self.doubting(Doubt::CannotRun { reason }, Vec::new())
            }
            _ => Vec::new(),
        }
    }

    pub(super) fn qemu_exited(&mut self) -> Vec<Action> {
        match self.state {
            State::Arriving => {
                self.reason = Reason::new(QEMU_ENDED);
                self.state = State::Ending { known: false };
                self.qemu_exited()
            }
            State::Loaded => {
                self.reason = Reason::new(QEMU_ENDED_BEFORE);
                self.state = State::Refused;
                self.doubt = None;
                vec![self.not_here(), self.refused_record(), self.send_refused()]
            }
            State::Starting { .. } | State::Running => {
                self.reason = Reason::new(QEMU_ENDED);
                self.state = State::Lost;
                self.doubt = None;
                let reason = self.reason.clone();
                let record = Record::Lost { reason: reason.clone() };
                let done = Action::Done(Outcome::Lost { reason });
                vec![done, Action::Journal(record), self.send_lost()]
            }
            State::Ending { known: true } => {
                self.state = State::Refused;
                vec![self.not_here(), self.send_refused()]
            }
            // The source will not ask: it has the VM.
            State::Ending { known: false } => {
                let mut actions = vec![self.not_here(), self.send_refused()];
                actions.extend(self.forget());
                actions
            }
            State::Left | State::Refused | State::Lost | State::Forgetting | State::Over => {
                Vec::new()
            }
        }
    }

    fn not_here(&self) -> Action {
        Action::Done(Outcome::NotHere { reason: self.reason.clone() })
    }

    pub(super) fn left(&mut self) -> Vec<Action> {
        if self.state != State::Running {
            return Vec::new();
        }
        self.state = State::Left;
        vec![Action::Journal(Record::Left)]
    }

    pub(super) fn resolved(&mut self, resolution: Resolution) -> Vec<Action> {
        match (resolution, self.state) {
            (Resolution::Here, State::Loaded) => {
                self.run = true;
                self.start(false)
            }
            (Resolution::Here, State::Starting { fresh: false }) if self.is_taken_back() => {
                self.try_again()
            }
            (Resolution::Here, State::Starting { fresh: false }) => {
                vec![Action::QemuCont]
            }
            (Resolution::There, State::Loaded | State::Starting { fresh: false }) => {
                self.end(Reason::new("the operator decided"))
            }
            _ => Vec::new(),
        }
    }
}
