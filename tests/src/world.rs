//! Two hosts with agents, and what a test says to them and asks of them.

use std::fs;
use std::path::Path;
use std::process::Output;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{Outcome, Report, VmStatus, VmSummary};
use lab::agent::{Agent, peers};
use lab::certificates::Certificates;
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Host, Hosts, Link, RUN_DIR};
use lab::setup::{self, Kit};
use lab_guest::orders::Orders;
use qemu::qmp::Qmp;

use crate::moving::{Moving, audited};

/// What follows from an end that was told takes less, also where other tests have the CPUs.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// A scanner that gets next to no CPU is through with a small VM in that time.
const LOOK_MAX: Duration = Duration::from_secs(120);
const QMP_TIMEOUT: Duration = Duration::from_secs(60);

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

    /// The other one.
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
    /// Arguments of each.
    usual: Vec<String>,
    /// What starts them.
    by: Vec<String>,
    /// The hosts.
    pub hosts: Hosts,
    /// QEMU, and what guests are made of.
    pub kit: Kit,
}

/// A guest with `memory`, that holds 32 MiB of content and rewrites 16 of it
/// at `rate` bytes per second. With Linux.
#[must_use]
pub fn guest(memory: &str, rate: u64) -> GuestSpec {
    GuestSpec::new("web1", memory, orders(rate))
}

/// The same without an operating system: for all that doesn't depend on one.
#[must_use]
pub fn bare(memory: &str, rate: u64) -> GuestSpec {
    GuestSpec::bare("web1", memory, orders(rate))
}

fn orders(rate: u64) -> Orders {
    Orders {
        seed: 5,
        random_bytes: 8 << 20,
        text_bytes: 8 << 20,
        working_set_bytes: 16 << 20,
        rate,
        // A guest that wakes up a thousand times a second takes a tenth of a core under
        // TCG, with Linux; and nothing here is judged by single milliseconds.
        write_step_ms: 10,
        tick_ms: 20,
        ..Orders::default()
    }
}

/// One of those with `memory` that hold the same `common_bytes`, which do not
/// shrink, beside 8 MiB of their own that they rewrite at `rate`. With Linux, which has
/// more than that and puts it at the end: what waits in the agent's buffers when QEMU's
/// first pass ends goes without names.
#[must_use]
pub fn twin(name: &str, memory: &str, common_bytes: u64, rate: u64) -> GuestSpec {
    let mut spec = guest(memory, rate);
    spec.name = name.to_owned();
    spec.orders.random_bytes = common_bytes;
    spec.orders.text_bytes = 0;
    spec.orders.working_set_bytes = 8 << 20;
    spec
}

/// What a VM's owner adds to its command line to talk with its QEMU besides
/// the agent; see [`World::own_qmp`].
#[must_use]
pub fn own_qmp_argument(name: &str) -> [String; 2] {
    ["-qmp".to_owned(), format!("unix:{RUN_DIR}/{name}.own,server=on,wait=off")]
}

