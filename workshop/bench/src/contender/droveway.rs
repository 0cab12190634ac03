//! Droveway: an agent on each host, and its command.

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use api::{Outcome, Outlook, Prediction, Report};

use super::{Contender, Ground, Moved};
use lab::agent::{Agent, peer_name};
use lab::certificates::Certificates;
use lab::error::{LabError, Result, SystemContext};
use lab::field;
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Host, Hosts, Link, RUN_DIR};
use lab::program;

/// If it is set, each move is predicted before, where the links have a rate.
const PREDICT_VARIABLE: &str = "LAB_PREDICT";
/// Time for two scans of the largest guest. They run only when no other program needs the CPU.
const SCANNED_MAX: Duration = Duration::from_secs(300);
const SCANNED_EVERY: Duration = Duration::from_millis(500);

/// Options for Droveway.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Suffix of the contender's name, after `droveway-`.
    pub variant: Option<String>,
    /// Arguments for `droveway migrate`.
    pub arguments: Vec<String>,
    /// Whether agents get the speeds of their NICs.
    pub nic_speeds: bool,
    /// Whether its agents use TLS.
    pub tls: bool,
    /// Whether the VM rests until the source's agent has scanned all of it.
    pub rests: bool,
}

/// Arguments that give an agent the speeds of its NICs.
fn nic_speeds(host: &Host, mbit_per_s: Option<u32>) -> Vec<String> {
    let Some(mbit) = mbit_per_s else { return Vec::new() };
    host.addresses.iter().map(|nic| format!("--nic-speed={nic}={mbit}M")).collect()
}

/// Gives both hosts certificates for their agents; returns the arguments with which agents use
/// them.
pub(crate) fn certify(hosts: &Hosts) -> Result<[String; 2]> {
    let certificates = Certificates::new()?;
    for host in [&hosts.a, &hosts.b] {
        certificates.give(host, peer_name(hosts, host))?;
    }
    Ok(["--tls".to_owned(), Certificates::place()])
}

/// Agents on both hosts, and a guest under the first.
pub struct Droveway {
    options: Options,
    spec: Option<GuestSpec>,
    agents: Vec<Agent>,
    /// A QEMU that it adopted.
    adopted: Option<Child>,
    /// The last migration's report.
    pub report: Option<Report>,
}

impl Droveway {
    /// A contender with these options.
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self { options, spec: None, agents: Vec::new(), adopted: None, report: None }
    }

    fn failed(&self, reason: impl Into<String>) -> LabError {
        LabError::Migration { contender: self.name(), reason: reason.into() }
    }

    /// Starts a guest from a snapshot, as its owner would, and has the agent adopt it.
    fn adopt(&mut self, ground: &Ground<'_>, spec: &GuestSpec, from: &str) -> Result<Guest> {
        let host = &ground.hosts.a;
        let socket = format!("{RUN_DIR}/{}.own", spec.name);
        let argv = spec.argv(ground.kit, &ground.kit.qemu);
        let mut command = host.command(&argv[0]);
        command.args(&argv[1..]).args(["-qmp", &format!("unix:{socket},server=on,wait=off")]);
        command.args(["-incoming", from]).stdin(Stdio::null());
        self.adopted = Some(command.spawn().doing("start QEMU")?);
        let guest = ground.meet(spec, || field::monitor(host, &spec.name))?;
        let attach = ["attach", &spec.name, "--qmp", &socket];
        program::output(&mut self.agents[0].command(host, &attach))?;
        Ok(guest)
    }

    /// What `droveway predict` expects of the move, if that is requested.
    fn predict(&self, ground: &Ground<'_>, vm: &str, goal: &str) -> Result<Option<Prediction>> {
        let Link { nics, mbit_per_s } = ground.hosts.link;
        let Some(mbit) = mbit_per_s.filter(|_| std::env::var_os(PREDICT_VARIABLE).is_some()) else {
            return Ok(None);
        };
        let rate = format!("{}M", u64::from(mbit) * u64::from(nics));
        let arguments =
            ["predict", vm, "host-b", "--json", "--downtime-ms", goal, "--rate", rate.as_str()];
        let text = program::output(&mut self.agents[0].command(&ground.hosts.a, &arguments))?;
        let prediction = serde_json::from_str(&text);
        prediction.map(Some).map_err(|_| LabError::Text { what: "a prediction", text })
    }
}

/// What was predicted of a move next to what it took.
fn compared(predicted: &Outlook, took_s: f64) -> String {
    let Outlook { total_s, most_s, .. } = *predicted;
    let most_s = most_s.unwrap_or(total_s).max(total_s);
    format!("predicted {total_s:.1} to {most_s:.1} s, took {took_s:.1} s")
}

impl Contender for Droveway {
    fn name(&self) -> String {
        match &self.options.variant {
            Some(variant) => format!("droveway-{variant}"),
            None => "droveway".to_owned(),
        }
    }

    fn start(&mut self, ground: &Ground<'_>, spec: &GuestSpec) -> Result<Guest> {
        let hosts = ground.hosts;
        let tls = if self.options.tls { certify(hosts)?.to_vec() } else { Vec::new() };
        // The command line of an adopted QEMU has lost what the kit's wrapper sets.
        let environment = ground.from.and_then(|_| ground.kit.own_qemu().environment());
        let by: Vec<&str> = environment.iter().flat_map(|set| ["env", set.as_str()]).collect();
        for host in [&hosts.a, &hosts.b] {
            let speed = hosts.link.mbit_per_s.filter(|_| self.options.nic_speeds);
            let speeds = nic_speeds(host, speed);
            let more: Vec<&str> = tls.iter().chain(&speeds).map(String::as_str).collect();
            self.agents.push(Agent::start_with(hosts, host, &by, &more)?);
        }
        self.spec = Some(spec.clone());
        if let Some(from) = ground.from {
            return self.adopt(ground, spec, from);
        }
        let argv = spec.argv(ground.kit, &ground.kit.qemu);
        let mut run = self.agents[0].command(&ground.hosts.a, &["run", &spec.name, "--"]);
        program::output(run.args(&argv))?;
        let guest = Guest::meet(spec.clone(), &ground.hosts.a)?;
        if self.options.rests {
            wait_scanned(&self.agents[0], &ground.hosts.a, &spec.name)?;
        }
        Ok(guest)
    }

