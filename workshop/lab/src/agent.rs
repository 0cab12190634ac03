//! Droveway's agents on hosts.

use std::ffi::OsStr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use qemu::programs::USUAL;

use crate::error::{FileContext, LabError, Result, SystemContext};
use crate::fatal::{self, Kind};
use crate::hosts::{Host, Hosts, RUN_DIR, RackHost, Racks};
use crate::{program, setup, systemd};

const PORT: u16 = 7800;
/// The unit of our package, and where its agent has its API and its state.
const UNIT: &str = "droveway.service";
const UNITS_API: &str = "/run/droveway/api.sock";
const UNITS_STATE: &str = "/var/lib/droveway";
const ROOTS_HOME: &str = "/root";
/// The option that names programs which other hosts can have started.
const PROGRAMS: &str = "--qemu-programs";
/// The option without which no VM moves whose QEMU loses writes under TCG. The lab moves such VMs
/// too, with sizes of which none are lost.
const ACCEPT: &str = "--accept-lost-writes";
/// An agent usually listens within a tenth of a second.
const UP_MAX: Duration = Duration::from_secs(60);

/// `DROVEWAY`, or the `droveway` next to the running program.
#[must_use]
pub fn binary() -> PathBuf {
    std::env::var_os("DROVEWAY").map_or_else(built, PathBuf::from)
}

/// The `droveway` that was built with the running program.
fn built() -> PathBuf {
    let here = std::env::current_exe().unwrap_or_default();
    // A test's program is one directory deeper.
    here.ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join("droveway"))
        .find(|path| path.is_file())
        .unwrap_or_else(|| "droveway".into())
}

/// What runs an agent.
enum Runner {
    /// The lab.
    Lab { child: Child, log: PathBuf },
    /// The unit of its package, on the host of this systemd, as this machine numbers that; and the
    /// agent's own process, as the host does.
    Unit { systemd: u32, pid: u32 },
}

/// An agent on a host. Dropping it kills it, unless its host's system runs it, and leaves its VMs
/// running.
pub struct Agent {
    runner: Runner,
    binary: PathBuf,
    host_name: String,
    api: String,
    state: String,
    /// Whether its commands have [`ACCEPT`], which those of earlier releases have not.
    accepts: bool,
}

/// The name that a host has in the peers file.
#[must_use]
pub fn peer_name(hosts: &Hosts, host: &Host) -> &'static str {
    if host.name == hosts.a.name { "host-a" } else { "host-b" }
}

/// The entries of both hosts in the peers file.
#[must_use]
pub fn peers(hosts: &Hosts) -> String {
    let entry = |host: &Host| peer_entry(peer_name(hosts, host), host);
    entry(&hosts.a) + &entry(&hosts.b)
}

/// The entry of a host in the peers file.
fn peer_entry(name: &str, host: &Host) -> String {
    let nics: Vec<_> = host.addresses.iter().map(|nic| format!("\"{nic}\"")).collect();
    let (address, nics) = (host.addresses[0], nics.join(", "));
    format!("[[host]]\nname = \"{name}\"\naddress = \"{address}:{PORT}\"\nnics = [{nics}]\n")
}

/// Options for the usual programs and the lab's own; none for an older agent, which starts whatever
/// program it is told to.
fn programs(binary: &Path) -> Result<Vec<String>> {
    let own = setup::own_qemus().into_iter().map(|path| path.display().to_string());
    let listed = USUAL.map(str::to_owned).into_iter().chain(own);
    let words: Vec<String> = listed.flat_map(|place| [PROGRAMS.to_owned(), place]).collect();
    Ok(if takes(binary, "agent", &words)? { words } else { Vec::new() })
}

