//! Two hosts with agents, and a test's commands and questions to them.

mod agents;
mod guests;
mod moves;
mod upgrades;

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use api::{Audited, VmStatus, VmSummary};
use lab::agent::Agent;
use lab::certificates::Certificates;
use lab::fatal::{Kind, fatal};
use lab::guest::{Checked, Guest, GuestSpec};
use lab::hosts::{Host, Hosts, Link};
use lab::setup::{self, Accelerator, Kit};
use serde::de::DeserializeOwned;

use crate::browser::ask;

pub(crate) use agents::know_qemu;
pub use guests::{bare, guest, own_qmp_argument, twin};

/// Longest time until a change shows, also where other tests have the CPUs.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// A scanner that gets next to no CPU time has scanned a small VM by then.
const LOOK_MAX: Duration = Duration::from_secs(120);
/// Shortest and longest pause between two looks at a state.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(200);
/// How many times as long as a look the pause after it is: looks that run a command would take a
/// third of a core otherwise.
const PAUSE_LOOKS: u32 = 5;

/// One of the two hosts. VMs start at A.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// `host-a`.
    A,
    /// `host-b`.
    B,
}

impl Side {
    /// The host's name, as in the peers file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::A => "host-a",
            Self::B => "host-b",
        }
    }

    /// The host itself.
    #[must_use]
    pub fn of(self, hosts: &Hosts) -> &Host {
        match self {
            Self::A => &hosts.a,
            Self::B => &hosts.b,
        }
    }

    /// The other side.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// Two hosts, an agent on each.
pub struct World {
    agents: [Agent; 2],
    /// Usual arguments of both.
    usual: Vec<String>,
    /// The program that starts them, with its arguments.
    by: Vec<String>,
    /// The hosts.
    pub hosts: Hosts,
    /// QEMU, and what guests need.
    pub kit: Kit,
}

/// Waits for a state that no event reports.
///
/// # Panics
/// If it isn't reached in time.
pub fn until(what: &str, is_so: impl FnMut() -> bool) {
    assert!(reached(is_so), "not within {SETTLE_MAX:?}: {what}");
}

/// Waits until nothing is left of something that has ended.
///
/// # Panics
/// If it isn't reached in time; no repetition excuses that.
pub(crate) fn until_gone(what: &str, is_so: impl FnMut() -> bool) {
    if !reached(is_so) {
        fatal(Kind::LeftBehind, format_args!("not within {SETTLE_MAX:?}: {what}"));
    }
}

/// Whether a state that no event reports is reached in time.
pub fn reached(mut is_so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + SETTLE_MAX;
    loop {
        let started = Instant::now();
        if is_so() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep((started.elapsed() * PAUSE_LOOKS).clamp(PAUSE_MIN, PAUSE_MAX));
    }
}

/// Asserts that a guest has read back what it wrote.
///
/// # Panics
/// If a page is wrong; no repetition excuses that.
pub fn assert_no_page_is_wrong(checked: &Checked) {
    if checked.wrong > 0 {
        let hint = "if the last move's audit was clean, QEMU never handed over what is missing";
        fatal(Kind::WrongPage, format_args!("{checked:?}; {hint}"));
    }
}

/// The threads of a process, and where in the kernel each of them waits.
fn threads(pid: u32) -> Vec<String> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let one = |task: &Path| {
        let [name, waits, call] = ["comm", "wchan", "syscall"].map(|file| read(&task.join(file)));
        format!("{} {waits} {}", name.trim(), call.trim())
    };
    tasks.flatten().map(|task| one(&task.path())).collect()
}

/// How a guest isn't as it must be.
struct Broken {
    kind: Kind,
    detail: String,
}

/// Looks whether a guest runs, has run once, and its memory holds what it wrote.
fn examine(guest: &Guest) -> Result<(), Broken> {
    let broken = |kind, detail| Err(Broken { kind, detail });
    if let Err(error) = guest.wait_beat(SETTLE_MAX) {
        return broken(Kind::VmLost, error.to_string());
    }
    let checked = guest.check().unwrap();
    if checked.wrong > 0 {
        return broken(Kind::WrongPage, format!("{checked:?}"));
    }
    let pulse = guest.pulse();
    if pulse.twice > 0 {
        let detail = format!(
            "{} beats were received twice, {} of them from its former host while it ran at its \
             new one",
            pulse.twice, pulse.behind
        );
        return broken(Kind::RanTwice, detail);
    }
    let orders = &guest.spec.orders;
    let filled = orders.random_bytes
        + orders.text_bytes
        + orders.zero_bytes
        + orders.working_set_bytes
        + orders.file_bytes;
    assert_eq!(checked.pages, filled / 4096, "{checked:?}");
    Ok(())
}

