//! QEMU's own migration, one for each VM of a gang, all started together.

use std::time::Instant;

use serde_json::json;

use super::{GangContender, GangGround, GangMoved, Member};
use crate::contender::Moved;
use crate::contender::qemu::{End, Events, Failure, Mode, launch};
use lab::error::{LabError, Result};

/// Port of the first VM; each further VM has the next.
const PORT: u16 = 7820;

/// QEMUs on all hosts.
pub struct QemuGang {
    mode: Mode,
    /// QEMUs of all members at their start.
    here: Vec<End>,
    /// QEMUs at the destinations of the members that move.
    there: Vec<End>,
}

impl QemuGang {
    /// A contender with this mode.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self { mode, here: Vec::new(), there: Vec::new() }
    }

    fn failed(&self, vm: &str, failure: Failure, ground: &GangGround<'_>) -> LabError {
        let contender = self.name();
        match failure {
            Failure::Late => LabError::Late { contender, waited: ground.timeout },
            Failure::Other(reason) => {
                LabError::Migration { contender, reason: format!("{vm}: {reason}") }
            }
        }
    }
}

impl GangContender for QemuGang {
    fn name(&self) -> String {
        self.mode.name().to_owned()
    }

    fn start(&mut self, ground: &GangGround<'_>, members: &[Member<'_>]) -> Result<()> {
        for Member { spec, from, .. } in members {
            let argv = spec.argv(ground.kit, &ground.kit.qemu);
            let goal = ground.downtime_goal;
            self.here.push(launch(self.mode, goal, &from.host, &spec.name, &argv, &[])?);
        }
        Ok(())
    }

    fn migrate(&mut self, ground: &GangGround<'_>, members: &[Member<'_>]) -> Result<GangMoved> {
        let started = Instant::now();
        let until = started + ground.timeout;
        let mut moves = Vec::new();
        for ((member, here), port) in members.iter().zip(&self.here).zip(PORT..) {
            let Some(to) = member.to else { continue };
            let (spec, goal) = (&member.spec, ground.downtime_goal);
            let argv = spec.argv(ground.kit, &ground.kit.qemu);
            let incoming = ["-incoming", "defer"];
            let there = launch(self.mode, goal, &to.host, &spec.name, &argv, &incoming)?;
            let uri = format!("tcp:{}:{port}", to.host.addresses[0]);
            there.tell("migrate-incoming", json!({ "uri": uri }))?;
            let arriving = Events { events: there.qmp.events(), until };
            let leaving = Events { events: here.qmp.events(), until };
            self.there.push(there);
            moves.push((spec, here, uri, leaving, arriving));
        }
        let began = Instant::now();
        for (_, here, uri, ..) in &moves {
            here.tell("migrate", json!({ "uri": uri }))?;
        }
        let mut vms = Vec::new();
        for (spec, here, _, leaving, arriving) in &moves {
            let failed = |failure| self.failed(&spec.name, failure, ground);
            let stopped = leaving.wait(|event| event.name == "STOP").map_err(failed)?;
            let ran = arriving.wait(|event| event.name == "RESUME").map_err(failed)?;
            let status = here.tell("query-migrate", json!({}))?;
            vms.push(Moved {
                began,
                ran: ran.at,
                prepare: began - started,
                downtime: ran.at.saturating_duration_since(stopped.at),
                passes: status["ram"]["dirty-sync-count"].as_u64(),
            });
        }
        Ok(GangMoved::new(started, vms))
    }

    fn stop(&mut self) {
        for mut end in self.here.drain(..).chain(self.there.drain(..)) {
            end.kill();
        }
    }
}

impl Drop for QemuGang {
    fn drop(&mut self) {
        self.stop();
    }
}