/// Whether a command of this program has these options. One that was built elsewhere is asked,
/// once.
fn takes(binary: &Path, command: &'static str, words: &[String]) -> Result<bool> {
    if binary.is_absolute() && binary == built() {
        return Ok(true);
    }
    static ASKED: Mutex<Vec<(PathBuf, &str, bool)>> = Mutex::new(Vec::new());
    let asked = || ASKED.lock().unwrap_or_else(PoisonError::into_inner);
    let is_it = |(path, of, _): &&(PathBuf, &str, bool)| path == binary && *of == command;
    let known = asked().iter().find(is_it).map(|(.., takes)| *takes);
    if let Some(takes) = known {
        return Ok(takes);
    }
    let help = program::run(Command::new(binary).arg(command).args(words).arg("--help"))?;
    let takes = help.status.success();
    asked().push((binary.to_owned(), command, takes));
    Ok(takes)
}

/// Whether a command moves VMs.
fn moves(args: &[&str]) -> bool {
    matches!(args, ["migrate" | "gang" | "evacuate" | "upgrade", ..]) && !args.contains(&"--resume")
}

impl Agent {
    /// Starts an agent on `host`, and waits until it answers.
    ///
    /// # Errors
    /// If it doesn't come up; with the end of its log.
    pub fn start(hosts: &Hosts, host: &Host) -> Result<Self> {
        Self::start_by(hosts, host, &[])
    }

    /// Starts an agent by a program that executes it, such as `setpriv` with its options, and waits
    /// until it answers.
    ///
    /// # Errors
    /// As [`Agent::start`].
    pub fn start_by(hosts: &Hosts, host: &Host, by: &[&str]) -> Result<Self> {
        Self::start_with(hosts, host, by, &[])
    }

    /// The same, with more arguments, which replace the default ones. With `--tls` it speaks TLS
    /// (see [`Certificates`]), else plaintext.
    ///
    /// # Errors
    /// As [`Agent::start`].
    pub fn start_with(hosts: &Hosts, host: &Host, by: &[&str], more: &[&str]) -> Result<Self> {
        Self::start_as(peer_name(hosts, host), host, &peers(hosts), by, more)
    }

