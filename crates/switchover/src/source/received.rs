//! The source's reactions to the destination's messages, to QEMU's end, and to the operator's
//! decision.

use super::{Action, By, Copy, Machine, Outcome, Record, State};
use crate::Resolution;
use crate::doubt::Doubt;
use crate::message::{ToDestination, ToSource};
use crate::reason::{QEMU_ENDED, Reason};

impl Machine {
    pub(super) fn received(&mut self, said: ToSource) -> Vec<Action> {
        match self.state {
            State::Ours { .. } => self.received_before_commit(said),
            State::Committed => self.received_after_commit(said),
            State::Dropped => match said {
                ToSource::Loaded => vec![self.go()],
                _ => self.forget(Vec::new()),
            },
            State::Aborting { risky } => match said {
                ToSource::Loaded => vec![self.send_aborted()],
                // The VM can't run there any more, whatever is on our disk.
                ToSource::Refused { .. } if risky => {
                    self.state = State::Aborting { risky: false };
                    self.doubt = None;
                    vec![Action::QemuGoOn { run: self.run }]
                }
                _ => Vec::new(),
            },
            State::TakingBack | State::TakenBack => self.received_when_taken_back(&said),
            State::Over if said != ToSource::Unknown => vec![self.send(ToDestination::Unknown)],
            State::Reclaiming
            | State::Leaving
            | State::Dropping
            | State::Forgetting
            | State::Over => Vec::new(),
        }
    }

    fn received_before_commit(&mut self, said: ToSource) -> Vec<Action> {
        match said {
            ToSource::Loaded => {
                if let State::Ours { loaded, .. } = &mut self.state {
                    *loaded = true;
                }
                self.commit_if_ready()
            }
            ToSource::Refused { reason } | ToSource::Lost { reason } => self.abort(reason),
            ToSource::Running => {
                self.abort(Reason::new("the destination runs the VM without permission"))
            }
            ToSource::Unknown => {
                self.abort(Reason::new("the destination's agent knows nothing of this migration"))
            }
        }
    }

    fn received_after_commit(&mut self, said: ToSource) -> Vec<Action> {
        match (said, self.copy) {
            (ToSource::Loaded, _) => vec![self.go()],
            (ToSource::Running, Copy::Kept) => {
                self.state = State::Leaving;
                self.doubt = None;
                vec![Action::QemuQuit]
            }
            (ToSource::Running, Copy::Runs) => self.doubting(Doubt::RunsAtBoth, Vec::new()),
            (ToSource::Running, Copy::Dead) => self.forget(vec![Action::Done(Outcome::Moved)]),
            (ToSource::Refused { reason } | ToSource::Lost { reason }, Copy::Dead) => {
                self.reason = reason;
                self.died()
            }
            (ToSource::Refused { reason }, _) => {
                self.state = State::Reclaiming;
                self.doubt = None;
                self.reason = reason;
                let record = self.reclaimed(By::Destination, false);
                vec![Action::Journal(record), Action::QemuGoOn { run: self.run }]
            }
            // Since it left, the VM may have written to its disks and used its network, so the copy
            // here is out of date. Only an operator can know whether it is of use.
            (ToSource::Lost { reason }, _) => {
                self.doubting(Doubt::LostThere { reason }, Vec::new())
            }
            (ToSource::Unknown, _) => self.doubting(Doubt::UnknownThere, Vec::new()),
        }
    }

    fn received_when_taken_back(&mut self, said: &ToSource) -> Vec<Action> {
        match (said, self.state) {
            (ToSource::Loaded, _) => vec![self.send_aborted()],
            // The copy here has ended since, so only the other one is left.
            (ToSource::Running, State::TakenBack) if self.copy == Copy::Dead => {
                self.forget(Vec::new())
            }
            // Noted, so that the agent does not try it after a restart either. If the host is
            // booted instead, there is no copy left to try.
            (ToSource::Running, State::TakingBack) if self.doubt != Some(Doubt::RunsThereToo) => {
                let noted = Action::Note(self.reclaimed(By::Operator, true));
                self.doubting(Doubt::RunsThereToo, vec![noted])
            }
            (ToSource::Running, _) => self.doubting(Doubt::RunsThereToo, Vec::new()),
            (_, State::TakenBack) => self.forget(Vec::new()),
            _ => Vec::new(),
        }
    }

