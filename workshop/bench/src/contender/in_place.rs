//! Another QEMU for VMs that stay on their host: by the agent, or by QEMU's own migration over a
//! unix socket.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use api::{Outcome, Report};
use serde_json::json;

use super::droveway::{moved, within};
use super::qemu::{End, Events, Failure, Mode, launch};
use lab::agent::Agent;
use lab::error::{FileContext, LabError, Result};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Hosts, RUN_DIR};
use lab::program;
use lab::setup::Kit;

/// The downtime that QEMU is requested to keep to.
const GOAL: Duration = Duration::from_millis(300);
const TIMEOUT: Duration = Duration::from_secs(180);

/// One VM in another QEMU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Changed {
    /// When the command was given.
    pub(crate) started: Instant,
    /// When the VM ran in the other QEMU.
    pub(crate) ran: Instant,
    /// Of that, until the other QEMU was ready.
    pub(crate) prepare: Duration,
    /// From the VM's stop in the former QEMU to its start in the other.
    pub(crate) downtime: Duration,
    /// What went from one to the other.
    pub(crate) bytes: u64,
}

/// An agent, and VMs that it has started.
pub(crate) struct ByAgent(Agent);

/// The name of the VMs' program: a script, since a VM gets another QEMU of the same program only if
/// that may have changed.
const PROGRAM: &str = "qemu-of-vms";

fn program_path() -> PathBuf {
    Path::new(RUN_DIR).join(PROGRAM)
}

/// A command that has ended.
pub(crate) struct Commanded {
    /// A report of each VM.
    pub(crate) reports: Vec<Report>,
    /// When it was given.
    pub(crate) started: Instant,
    /// When it had ended.
    pub(crate) ended: Instant,
}

impl ByAgent {
    /// Starts an agent on host a.
    pub(crate) fn start(kit: &Kit, hosts: &Hosts) -> Result<Self> {
        let file = hosts.a.run_dir.join(PROGRAM);
        let script = format!("#!/bin/sh\nexec '{}' \"$@\"\n", kit.qemu.display());
        fs::write(&file, script).at("write", &file)?;
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&file, executable).at("make executable", &file)?;
        let program = program_path().display().to_string();
        let listed = ["--qemu-programs", program.as_str()];
        Agent::start_with(hosts, &hosts.a, &[], &listed).map(Self)
    }

    /// Boots a VM with these options of `run`.
    pub(crate) fn boot(
        &self,
        kit: &Kit,
        hosts: &Hosts,
        spec: &GuestSpec,
        options: &[&str],
    ) -> Result<Guest> {
        let words = [&["run", spec.name.as_str()][..], options, &["--"]].concat();
        let mut run = self.0.command(&hosts.a, &words);
        program::output(run.args(spec.argv(kit, &program_path())))?;
        Guest::meet(spec.clone(), &hosts.a)
    }

    /// Gives VMs another QEMU; `which` are their names, or `--all`.
    pub(crate) fn change(&self, hosts: &Hosts, which: &[&str]) -> Result<Commanded> {
        let words = [&["upgrade", "--json"][..], which].concat();
        let started = Instant::now();
        let output = within(&mut self.0.command(&hosts.a, &words), TIMEOUT)?;
        let ended = Instant::now();
        let failed = |what: &str| {
            let said = String::from_utf8_lossy(&output.stderr);
            let reason = format!("{what}: {said} {}", self.0.log_text());
            LabError::Migration { contender: "upgrade".to_owned(), reason }
        };
        let reports: Vec<Report> =
            serde_json::from_slice(&output.stdout).map_err(|_| failed("no reports"))?;
        match reports.iter().find(|report| report.outcome != Outcome::Done) {
            Some(report) => Err(failed(&format!("{:?}", report.outcome))),
            None => Ok(Commanded { reports, started, ended }),
        }
    }

    /// Gives one VM another QEMU.
    pub(crate) fn change_one(&self, hosts: &Hosts, guest: &Guest) -> Result<Changed> {
        // Until the former QEMU has ended, this waits for its turn at the same socket.
        guest.expect_on(&hosts.a)?;
        let Commanded { reports, started, ended } = self.change(hosts, &[&guest.spec.name])?;
        let [report] = &reports[..] else {
            let reason = format!("{} reports of one VM", reports.len());
            return Err(LabError::Migration { contender: "upgrade".to_owned(), reason });
        };
        let times = moved(report, started, ended);
        Ok(Changed {
            started,
            ran: times.ran,
            prepare: times.prepare,
            downtime: times.downtime,
            bytes: report.wire_bytes,
        })
    }
}

/// A VM whose QEMU migrates it to another one on the same host.
pub(crate) struct ByQemu {
    mode: Mode,
    name: String,
    argv: Vec<String>,
    /// How many QEMUs it has had.
    count: u32,
    end: Option<End>,
}

impl ByQemu {
    /// Boots a VM on host a.
    pub(crate) fn start(
        kit: &Kit,
        hosts: &Hosts,
        spec: &GuestSpec,
        mode: Mode,
    ) -> Result<(Self, Guest)> {
        let argv = spec.argv(kit, &kit.qemu);
        let mut vm = Self { mode, name: spec.name.clone(), argv, count: 0, end: None };
        vm.end = Some(vm.launch(hosts, &[])?);
        let guest = Guest::meet(spec.clone(), &hosts.a)?;
        Ok((vm, guest))
    }

    /// Starts a QEMU, with a socket of its own for commands.
    fn launch(&mut self, hosts: &Hosts, more: &[&str]) -> Result<End> {
        self.count += 1;
        let name = format!("{}-{}", self.name, self.count);
        launch(self.mode, GOAL, &hosts.a, &name, &self.argv, more)
    }

    /// Gives it another QEMU.
    pub(crate) fn change(&mut self, hosts: &Hosts, guest: &Guest) -> Result<Changed> {
        let started = Instant::now();
        let there = self.launch(hosts, &["-incoming", "defer"])?;
        // The other QEMU has a socket at the path of the former one's.
        guest.expect_on(&hosts.a)?;
        let uri = format!("unix:{RUN_DIR}/{}-{}.stream", self.name, self.count);
        there.tell("migrate-incoming", json!({ "uri": uri }))?;
        let mut here = self.end.take().ok_or_else(|| self.failed("no VM".to_owned()))?;
        let until = started + TIMEOUT;
        let leaving = Events { events: here.qmp.events(), until };
        let arriving = Events { events: there.qmp.events(), until };
        let began = Instant::now();
        here.tell("migrate", json!({ "uri": uri }))?;
        let explain = |failure| match failure {
            Failure::Late => LabError::Late { contender: self.name.clone(), waited: TIMEOUT },
            Failure::Other(reason) => self.failed(reason),
        };
        let stopped = leaving.wait(|event| event.name == "STOP").map_err(explain)?;
        let ran = arriving.wait(|event| event.name == "RESUME").map_err(explain)?;
        let bytes = here.tell("query-migrate", json!({}))?["ram"]["transferred"].as_u64();
        here.kill();
        self.end = Some(there);
        Ok(Changed {
            started,
            ran: ran.at,
            prepare: began - started,
            downtime: ran.at.saturating_duration_since(stopped.at),
            bytes: bytes.unwrap_or(0),
        })
    }

    fn failed(&self, reason: String) -> LabError {
        LabError::Migration { contender: self.mode.name().to_owned(), reason }
    }
}

impl Drop for ByQemu {
    fn drop(&mut self) {
        if let Some(mut end) = self.end.take() {
            end.kill();
        }
    }
}