    /// The same among other hosts, which the peers file lists.
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
        Self::start_program(binary(), (name, host, peers), by, more)
    }

    /// The same with another `droveway`.
    ///
    /// # Errors
    /// As [`Agent::start`].
    pub fn start_program(
        binary: PathBuf,
        (name, host, peers): (&str, &Host, &str),
        by: &[&str],
        more: &[&str],
    ) -> Result<Self> {
        let outside = |name: &str| host.run_dir.join(name);
        std::fs::write(outside("peers.toml"), peers).at("write", outside("peers.toml"))?;
        let accepts = takes(&binary, "migrate", &[ACCEPT.to_owned()])?;
        let log = outside("agent.log");
        let log_file = std::fs::OpenOptions::new().create(true).append(true).open(&log);
        let log_file = log_file.at("open", &log)?;
        let inside = |name: &str| format!("{RUN_DIR}/{name}");
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
        let (host_name, runner) = (name.to_owned(), Runner::Lab { child, log });
        let (api, state) = (inside("api.sock"), inside("state"));
        let mut agent = Self { runner, binary, host_name, api, state, accepts };
        agent.wait_up(host)?;
        Ok(agent)
    }

    /// Sets up two hosts on which our package is installed, and starts their agents, by the commands
    /// of docs/operations/install.md.
    ///
    /// # Errors
    /// If one fails.
    pub fn installed(hosts: &Hosts) -> Result<[Self; 2]> {
        let home = Path::new(ROOTS_HOME);
        let droveway = |host: &Host, args: &[&str]| {
            program::output(host.command_in(home, "droveway").args(args))
        };
        let Hosts { a, b, .. } = hosts;
        let entry = |host: &Host| format!("{}={}", peer_name(hosts, host), host.addresses[0]);
        droveway(a, &["init", &entry(a), &entry(b)])?;
        droveway(a, &["init", "--from", "droveway-ca/host-a.tar"])?;
        let archive = a.path(ROOTS_HOME).join("droveway-ca/host-b.tar");
        let copy = b.path(ROOTS_HOME).join("host-b.tar");
        std::fs::copy(&archive, copy).at("copy", archive)?;
        droveway(b, &["init", "--from", "host-b.tar"])?;
        let start = |name, host| Self::by_unit(name, host, &["enable", "--now"]);
        Ok([start("host-a", a)?, start("host-b", b)?])
    }

    /// Restarts it by its unit.
    ///
    /// # Errors
    /// If its host has no systemd, or it doesn't come up.
    pub fn restart(&mut self, host: &Host) -> Result<()> {
        *self = Self::by_unit(&self.host_name, host, &["restart"])?;
        Ok(())
    }

    /// The agent of a host's unit, which these words for `systemctl` start.
    fn by_unit(name: &str, host: &Host, start: &[&str]) -> Result<Self> {
        let systemd = host.systemd().ok_or_else(|| {
            LabError::Unsupported(format!("{name} has no systemd that could run its agent"))
        })?;
        program::output(host.command("systemctl").args(start).arg(UNIT)).map_err(|error| {
            let log = journal(systemd);
            let text = format!("{error}; its log: {}", String::from_utf8_lossy(&log));
            LabError::Text { what: "the agent's unit", text }
        })?;
        let mut show = host.command("systemctl");
        let shown = program::output(show.args(["show", "--property=MainPID", "--value", UNIT]))?;
        // 0 if it does not run.
        let pid = shown.trim().parse::<u32>().ok().filter(|pid| *pid != 0);
        let pid = pid.ok_or(LabError::Text { what: "the agent's process", text: shown })?;
        let (binary, host_name) = (PathBuf::from("droveway"), name.to_owned());
        let (api, state) = (UNITS_API.to_owned(), UNITS_STATE.to_owned());
        let runner = Runner::Unit { systemd, pid };
        Ok(Self { runner, binary, host_name, api, state, accepts: false })
    }

    fn wait_up(&mut self, host: &Host) -> Result<()> {
        let until = Instant::now() + UP_MAX;
        let socket = host.path(&self.api);
        loop {
            // A command takes more CPU time than to see whether anything listens.
            if UnixStream::connect(&socket).is_ok() {
                let answer = self.command(host, &["list"]).output().doing("run droveway")?;
                if answer.status.success() {
                    return Ok(());
                }
            }
            if self.has_ended() || Instant::now() > until {
                return Err(LabError::Silent {
                    what: format!("the agent of {}", self.host_name),
                    waited: UP_MAX,
                    detail: format!("; its log: {}", self.log_text()),
                });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// A `droveway` command on its host that talks to it. VMs may move with each of the lab's
    /// QEMUs.
    #[must_use]
    pub fn command(&self, host: &Host, args: &[&str]) -> Command {
        let mut command = self.command_as_typed(host, args);
        if self.accepts && moves(args) && !args.contains(&ACCEPT) {
            command.arg(ACCEPT);
        }
        command
    }

    /// The same with no option but these.
    #[must_use]
    pub fn command_as_typed(&self, host: &Host, args: &[&str]) -> Command {
        let mut command = host.command(&self.binary);
        command.arg("--api").arg(&self.api).args(args).stdin(Stdio::null());
        command
    }

    /// The name of its host.
    #[must_use]
    pub fn host_name(&self) -> &str {
        &self.host_name
    }

    /// The path of its API's socket on its host.
    #[must_use]
    pub fn api(&self) -> &str {
        &self.api
    }

    /// The path of its state on its host.
    #[must_use]
    pub fn state(&self) -> &str {
        &self.state
    }

    /// Its process ID, as its host numbers it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        match &self.runner {
            Runner::Lab { child, .. } => child.id(),
            Runner::Unit { pid, .. } => *pid,
        }
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        match &mut self.runner {
            Runner::Lab { child, .. } => !matches!(child.try_wait(), Ok(None)),
            Runner::Unit { systemd, .. } => {
                !systemd::systemctl(*systemd, &["is-active", "--quiet", UNIT])
            }
        }
    }

    /// Kills it, as a crash would. Its unit, if it has one, starts it again.
    pub fn kill(&mut self) {
        match &mut self.runner {
            Runner::Lab { child, .. } => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Runner::Unit { systemd, .. } => {
                let _ = systemd::systemctl(*systemd, &["kill", "--signal=KILL", UNIT]);
            }
        }
    }

    /// The end of its log.
    #[must_use]
    pub fn log_text(&self) -> String {
        let text = self.log_bytes();
        String::from_utf8_lossy(&text[text.len().saturating_sub(4000)..]).into_owned()
    }

    /// All of its log.
    #[must_use]
    pub fn whole_log(&self) -> String {
        String::from_utf8_lossy(&self.log_bytes()).into_owned()
    }

    fn log_bytes(&self) -> Vec<u8> {
        match &self.runner {
            Runner::Lab { log, .. } => std::fs::read(log).unwrap_or_default(),
            Runner::Unit { systemd, .. } => journal(*systemd),
        }
    }
}

