//! Continues a destination's machine after a restart of the agent.

use super::{Action, Machine, Noted, State, writes};
use crate::Found;
use crate::doubt::Doubt;
use crate::message::ToSource;
use crate::migration_id::MigrationId;
use crate::reason::Reason;

impl Machine {
    /// Restores a migration that an earlier run of the agent left, from its journal and the state
    /// of its QEMU. The actions have to be done before the first event.
    #[must_use]
    pub fn restart(id: MigrationId, noted: Noted, found: Found) -> (Self, Vec<Action>) {
        let mut machine = Self::new(id);
        machine.reason = Reason::new("the agent was restarted");
        let actions = machine.resume(noted, found);
        machine.wrote = writes(&actions);
        (machine, actions)
    }

    fn resume(&mut self, noted: Noted, found: Found) -> Vec<Action> {
        match (noted, found) {
            // The source can't have received `loaded`, so it has the VM.
            (Noted::Opened, Found::Missing) => {
                self.state = State::Ending { known: false };
                self.qemu_exited()
            }
            (Noted::Opened, _) => self.end(self.reason.clone()),
            (Noted::Loaded, found) => {
                self.state = State::Loaded;
                match found {
                    Found::Missing => self.qemu_exited(),
                    Found::Stopped | Found::Runs => {
                        let loaded = self.send(ToSource::Loaded);
                        self.doubting(Doubt::NoVerdict, vec![loaded])
                    }
                }
            }
            (Noted::Starting | Noted::TakenBackMeanwhile, found) => {
                self.state = State::Starting { fresh: false };
                match found {
                    Found::Missing => self.qemu_exited(),
                    Found::Stopped if noted == Noted::TakenBackMeanwhile => {
                        let reason = Reason::new("as recorded before the agent was restarted");
                        self.doubting(Doubt::TakenBackMeanwhile { reason }, Vec::new())
                    }
                    Found::Stopped => vec![Action::QemuCont],
                    Found::Runs => self.runs(),
                }
            }
            (Noted::Running, found) => {
                self.state = State::Running;
                match found {
                    Found::Missing => self.qemu_exited(),
                    Found::Stopped | Found::Runs => vec![self.send(ToSource::Running)],
                }
            }
            (Noted::Left, _) => {
                self.state = State::Left;
                vec![self.send(ToSource::Running)]
            }
            (Noted::Refused, Found::Missing) => {
                self.state = State::Refused;
                vec![self.send_refused()]
            }
            (Noted::Refused, _) => {
                self.state = State::Ending { known: true };
                vec![Action::QemuKill]
            }
            (Noted::Lost, _) => {
                self.state = State::Lost;
                vec![self.send_lost()]
            }
        }
    }
}
