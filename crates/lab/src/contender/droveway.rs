//! Droveway: an agent on each host, and its command. Tests use the same.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use api::{Outcome, Report};
use qemu::programs::USUAL;

use super::{Contender, Ground, Moved};
use crate::certificates::Certificates;
use crate::error::{FileContext, LabError, Result, SystemContext};
use crate::guest::{Guest, GuestSpec};
use crate::hosts::{Host, Hosts, RUN_DIR};
use crate::{program, setup};

const PORT: u16 = 7800;
/// What says which programs other hosts can have started.
const PROGRAMS: &str = "--qemu-programs";
/// An agent listens within a tenth of a second.
const UP_MAX: Duration = Duration::from_secs(20);

/// The `droveway` that stands beside the running program, or `DROVEWAY`.
#[must_use]
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("DROVEWAY") {
        return path.into();
    }
    let here = std::env::current_exe().unwrap_or_default();
    // A test's program is one directory deeper.
    here.ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join("droveway"))
        .find(|path| path.is_file())
        .unwrap_or_else(|| "droveway".into())
}

/// An agent on a host. Dropping it kills it, and leaves its VMs running.
pub struct Agent {
    child: Child,
    host_name: String,
    api: String,
    log: PathBuf,
}

/// The name that a host has in the peers file.
fn peer_name(hosts: &Hosts, host: &Host) -> &'static str {
    if host.name == hosts.a.name { "host-a" } else { "host-b" }
}

fn peers(hosts: &Hosts) -> String {
    let entry = |host: &Host| peer_entry(peer_name(hosts, host), host);
    entry(&hosts.a) + &entry(&hosts.b)
}

/// What the peers file says of a host.
pub(super) fn peer_entry(name: &str, host: &Host) -> String {
    let nics: Vec<_> = host.addresses.iter().map(|nic| format!("\"{nic}\"")).collect();
    let (address, nics) = (host.addresses[0], nics.join(", "));
    format!("[[host]]\nname = \"{name}\"\naddress = \"{address}:{PORT}\"\nnics = [{nics}]\n")
}

/// The usual ones, and the lab's own; nothing for an older agent, which starts what it
/// is told to start.
fn programs(binary: &Path) -> Result<Vec<String>> {
    let own = setup::newer_qemu().map(|path| path.display().to_string());
    let listed = USUAL.map(str::to_owned).into_iter().chain(own);
    let words: Vec<String> = listed.flat_map(|place| [PROGRAMS.to_owned(), place]).collect();
    let asked = program::run(Command::new(binary).arg("agent").args(&words).arg("--help"))?;
    Ok(if asked.status.success() { words } else { Vec::new() })
}

impl Agent {
    /// Starts an agent on `host`, and waits until it answers.
    ///
    /// # Errors
    /// If it doesn't come up; with the end of its log.
    pub fn start(hosts: &Hosts, host: &Host) -> Result<Self> {
        Self::start_by(hosts, host, &[])
    }

    /// Starts an agent by a program that becomes it, such as `setpriv` with
    /// its options, and waits until it answers.
    ///
    /// # Errors
    /// As [`Agent::start`].
    pub fn start_by(hosts: &Hosts, host: &Host, by: &[&str]) -> Result<Self> {
        Self::start_with(hosts, host, by, &[])
    }

    /// The same, with more arguments of its own: they stand in for what it would
    /// be told. With `--tls` it speaks TLS (see [`Certificates`]), else plaintext.
    ///
    /// # Errors
    /// As [`Agent::start`].
    pub fn start_with(hosts: &Hosts, host: &Host, by: &[&str], more: &[&str]) -> Result<Self> {
        Self::start_as(peer_name(hosts, host), host, &peers(hosts), by, more)
    }

