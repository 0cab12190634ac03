//! A VM that its owner moves from QEMU to QEMU by QMP, as libvirt does, and that agents carry.

use std::net::Ipv4Addr;
use std::thread;
use std::time::{Duration, Instant};

use ::qemu::qmp::Event;
use api::{Progress, Report};
use serde_json::json;

use super::qemu::{End, Events, Failure, Mode, launch};
use super::{Contender, Ground, Moved};
use lab::agent::Agent;
use lab::error::{FileContext, LabError, Result};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Host, Hosts, RUN_DIR};
use lab::libvirt::WAITS_AT;
use lab::program;

/// The first port at which a host's QEMUs wait for VMs, by the host's place in the peers file.
const PORTS: [u16; 2] = [49152, 49216];
const NAME: &str = "carried";
/// Time for the source's agent to end a migration whose VM runs at the destination.
const REPORTED_MAX: Duration = Duration::from_secs(20);
const REPORTED_EVERY: Duration = Duration::from_millis(50);

/// Starts an agent that carries, with these lines in its section, and with `more` arguments.
///
/// # Errors
/// As [`Agent::start`].
pub(crate) fn carrying(hosts: &Hosts, host: &Host, lines: &str, more: &[&str]) -> Result<Agent> {
    let file = "agent.toml";
    let config = host.run_dir.join(file);
    std::fs::write(&config, format!("[carry]\ndirectory = \"{RUN_DIR}/migrate\"\n{lines}\n"))
        .at("write", &config)?;
    let inside = format!("{RUN_DIR}/{file}");
    Agent::start_with(hosts, host, &[], &[&["--config", inside.as_str()], more].concat())
}

/// The VM, in the QEMU that it runs in now.
pub struct Carried {
    mode: Mode,
    spec: GuestSpec,
    end: End,
}

impl Carried {
    /// Starts a guest on the first host; it moves in this mode.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(ground: &Ground<'_>, mode: Mode, spec: &GuestSpec) -> Result<(Self, Guest)> {
        let end = end(ground, mode, &ground.hosts.a, spec, &[])?;
        let guest = Guest::meet(spec.clone(), &ground.hosts.a)?;
        Ok((Self { mode, spec: spec.clone(), end }, guest))
    }

    /// Moves it to the host with this place in the peers file, counted from 0. The guest's socket
    /// is free to be expected there when that is called.
    ///
    /// # Errors
    /// If it doesn't arrive.
    pub fn migrate(
        &mut self,
        ground: &Ground<'_>,
        to: usize,
        expect_on: impl FnOnce(&Host) -> Result<()>,
    ) -> Result<Moved> {
        let (started, hosts) = (Instant::now(), ground.hosts);
        let there = [&hosts.a, &hosts.b][to];
        // A QEMU that was killed has left it.
        let talk = there.run_dir.join(format!("{}.talk", self.spec.name));
        if talk.exists() {
            std::fs::remove_file(&talk).at("remove", &talk)?;
        }
        expect_on(there)?;
        let next = end(ground, self.mode, there, &self.spec, &["-incoming", "defer"])?;
        let port = PORTS[to];
        let waits = format!("tcp:{WAITS_AT}:{port}");
        next.tell("migrate-incoming", json!({ "uri": waits }))?;
        let began = Instant::now();
        let until = began + ground.timeout;
        let arriving = Events { events: next.qmp.events(), until };
        let leaving = Events { events: self.end.qmp.events(), until };
        // The agent listens there for that host.
        let loopback = Ipv4Addr::new(127, 7, 0, if to == 0 { 1 } else { 2 });
        self.end.tell("migrate", json!({ "uri": format!("tcp:{loopback}:{port}") }))?;
        let failed = |failure| match failure {
            Failure::Late => LabError::Late { contender: NAME.to_owned(), waited: ground.timeout },
            Failure::Other(reason) => LabError::Migration { contender: NAME.to_owned(), reason },
        };
        let ran = arriving.wait(|event| event.name == "RESUME").map_err(failed)?.at;
        let stopped = leaving.wait(|event| event.name == "STOP").map_err(failed)?.at;
        // A source that is killed before it knows would be taken for one that has failed.
        let is_over = |event: &Event| event.data["status"] == "completed";
        leaving.wait(is_over).map_err(failed)?;
        std::mem::replace(&mut self.end, next).kill();
        Ok(Moved {
            began,
            ran,
            prepare: began - started,
            downtime: ran.saturating_duration_since(stopped),
            passes: None,
        })
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        self.end.kill();
    }
}

