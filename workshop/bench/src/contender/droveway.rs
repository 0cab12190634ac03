//! Droveway: an agent on each host, and its command.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use api::{Outcome, Report};

use super::{Contender, Ground, Moved};
use lab::agent::{Agent, peer_name};
use lab::certificates::Certificates;
use lab::error::{LabError, Result, SystemContext};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Host, Hosts};
use lab::program;

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
    /// The last migration's report.
    pub report: Option<Report>,
}

impl Droveway {
    /// A contender with these options.
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self { options, spec: None, agents: Vec::new(), report: None }
    }

    fn failed(&self, reason: impl Into<String>) -> LabError {
        LabError::Migration { contender: self.name(), reason: reason.into() }
    }
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
        for host in [&hosts.a, &hosts.b] {
            let speed = hosts.link.mbit_per_s.filter(|_| self.options.nic_speeds);
            let speeds = nic_speeds(host, speed);
            let more: Vec<&str> = tls.iter().chain(&speeds).map(String::as_str).collect();
            self.agents.push(Agent::start_with(hosts, host, &[], &more)?);
        }
        let argv = spec.argv(ground.kit, &ground.kit.qemu);
        let mut run = self.agents[0].command(&ground.hosts.a, &["run", &spec.name, "--"]);
        program::output(run.args(&argv))?;
        self.spec = Some(spec.clone());
        Guest::meet(spec.clone(), &ground.hosts.a)
    }

    fn migrate(&mut self, ground: &Ground<'_>) -> Result<Moved> {
        let spec = self.spec.as_ref().ok_or_else(|| self.failed("no guest"))?;
        let goal = ground.downtime_goal.as_millis().to_string();
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
    }
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