    /// The same among other hosts, as the peers file has them.
    ///
    /// # Errors
    /// As [`Agent::start`].
    pub fn start_as(
        name: &str,
        host: &Host,
        peers: &str,
        by: &[&str],
        more: &[&str],
    ) -> Result<Self> {
        let outside = |name: &str| host.run_dir.join(name);
        std::fs::write(outside("peers.toml"), peers).at("write", outside("peers.toml"))?;
        let log = outside("agent.log");
        let log_file = std::fs::OpenOptions::new().create(true).append(true).open(&log);
        let log_file = log_file.at("open", &log)?;
        let inside = |name: &str| format!("{RUN_DIR}/{name}");
        let binary = binary();
        let words: Vec<&OsStr> = by.iter().map(OsStr::new).chain([binary.as_os_str()]).collect();
        let mut command = host.command(words[0]);
        command.args(&words[1..]).arg("agent").args(more);
        let told = [
            ("--name", name.to_owned()),
            ("--listen", format!("0.0.0.0:{PORT}")),
            ("--peers", inside("peers.toml")),
            ("--state", inside("state")),
            ("--api", inside("api.sock")),
        ];
        for (flag, value) in told.iter().filter(|(flag, _)| !more.contains(flag)) {
            command.args([flag, value.as_str()]);
        }
        if !more.contains(&PROGRAMS) {
            command.args(programs(&binary)?);
        }
        if !more.contains(&"--tls") {
            command.arg("--insecure-plaintext");
        }
        for nic in &host.addresses {
            command.args(["--nic", &nic.to_string()]);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(log_file.try_clone().doing("copy a descriptor")?)
            .stderr(log_file)
            .spawn()
            .doing("start an agent")?;
        let mut agent = Self { child, host_name: name.to_owned(), api: inside("api.sock"), log };
        agent.wait_up(host)?;
        Ok(agent)
    }

    fn wait_up(&mut self, host: &Host) -> Result<()> {
        let until = Instant::now() + UP_MAX;
        loop {
            let answer = self.command(host, &["list"]).output().doing("run droveway")?;
            if answer.status.success() {
                return Ok(());
            }
            let ended = self.child.try_wait().doing("wait for the agent")?;
            if ended.is_some() || Instant::now() > until {
                return Err(LabError::Silent {
                    what: format!("the agent of {}", self.host_name),
                    waited: UP_MAX,
                    detail: format!("; its log: {}", self.log_text()),
                });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// `droveway` on its host, talking to it.
    #[must_use]
    pub fn command(&self, host: &Host, args: &[&str]) -> Command {
        let mut command = host.command(binary());
        command.arg("--api").arg(&self.api).args(args).stdin(Stdio::null());
        command
    }

    /// The name of its host.
    #[must_use]
    pub fn host_name(&self) -> &str {
        &self.host_name
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Kills it, as a crash would.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The end of what it logged.
    #[must_use]
    pub fn log_text(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(4000)..]).into_owned()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
    }
}

/// How Droveway is told to migrate.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// What the contender is called, after `droveway-`.
    pub variant: Option<String>,
    /// Arguments for `droveway migrate`.
    pub arguments: Vec<String>,
    /// Whether agents are told what their NICs carry.
    pub nic_speeds: bool,
    /// Whether its agents speak TLS.
    pub tls: bool,
}

/// What an agent is told of its NICs.
fn nic_speeds(host: &Host, mbit_per_s: Option<u32>) -> Vec<String> {
    let Some(mbit) = mbit_per_s else { return Vec::new() };
    host.addresses.iter().map(|nic| format!("--nic-speed={nic}={mbit}M")).collect()
}

/// Gives both hosts what their agents need to speak TLS, and says with which
/// arguments they do.
fn certify(hosts: &Hosts) -> Result<[String; 2]> {
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
    /// With these options.
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

    fn stop(&mut self) {
        self.agents.clear();
    }
}

/// A migration that was asked for and ended between these.
pub(super) fn moved(report: &Report, started: Instant, ended: Instant) -> Moved {
    // The report's clock runs from the request to the end; what is left is
    // the command's own start, which counts as well.
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