/// What the unit of an agent has logged.
fn journal(systemd: u32) -> Vec<u8> {
    let mut command = systemd::command(systemd, Path::new("/"), "journalctl");
    command.args(["--quiet", "--no-pager", "--output=cat", "--unit", UNIT]);
    program::run(&mut command).map(|output| output.stdout).unwrap_or_default()
}

/// The line about a thread that panicked by itself: tests have some panic by
/// `data_threads::point`.
fn panicked(log: &str) -> Option<&str> {
    let is_panic = |line: &str| line.starts_with("thread '") && line.contains(" panicked at ");
    log.lines().find(|line| is_panic(line) && !line.contains("data-threads/src/faults.rs"))
}

impl Drop for Agent {
    /// Kills it, unless its host's system runs it.
    ///
    /// # Panics
    /// If a thread of it had panicked.
    fn drop(&mut self) {
        // A unit would start it again.
        if matches!(self.runner, Runner::Lab { .. }) {
            self.kill();
        }
        match panicked(&self.whole_log()) {
            Some(line) if std::thread::panicking() => {
                eprintln!("\n{}", fatal::line(Kind::Panic, line));
            }
            Some(line) => fatal::fatal(Kind::Panic, line),
            None => {}
        }
    }
}

/// Starts an agent on each host of all racks.
///
/// # Errors
/// If one doesn't come up.
pub fn agents(racks: &Racks) -> Result<Vec<Agent>> {
    agents_with(racks, "", &[])
}

/// The same with more entries in the peers file, and more arguments for agents in the target rack.
///
/// # Errors
/// As [`agents`].
pub fn agents_with(racks: &Racks, others: &str, told: &[&str]) -> Result<Vec<Agent>> {
    let target = racks.targets().first().map_or("", |host| host.rack.as_str());
    let hosts = racks.hosts();
    let entry = |host: &&RackHost| {
        format!("{}rack = \"{}\"\n", peer_entry(&host.name, &host.host), host.rack)
    };
    let peers: String = hosts.iter().map(entry).chain([others.to_owned()]).collect();
    let start = |host: &&RackHost| {
        let told = if host.rack == target { told } else { &[] };
        let told = [&["--rack", host.rack.as_str()], told].concat();
        Agent::start_as(&host.name, &host.host, &peers, &[], &told)
    };
    hosts.iter().map(start).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_an_agent_is_found_unless_a_test_wanted_it() {
        let wanted =
            "thread 'disk-room' (24213) panicked at crates/data-threads/src/faults.rs:20:9:";
        assert_eq!(panicked(&format!("INFO a panic is logged\n{wanted}\n")), None);
        for own in
            ["thread 'tap-0' (7) panicked at crates/tap/src/a.rs:1:1:", "thread 'a' panicked at b"]
        {
            assert_eq!(panicked(&format!("{wanted}\n{own}\n")), Some(own));
        }
    }
}
