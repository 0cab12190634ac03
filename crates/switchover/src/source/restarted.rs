//! Continues a source's machine after a restart of the agent.

use super::{Action, By, Copy, Machine, Noted, Phase, State, writes};
use crate::Found;
use crate::doubt::Doubt;
use crate::migration_id::MigrationId;
use crate::reason::{QEMU_HAD_EXITED, Reason};

impl Machine {
    /// Restores a migration that an earlier run of the agent left, from its journal and the state
    /// of its QEMU. The actions have to be done before the first event.
    #[must_use]
    pub fn restart(id: MigrationId, noted: Noted, found: Found) -> (Self, Vec<Action>) {
        let mut machine = Self::new(id, noted.run);
        machine.reason = Reason::new("the agent was restarted");
        let actions = machine.resume(noted.phase, found);
        (machine, actions)
    }

    fn resume(&mut self, phase: Phase, found: Found) -> Vec<Action> {
        self.copy = match found {
            Found::Missing => Copy::Dead,
            Found::Stopped => Copy::Kept,
            Found::Runs => Copy::Runs,
        };
        let actions = match (phase, found) {
            (Phase::Opened | Phase::Stopped, Found::Missing) => {
                self.reason = Reason::new(QEMU_HAD_EXITED);
                self.died()
            }
            (Phase::Opened | Phase::Stopped, _) => self.abort(self.reason.clone()),
            (Phase::Committed, found) => {
                self.state = State::Committed;
                let doubt = if found == Found::Runs { Doubt::RunsHere } else { Doubt::Unanswered };
                let go = self.go();
                self.doubting(doubt, vec![go])
            }
            (Phase::Aborted, found) => self.resume_here(State::Aborting { risky: false }, found),
            (Phase::Reclaimed(By::Destination), found) => {
                self.resume_here(State::Reclaiming, found)
            }
            // The VM continued, and its owner is responsible for it since.
            (
                Phase::Reclaimed(By::Operator) | Phase::RunsThereToo,
                Found::Missing | Found::Runs,
            ) => {
                self.state = State::TakenBack;
                vec![self.send_aborted()]
            }
            (Phase::RunsThereToo, Found::Stopped) => {
                self.state = State::TakingBack;
                self.doubting(Doubt::RunsThereToo, Vec::new())
            }
            (Phase::Reclaimed(By::Operator), Found::Stopped) => {
                self.resume_here(State::TakingBack, found)
            }
            (Phase::Dropped, Found::Missing) => {
                self.state = State::Dropped;
                vec![self.go()]
            }
            (Phase::Dropped, _) => {
                self.state = State::Dropping;
                vec![Action::QemuQuit]
            }
        };
        self.wrote = writes(&actions);
        actions
    }

    fn resume_here(&mut self, state: State, found: Found) -> Vec<Action> {
        self.state = state;
        match found {
            Found::Missing => self.died(),
            Found::Stopped | Found::Runs => vec![Action::QemuGoOn { run: self.run }],
        }
    }
}