    /// Whether QEMU has released the VM, which was not given up yet. Should QEMU end, the
    /// destination's copy is as good.
    #[must_use]
    pub fn is_released(&self) -> bool {
        matches!(self.state, State::Ours { completed: true, .. })
    }

    pub(super) fn qemu_exited(&mut self) -> Vec<Action> {
        if self.copy == Copy::Dead && !matches!(self.state, State::Leaving | State::Dropping) {
            return Vec::new();
        }
        self.copy = Copy::Dead;
        match self.state {
            // QEMU had completed its migration, so the destination's copy is as good.
            State::Ours { completed: true, .. } => Vec::new(),
            State::Ours { .. } | State::Aborting { .. } | State::Reclaiming | State::TakingBack => {
                self.reason = Reason::new(QEMU_ENDED);
                self.died()
            }
            State::Leaving => self.forget(vec![Action::Done(Outcome::Moved)]),
            State::Dropping => {
                self.state = State::Dropped;
                vec![Action::Done(Outcome::Moved), self.go()]
            }
            _ => Vec::new(),
        }
    }

    /// Nothing is left of the VM. Without a journal, a restart has nothing to give to the
    /// destination either.
    pub(super) fn died(&mut self) -> Vec<Action> {
        let done = Action::Done(Outcome::Lost { reason: self.reason.clone() });
        self.forget(vec![done])
    }

    pub(super) fn went_on(&mut self) -> Vec<Action> {
        let done = Action::Done(Outcome::Stays { reason: self.reason.clone() });
        match self.state {
            State::Aborting { .. } | State::Reclaiming => self.forget(vec![done]),
            State::TakingBack => {
                self.state = State::TakenBack;
                self.doubt = None;
                vec![done, self.send_aborted()]
            }
            _ => Vec::new(),
        }
    }

    pub(super) fn cannot_go_on(&mut self, reason: Reason) -> Vec<Action> {
        match self.state {
            State::Aborting { .. } | State::Reclaiming | State::TakingBack => {
                self.doubting(Doubt::CannotGoOn { reason }, Vec::new())
            }
            _ => Vec::new(),
        }
    }

    fn reclaimed(&self, by: By, runs_there: bool) -> Record {
        Record::Reclaimed { by, reason: self.reason.clone(), runs_there }
    }

    pub(super) fn resolved(&mut self, resolution: Resolution) -> Vec<Action> {
        if !self.takes(resolution) {
            return Vec::new();
        }
        // The destination may never come back. One that does anyway receives `unknown`, and ends
        // a VM that it has loaded, as with `aborted`.
        if self.state == State::TakenBack {
            return self.forget(Vec::new());
        }
        self.doubt = None;
        self.reason = Reason::new("the operator decided");
        match resolution {
            Resolution::Here if self.state == State::TakingBack => {
                let noted = Action::Note(self.reclaimed(By::Operator, false));
                vec![noted, Action::QemuGoOn { run: self.run }]
            }
            Resolution::Here => {
                self.state = State::TakingBack;
                let record = self.reclaimed(By::Operator, false);
                vec![Action::Journal(record), Action::QemuGoOn { run: self.run }]
            }
            Resolution::There if self.copy == Copy::Dead => {
                self.state = State::Dropped;
                let done = Action::Done(Outcome::Moved);
                vec![Action::Journal(Record::Dropped), done, self.go()]
            }
            Resolution::There => {
                self.state = State::Dropping;
                vec![Action::Journal(Record::Dropped), Action::QemuQuit]
            }
        }
    }
}