/// Asserts that a guest runs, has run once, and that its memory holds what it wrote.
///
/// # Panics
/// If it is silent, was heard twice, or a page is wrong; no repetition excuses that.
pub fn assert_intact(guest: &Guest) {
    if let Err(Broken { kind, detail }) = examine(guest) {
        fatal(kind, detail);
    }
}

/// The same for a guest that has just moved. If the audit proves that each page is at the
/// destination as QEMU handed it over, then what is missing was never handed over, and no code of
/// ours can have lost it: QEMU's TCG has (docs/TESTING-RESULTS.md, "Wrong pages"). A repetition excuses
/// that.
///
/// # Panics
/// As [`assert_intact`].
pub(crate) fn assert_arrived(guest: &Guest, kit: &Kit, audit: &Audited) {
    if let Err(broken) = examine(guest) {
        fail_arrived(&broken, guest, kit, audit);
    }
}

/// What to conclude if the guest finds wrong pages after a migration with this audit.
fn explains_wrong_pages(audit: &Audited) -> &'static str {
    match audit {
        Audited::Nothing { .. } => "its migration was not audited: what lost them is not known",
        Audited::Same { unproved_pages: 1.., .. } => {
            "its migration's audit could not prove all pages: what lost them is not known"
        }
        Audited::Same { .. } => {
            "its migration's audit was clean: QEMU never handed over what is missing"
        }
        Audited::Differences { .. } => {
            "its migration's audit found differences: Droveway lost them"
        }
    }
}

/// Fails as [`assert_arrived`] does.
fn fail_arrived(Broken { kind, detail }: &Broken, guest: &Guest, kit: &Kit, audit: &Audited) -> ! {
    let is_proved = matches!(audit, Audited::Same { reread_pages: 1.., unproved_pages: 0, .. });
    let accelerator = guest.spec.accelerator.unwrap_or(kit.accelerator);
    if !is_proved || accelerator == Accelerator::Kvm || guest.pulse().behind > 0 {
        fatal(*kind, format_args!("{detail}; {}", explains_wrong_pages(audit)));
    }
    panic!("{kind}: {detail}; the audit is clean: QEMU's TCG did not hand over what was written");
}

/// Waits until all that a VM holds now was scanned.
pub(crate) fn wait_looked_at(name: &str, show: impl Fn() -> VmSummary) {
    let rounds = || show().content.map_or(0, |content| content.rounds);
    // The current round may have started before.
    let wanted = rounds() + 2;
    // The scan runs only when nothing else wants the CPU.
    let end = Instant::now() + LOOK_MAX;
    while rounds() < wanted {
        assert!(Instant::now() < end, "{name} is not looked at");
        std::thread::sleep(PAUSE_MAX);
    }
}

impl World {
    /// Makes the hosts, with this link between them, and their agents.
    ///
    /// # Panics
    /// If that fails; all functions of this file panic on failure.
    #[must_use]
    pub fn new(link: Link) -> Self {
        Self::with(link, |_| Vec::new())
    }

    /// The same with the usual arguments of agents, which may need files on these hosts.
    fn with(link: Link, usual: impl FnOnce(&Hosts) -> Vec<String>) -> Self {
        let kit = setup::ensure().unwrap();
        let hosts = Hosts::new(link).unwrap();
        [&hosts.a, &hosts.b].into_iter().for_each(know_qemu);
        let usual = usual(&hosts);
        let words: Vec<&str> = usual.iter().map(String::as_str).collect();
        let words = agents::scanning_slowly(&words);
        let start = |host| Agent::start_with(&hosts, host, &[], &words).unwrap();
        let agents = [&hosts.a, &hosts.b].map(start);
        Self { agents, usual, by: Vec::new(), hosts, kit }
    }