    fn migrate(&mut self, ground: &Ground<'_>) -> Result<Moved> {
        let spec = self.spec.as_ref().ok_or_else(|| self.failed("no guest"))?;
        let goal = ground.downtime_goal.as_millis().to_string();
        let prediction = self.predict(ground, &spec.name, &goal)?;
        let mut command = self.agents[0].command(
            &ground.hosts.a,
            &["migrate", &spec.name, "host-b", "--json", "--downtime-ms", &goal],
        );
        command.args(&self.options.arguments);
        let started = Instant::now();
        let output = within(&mut command, ground.timeout)?;
        let ended = Instant::now();
        let report = report(&output).ok_or_else(|| {
            self.failed(format!(
                "no report: {} {}",
                String::from_utf8_lossy(&output.stderr),
                self.agents[0].log_text()
            ))
        })?;
        self.report = Some(report.clone());
        if report.outcome == Outcome::Cancelled && ended - started >= ground.timeout {
            return Err(LabError::Late { contender: self.name(), waited: ground.timeout });
        }
        if report.outcome != Outcome::Done {
            return Err(self.failed(format!("{:?}", report.outcome)));
        }
        if let Some(Prediction { free, slowed, .. }) = prediction {
            let outlook = if free.met { free } else { slowed };
            println!("  {}: {}", self.name(), compared(&outlook, report.total_s));
        }
        Ok(moved(&report, started, ended))
    }

    fn report(&self) -> Option<&Report> {
        self.report.as_ref()
    }

    fn agents_peak_bytes(&self) -> Option<[u64; 2]> {
        let [source, destination] = &self.agents[..] else { return None };
        Some([peak_bytes(source.pid())?, peak_bytes(destination.pid())?])
    }

    fn stop(&mut self) {
        self.agents.clear();
        if let Some(mut qemu) = self.adopted.take() {
            let _ = qemu.kill();
            let _ = qemu.wait();
        }
    }
}

/// Waits until a host's agent has scanned all that a VM holds now.
pub(super) fn wait_scanned(agent: &Agent, host: &Host, vm: &str) -> Result<()> {
    let rounds = || -> Result<u64> {
        let shown = program::output(&mut agent.command(host, &["show", vm, "--json"]))?;
        let shown = serde_json::from_str::<api::VmSummary>(&shown);
        let shown = shown
            .map_err(|error| LabError::Text { what: "a VM's JSON", text: error.to_string() })?;
        Ok(shown.content.map_or(0, |content| content.rounds))
    };
    // The current round may have started before.
    let expected = rounds()? + 2;
    let end = Instant::now() + SCANNED_MAX;
    while rounds()? < expected {
        if Instant::now() >= end {
            let contender = format!("the scan of {vm}");
            return Err(LabError::Late { contender, waited: SCANNED_MAX });
        }
        std::thread::sleep(SCANNED_EVERY);
    }
    Ok(())
}

/// Peak memory of a process.
fn peak_bytes(pid: u32) -> Option<u64> {
    memory(pid, "VmHWM:")
}

/// The kernel's figure of this name.
fn memory(pid: u32, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// Times of a migration whose command ran between these instants.
pub(super) fn moved(report: &Report, started: Instant, ended: Instant) -> Moved {
    // The report's clock runs from the request to the end; the rest is the start of the command
    // itself, which counts as well.
    let prepare = Duration::from_secs_f64(report.prepare_s);
    let ran_s = report.phases.last().map_or(report.total_s, |phase| phase.start_s);
    let after = Duration::from_secs_f64((report.total_s - ran_s).max(0.0));
    Moved {
        began: started + prepare,
        ran: ended.checked_sub(after).unwrap_or(ended),
        prepare,
        downtime: Duration::from_secs_f64(report.downtime_ms.unwrap_or(0.0) / 1e3),
        passes: Some(report.passes.into()),
    }
}

/// The report that `migrate --json` prints.
pub(super) fn report(output: &Output) -> Option<Report> {
    serde_json::from_slice(&output.stdout).ok()
}

/// Runs a command; after the timeout it is interrupted, as by Ctrl-C.
pub(super) fn within(command: &mut Command, timeout: Duration) -> Result<Output> {
    let child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().doing("run droveway")?;
    let pid = child.id();
    let (done, over) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if over.recv_timeout(timeout) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            interrupt(pid);
        }
    });
    let output = child.wait_with_output().doing("run droveway");
    drop(done);
    let _ = watch.join();
    output
}

fn interrupt(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prediction_is_a_range_if_compression_makes_a_difference() {
        let of = |most_s| {
            let outlook = Outlook { total_s: 8.0, most_s, bytes: 1, downtime_ms: 30.0, met: true };
            compared(&outlook, 9.26)
        };
        assert_eq!(of(Some(9.5)), "predicted 8.0 to 9.5 s, took 9.3 s");
        assert_eq!(of(None), "predicted 8.0 to 8.0 s, took 9.3 s");
    }
}