/// Waits for something that nothing tells of.
///
/// # Panics
/// If it does not come.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + SETTLE_MAX;
    while !is_so() {
        assert!(Instant::now() < end, "not within {SETTLE_MAX:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
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

/// A guest runs, has run once, and its memory holds what it wrote.
///
/// # Panics
/// If it is silent, was heard twice, or a page is wrong.
pub fn assert_intact(guest: &Guest) {
    guest.wait_beat(SETTLE_MAX).unwrap();
    let checked = guest.check().unwrap();
    assert_eq!(
        checked.wrong, 0,
        "{checked:?}; if the last move's audit was clean, QEMU never handed over what is missing"
    );
    let pulse = guest.pulse();
    assert_eq!(
        pulse.twice, 0,
        "the guest has run twice; or it went back, and QEMU never handed over the page where it \
         counts its beats: {} were heard where it was before while it ran where it is",
        pulse.behind
    );
    let orders = &guest.spec.orders;
    let filled =
        orders.random_bytes + orders.text_bytes + orders.zero_bytes + orders.working_set_bytes;
    assert_eq!(checked.pages, filled / 4096, "{checked:?}");
}

/// Waits until all was looked at that a VM holds now.
pub(crate) fn wait_looked_at(name: &str, show: impl Fn() -> VmSummary) {
    let rounds = || show().content.map_or(0, |content| content.rounds);
    // The round that goes on may have begun before.
    let wanted = rounds() + 2;
    // It looks only when nobody else wants the CPU.
    let end = Instant::now() + LOOK_MAX;
    while rounds() < wanted {
        assert!(Instant::now() < end, "{name} is not looked at");
        std::thread::sleep(Duration::from_millis(100));
    }
}

impl World {
    /// Makes it, with this link between the hosts.
    ///
    /// # Panics
    /// If that fails, as all of this file does.
    #[must_use]
    pub fn new(link: Link) -> Self {
        let kit = setup::ensure().unwrap();
        let hosts = Hosts::new(link).unwrap();
        let agents = [&hosts.a, &hosts.b].map(|host| Agent::start(&hosts, host).unwrap());
        Self { agents, usual: Vec::new(), by: Vec::new(), hosts, kit }
    }

    /// The same with certificates, which agents use whenever they start.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn secured(link: Link) -> (Self, Certificates) {
        let mut world = Self::new(link);
        let certificates = Certificates::new().unwrap();
        for side in [Side::A, Side::B] {
            certificates.give(world.host(side), side.name()).unwrap();
        }
        world.usual = vec!["--tls".to_owned(), Certificates::place()];
        for side in [Side::A, Side::B] {
            world.kill_agent(side);
            world.start_agent(side);
        }
        (world, certificates)
    }

    /// Starts both agents again, with these arguments and not their usual ones.
    ///
    /// # Panics
    /// If they do not come up.
    pub fn restart_agents_with(&mut self, more: &[&str]) {
        for side in [Side::A, Side::B] {
            self.restart_agent_with(side, more);
        }
    }

    /// Starts an agent again, with these arguments and not its usual ones.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn restart_agent_with(&mut self, side: Side, more: &[&str]) {
        self.kill_agent(side);
        let agent = Agent::start_with(&self.hosts, self.host(side), &[], more).unwrap();
        self.agents[side as usize] = agent;
    }

    /// Has a host's agent be this `droveway`, until it is started again otherwise.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn replace_agent(&mut self, side: Side, binary: &Path) {
        self.kill_agent(side);
        let peers = peers(&self.hosts);
        let host = (side.name(), self.host(side), peers.as_str());
        let agent = Agent::start_program(binary.to_owned(), host, &[], &[]).unwrap();
        self.agents[side as usize] = agent;
    }

    /// From now on agents are started by a program that becomes them, such as `env`.
    pub fn start_agents_by(&mut self, by: &[&str]) {
        self.by = by.iter().map(|word| (*word).to_owned()).collect();
    }

    /// What agents are told from now on, whenever they start. If that is something
    /// else than before, they start again.
    pub fn tell_agents(&mut self, usual: Vec<String>) {
        if self.usual == usual {
            return;
        }
        self.usual = usual;
        for side in [Side::A, Side::B] {
            self.kill_agent(side);
            self.start_agent(side);
        }
    }

    /// The same, beside what they are told anyway.
    pub fn tell_agents_also(&mut self, more: &[&str]) {
        let more = more.iter().map(|word| (*word).to_owned());
        self.tell_agents(self.usual.iter().cloned().chain(more).collect());
    }

    /// Whether an agent has ended by itself.
    pub fn has_ended(&mut self, side: Side) -> bool {
        self.agents[side as usize].has_ended()
    }

    /// A host.
    #[must_use]
    pub fn host(&self, side: Side) -> &Host {
        side.of(&self.hosts)
    }

    /// A host's agent.
    #[must_use]
    pub fn agent(&self, side: Side) -> &Agent {
        &self.agents[side as usize]
    }

    /// Kills an agent, as a crash would.
    pub fn kill_agent(&mut self, side: Side) {
        self.agents[side as usize].kill();
    }

    /// Starts an agent again that was killed.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn start_agent(&mut self, side: Side) {
        let by = self.by.clone();
        self.start_agent_by(side, &by.iter().map(String::as_str).collect::<Vec<_>>());
    }

    /// The same, by a program that becomes it, such as `setpriv`.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn start_agent_by(&mut self, side: Side, by: &[&str]) {
        let usual: Vec<&str> = self.usual.iter().map(String::as_str).collect();
        let agent = Agent::start_with(&self.hosts, self.host(side), by, &usual).unwrap();
        self.agents[side as usize] = agent;
    }

    /// Boots a guest at A with the lab's QEMU.
    #[must_use]
    pub fn boot(&self, spec: &GuestSpec) -> Guest {
        self.boot_with(spec, &self.kit.qemu)
    }

    /// Boots a guest at A with this QEMU.
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

    /// Has the agent at A start a guest's QEMU.
    pub fn run(&self, spec: &GuestSpec, qemu: &Path, options: &[&str]) {
        let argv = spec.argv(&self.kit, qemu);
        let mut run = vec!["run", spec.name.as_str()];
        run.extend(options);
        run.push("--");
        run.extend(argv.iter().map(String::as_str));
        self.says(Side::A, &run);
    }

    fn output(&self, side: Side, args: &[&str]) -> Output {
        self.agent(side).command(self.host(side), args).output().unwrap()
    }

    /// What a command says, which must succeed.
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

    /// Why a command fails, which it must, with exit code 1.
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
        serde_json::from_str(&self.tells(side, &["list", "--json"])).unwrap()
    }

    /// One VM of a host.
    #[must_use]
    pub fn vm(&self, side: Side, name: &str) -> Option<VmSummary> {
        self.vms(side).into_iter().find(|vm| vm.name == name)
    }

    /// Waits until a VM's QEMU is known to be gone.
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

    /// Waits until a host's agent has looked at all that a VM holds now.
    ///
    /// # Panics
    /// If it doesn't look.
    pub fn wait_looked_at(&self, side: Side, name: &str) {
        wait_looked_at(name, || self.shown(side, name));
    }

    /// A VM with all that a host's agent knows of it.
    ///
    /// # Panics
    /// If it isn't there.
    #[must_use]
    pub fn shown(&self, side: Side, name: &str) -> VmSummary {
        serde_json::from_str(&self.tells(side, &["show", name, "--json"])).unwrap()
    }

    /// Begins to move a guest to the other host.
    ///
    /// # Panics
    /// If the command can't be started.
    #[must_use]
    pub fn begin(&self, guest: &Guest, from: Side, args: &[&str]) -> Moving {
        guest.expect_on(self.host(from.other())).unwrap();
        let mut migrate = vec!["migrate", guest.spec.name.as_str(), from.other().name(), "--json"];
        migrate.extend(args);
        audited(&mut migrate);
        Moving::new(self.agent(from).command(self.host(from), &migrate))
    }

    /// Begins to move guests to the other host by a command such as `gang`, said
    /// at one of the two.
    ///
    /// # Panics
    /// If the command can't be started.
    #[must_use]
    pub fn begin_all(&self, guests: &[&Guest], at: Side, from: Side, args: &[&str]) -> Moving {
        for guest in guests {
            guest.expect_on(self.host(from.other())).unwrap();
        }
        Moving::new(self.agent(at).command(self.host(at), args))
    }

    /// Moves a guest to the other host, looks at it there, and for what it
    /// left behind.
    #[must_use]
    pub fn migrate(&self, guest: &Guest, from: Side, args: &[&str]) -> Report {
        let moving = self.begin(guest, from, args);
        self.arrive(guest, from, moving)
    }

    /// Waits for the end of a migration, which must be a good one.
    ///
    /// # Panics
    /// If anything is not as it should be.
    #[must_use]
    pub fn arrive(&self, guest: &Guest, from: Side, moving: Moving) -> Report {
        let ended = moving.wait();
        let log = || {
            let [a, b] = &self.agents;
            format!("host-a: {}\nhost-b: {}", a.log_text(), b.log_text())
        };
        assert_eq!(ended.report.outcome, Outcome::Done, "{}\n{}", ended.said, log());
        assert!(ended.success, "{}", ended.said);
        ended.assert_audited();
        self.assert_moved(guest, from);
        self.assert_intact(guest);
        ended.report
    }

    /// A guest is at the other host, and only there.
    ///
    /// # Panics
    /// If it isn't.
    pub fn assert_moved(&self, guest: &Guest, from: Side) {
        let vm = self.vm(from.other(), &guest.spec.name).expect("it should be there");
        self.assert_runs(from.other(), &vm);
        self.assert_nothing_left(from);
        self.assert_only(from.other(), &[vm.pid]);
    }

    /// A VM runs, and nobody moves it.
    ///
    /// # Panics
    /// If it is otherwise; with what its agent knows of that.
    pub fn assert_runs(&self, side: Side, vm: &VmSummary) {
        assert_eq!(
            (vm.status, vm.migration.as_deref()),
            (VmStatus::Running, None),
            "{vm:?}\n{}",
            self.agent(side).log_text()
        );
    }

    /// A guest that did not move goes on at its host, and nothing of it is at
    /// the other.
    ///
    /// # Panics
    /// If it does not.
    pub fn assert_stayed(&self, guest: &Guest, at: Side, pid: u32) {
        let vm = || self.vm(at, &guest.spec.name).expect("it should be there");
        // An agent that has just started goes on with what its journals say.
        until("it is settled", || vm().status != VmStatus::InDoubt);
        let vm = vm();
        assert_eq!(vm.pid, pid, "{vm:?}");
        self.assert_runs(at, &vm);
        self.assert_nothing_left(at.other());
        self.assert_only(at, &[pid]);
        self.assert_intact(guest);
    }

    /// As [`assert_intact`].
    pub fn assert_intact(&self, guest: &Guest) {
        assert_intact(guest);
    }

    /// No VM of a host, no process and no file is left.
    ///
    /// # Panics
    /// If there is.
    pub fn assert_nothing_left(&self, side: Side) {
        until("no VM is left", || self.vms(side).is_empty());
        self.assert_only(side, &[]);
        for dir in ["state/vms", "state/run", "state/slowed"] {
            until(&format!("nothing is left in {dir}"), || self.files(side, dir).is_empty());
        }
        let known = |name: &str| {
            matches!(name, "agent.log" | "api.sock" | "disk.img" | "state" | "tls")
                || name.ends_with(".toml")
                || name.ends_with(".console")
                // Disks that both hosts have.
                || name.starts_with("files-")
        };
        until("no socket is left", || self.files(side, "").iter().all(|name| known(name)));
    }

    /// Removes what a VM's owner had its QEMU make, as QEMU itself does unless it
    /// was killed, or ended before it was up.
    pub fn remove_own_sockets(&self, side: Side, name: &str) {
        for end in ["talk", "own"] {
            let _ = fs::remove_file(self.host(side).run_dir.join(format!("{name}.{end}")));
        }
    }

    /// On a host nothing runs but its agent and these, and its agent has no
    /// child besides them.
    ///
    /// # Panics
    /// If something else does.
    pub fn assert_only(&self, side: Side, pids: &[u32]) {
        let agent = self.agent(side).pid();
        let others = || {
            let all = self.host(side).processes().unwrap();
            all.into_iter().filter(|pid| *pid != agent && !pids.contains(pid)).collect::<Vec<_>>()
        };
        until(&format!("{} has no process but its VMs'", side.name()), || others().is_empty());
        until("sockets of the migration are gone", || self.files(side, "state/run").is_empty());
    }

    /// The names in a directory of a host's own.
    fn files(&self, side: Side, dir: &str) -> Vec<String> {
        let entries = fs::read_dir(self.host(side).inside(dir)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }

    /// The QMP that a VM's owner asked for, where the VM is.
    ///
    /// # Panics
    /// If QEMU does not answer there.
    #[must_use]
    pub fn own_qmp(&self, side: Side, name: &str) -> Arc<Qmp> {
        let socket = self.host(side).run_dir.join(format!("{name}.own"));
        // It is there a moment before QEMU listens at it.
        let mut qmp = None;
        until("QEMU answers at its socket", || {
            qmp = Qmp::connect(&socket, QMP_TIMEOUT).ok();
            qmp.is_some()
        });
        qmp.unwrap()
    }
}