fn end(
    ground: &Ground<'_>,
    mode: Mode,
    host: &Host,
    spec: &GuestSpec,
    more: &[&str],
) -> Result<End> {
    let argv = spec.argv(ground.kit, &ground.kit.qemu);
    let end = launch(mode, ground.downtime_goal, host, &spec.name, &argv, more)?;
    // As libvirt does; agents split no stream without it.
    let back = json!([{ "capability": "return-path", "state": true }]);
    end.tell("migrate-set-capabilities", json!({ "capabilities": back }))?;
    Ok(end)
}

/// A VM with a helper that its owner moves, carried by agents that read its disks, or don't.
pub struct CarriedFromDisks {
    name: &'static str,
    lines: String,
    agents: Vec<Agent>,
    vm: Option<Carried>,
    report: Option<Report>,
}

impl CarriedFromDisks {
    /// A contender of this name, whose agents have these lines under `[carry]`.
    #[must_use]
    pub fn new(name: &'static str, lines: String) -> Self {
        Self { name, lines, agents: Vec::new(), vm: None, report: None }
    }
}

impl Contender for CarriedFromDisks {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn start(&mut self, ground: &Ground<'_>, spec: &GuestSpec) -> Result<Guest> {
        for host in [&ground.hosts.a, &ground.hosts.b] {
            self.agents.push(carrying(ground.hosts, host, &self.lines, &[])?);
        }
        let mut spec = spec.clone();
        // The port that `droveway run` gives a VM.
        let socket = format!("socket,id=helper,path={RUN_DIR}/helper,server=on,wait=off");
        let port = "virtserialport,chardev=helper,id=helper-port,name=org.droveway.guest.0";
        spec.extra.extend(
            ["-chardev", &socket, "-device", "virtio-serial-pci", "-device", port]
                .map(str::to_owned),
        );
        let (vm, guest) = Carried::start(ground, Mode::Multifd, &spec)?;
        self.vm = Some(vm);
        Ok(guest)
    }

    fn migrate(&mut self, ground: &Ground<'_>) -> Result<Moved> {
        let no_guest =
            || LabError::Migration { contender: NAME.to_owned(), reason: "no guest".to_owned() };
        let vm = self.vm.as_mut().ok_or_else(no_guest)?;
        let moved = vm.migrate(ground, 1, |_| Ok(()))?;
        self.report = Some(last_report(&self.agents[0], &ground.hosts.a)?);
        Ok(moved)
    }

    fn report(&self) -> Option<&Report> {
        self.report.as_ref()
    }

    fn stop(&mut self) {
        self.vm = None;
        self.agents.clear();
    }
}

/// An agent's report of the last migration that it carried from this host, once that has ended.
fn last_report(agent: &Agent, host: &Host) -> Result<Report> {
    let until = Instant::now() + REPORTED_MAX;
    loop {
        let text = program::output(&mut agent.command(host, &["list", "--migrations", "--json"]))?;
        let listed: Option<Vec<Progress>> = serde_json::from_str(&text).ok();
        let listed = listed.ok_or(LabError::Text { what: "the list of migrations", text })?;
        if let Some(last) = listed.first().filter(|last| last.outcome.is_some()) {
            let text = program::output(&mut agent.command(host, &["report", &last.id, "--json"]))?;
            let report = serde_json::from_str(&text).ok();
            return report.ok_or(LabError::Text { what: "a report", text });
        }
        if Instant::now() > until {
            return Err(LabError::Late { contender: NAME.to_owned(), waited: REPORTED_MAX });
        }
        thread::sleep(REPORTED_EVERY);
    }
}