    /// The same with certificates, which agents use whenever they start.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn secured(link: Link) -> (Self, Certificates) {
        let certificates = Certificates::new().unwrap();
        let world = Self::with(link, |hosts| {
            for side in [Side::A, Side::B] {
                certificates.give(side.of(hosts), side.name()).unwrap();
            }
            vec!["--tls".to_owned(), Certificates::place()]
        });
        (world, certificates)
    }

    /// Makes hosts with this root, which boot their own systems, and whose agents are those of the
    /// package.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn installed(link: Link, root: &Path) -> Self {
        let kit = setup::ensure().unwrap();
        let qemu = PathBuf::from(setup::HOSTS_QEMU);
        let kit = Kit { qemu_system: qemu.clone(), qemu, ..kit };
        let mut hosts = Hosts::new(link).unwrap();
        hosts.boot(root).unwrap();
        let agents = Agent::installed(&hosts).unwrap();
        Self { agents, usual: Vec::new(), by: Vec::new(), hosts, kit }
    }

    /// Boots a guest on A with the lab's QEMU.
    #[must_use]
    pub fn boot(&self, spec: &GuestSpec) -> Guest {
        self.boot_with(spec, &self.kit.qemu)
    }

    /// Boots a guest on A with this QEMU.
    ///
    /// # Panics
    /// If it stays silent.
    #[must_use]
    pub fn boot_with(&self, spec: &GuestSpec, qemu: &Path) -> Guest {
        self.boot_by(spec, qemu, &[])
    }

    /// The same, with these options of `droveway run`.
    ///
    /// # Panics
    /// If it stays silent.
    #[must_use]
    pub fn boot_by(&self, spec: &GuestSpec, qemu: &Path, options: &[&str]) -> Guest {
        self.run(spec, qemu, options);
        Guest::meet(spec.clone(), &self.hosts.a).unwrap()
    }

    /// Has the agent on A start a guest's QEMU.
    pub fn run(&self, spec: &GuestSpec, qemu: &Path, options: &[&str]) {
        let argv = spec.argv(&self.kit, qemu);
        let mut run = vec!["run", spec.name.as_str()];
        run.extend(options);
        run.push("--");
        run.extend(argv.iter().map(String::as_str));
        self.says(Side::A, &run);
    }

    /// Has the agent on a host start a guest's QEMU, with the lab's QEMU and the owner's socket.
    pub fn run_at(&self, side: Side, spec: &GuestSpec) {
        let argv = spec.argv(&self.kit, &self.kit.qemu);
        let own = own_qmp_argument(&spec.name);
        let words = argv.iter().chain(&own).map(String::as_str);
        let run: Vec<&str> = ["run", spec.name.as_str(), "--"].into_iter().chain(words).collect();
        self.says(side, &run);
    }

    fn output(&self, side: Side, args: &[&str]) -> Output {
        self.agent(side).command(self.host(side), args).output().unwrap()
    }

    /// The output of a command, which must succeed.
    ///
    /// # Panics
    /// If it fails.
    #[must_use]
    pub fn tells(&self, side: Side, args: &[&str]) -> String {
        let output = self.output(side, args);
        let said = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let log = self.agent(side).log_text();
        assert!(output.status.success(), "{args:?}: {}\n{log}", said(&output.stderr));
        said(&output.stdout)
    }

    /// Runs a command, which must succeed.
    pub fn says(&self, side: Side, args: &[&str]) {
        drop(self.tells(side, args));
    }

    /// The reason why a command fails, which it must, with exit code 1.
    ///
    /// # Panics
    /// If it succeeds, or gives no reason.
    #[must_use]
    pub fn refuses(&self, side: Side, args: &[&str]) -> String {
        let output = self.output(side, args);
        let said = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let text = said(&output.stdout) + &said(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {text}");
        assert!(!text.trim().is_empty(), "{args:?} fails without a reason");
        text
    }

    /// The VMs of a host.
    ///
    /// # Panics
    /// If its agent does not answer.
    #[must_use]
    pub fn vms(&self, side: Side) -> Vec<VmSummary> {
        self.get(side, "/v1/vms")
    }

    /// What a path of an agent's API has. For states that are polled: each command is a process.
    pub(crate) fn get<T: DeserializeOwned>(&self, side: Side, path: &str) -> T {
        let log = || self.agent(side).log_text();
        let stream = UnixStream::connect(self.host(side).path(self.agent(side).api()));
        let stream = stream.unwrap_or_else(|error| panic!("{path}: {error}\n{}", log()));
        stream.set_read_timeout(Some(SETTLE_MAX)).unwrap();
        let (status, body) = ask(&stream, "GET", path, "", "");
        assert_eq!(status, 200, "{path}: {body}\n{}", log());
        serde_json::from_str(&body).unwrap()
    }

    /// One VM of a host.
    #[must_use]
    pub fn vm(&self, side: Side, name: &str) -> Option<VmSummary> {
        self.vms(side).into_iter().find(|vm| vm.name == name)
    }

    /// Waits until a VM's QEMU is known to have ended.
    ///
    /// # Panics
    /// If it is not shown as dead.
    pub fn wait_dead(&self, side: Side, name: &str) {
        let end = Instant::now() + SETTLE_MAX;
        loop {
            let shown = self.vm(side, name);
            if shown.as_ref().is_some_and(|vm| vm.status == VmStatus::Dead) {
                return;
            }
            assert!(
                Instant::now() < end,
                "not dead, but {shown:?}\nits threads: {:?}\n{}",
                shown.as_ref().map(|vm| threads(vm.pid)),
                self.agent(side).log_text()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until a host's agent has scanned all that a VM holds now.
    ///
    /// # Panics
    /// If it doesn't scan it.
    pub fn wait_looked_at(&self, side: Side, name: &str) {
        wait_looked_at(name, || self.shown(side, name));
    }

    /// A VM with all that a host's agent knows of it.
    ///
    /// # Panics
    /// If it doesn't exist.
    #[must_use]
    pub fn shown(&self, side: Side, name: &str) -> VmSummary {
        self.get(side, &format!("/v1/vms/{name}"))
    }
}
