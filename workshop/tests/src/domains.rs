//! Two hosts whose agents carry migrations of xl, with the [stand-in for xl](crate::fake_xl).

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{Progress, Report};
use identity::{Connection, Security};
use lab::agent::binary;
use lab::certificates::Certificates;
use lab::fatal::{Kind as Fatal, fatal};
use lab::hosts::{Link, RUN_DIR};
use tempfile::TempDir;
use transport::{Endpoint, LaneError, connect};
use wire::Kind;
use xen::DomainKind;

use crate::fake_xl::{Act, Life, Store};
use crate::world::until_gone;
use crate::{Side, World, until};

/// Longest time until `xl migrate` has ended.
const MOVE_MAX: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(20);
const AGENTS_PORT: u16 = 7800;
/// Longest time until an agent ends what breaks the rules.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// 12 MiB: more than fits into the buffers of a slow link.
pub const PAGES: u32 = 3072;

/// The hosts, their agents and domains.
pub struct Domains {
    /// The hosts, whose agents have certificates.
    pub world: World,
    /// The stand-in.
    xl: PathBuf,
    stores: [Store; 2],
    life: Life,
    dir: TempDir,
    certificates: Certificates,
    /// QEMUs of each host, which run next to its domains.
    pub qemus: [Vec<u32>; 2],
}

/// A running `xl migrate`.
pub struct Migrating {
    child: Child,
    log: PathBuf,
}

/// How it ended.
#[derive(Debug)]
pub struct MigrateEnded {
    /// Whether it reports that the domain has moved.
    pub success: bool,
    /// Its standard error, with its transport's.
    pub text: String,
}

impl Domains {
    /// Makes hosts with this link between them, and this program in place of xl. Each accepts
    /// domains of the other.
    ///
    /// # Panics
    /// If that fails, as all functions of this file.
    #[must_use]
    pub fn new(link: Link, xl: &str) -> Self {
        let (world, certificates) = World::secured(link);
        let dir = tempfile::tempdir().unwrap();
        let life = Life::at(&dir.path().join("life"));
        let stores = [Side::A, Side::B].map(|side| {
            let home = world.host(side).run_dir.join("xen");
            Store::create(home, side.name(), &life).unwrap()
        });
        let xl = PathBuf::from(xl);
        let qemus = [Vec::new(), Vec::new()];
        let mut domains = Self { world, xl, stores, life, dir, certificates, qemus };
        for side in [Side::A, Side::B] {
            domains.configure(side, &[side.other().name()]);
        }
        domains.world.tell_agents_also(&["--config", &format!("{RUN_DIR}/agent.toml")]);
        domains
    }

    fn configure(&self, side: Side, accept_from: &[&str]) {
        self.configure_with(side, accept_from, &self.xl);
    }

    fn configure_with(&self, side: Side, accept_from: &[&str], xl: &Path) {
        let text = format!("[xen]\naccept-from = {accept_from:?}\nxl = {xl:?}\n");
        fs::write(self.world.host(side).run_dir.join("agent.toml"), text).unwrap();
    }

    /// Restarts an agent that accepts domains of these hosts only.
    pub fn accept_from(&mut self, side: Side, hosts: &[&str]) {
        self.configure(side, hosts);
        self.restart(side);
    }

    /// Restarts an agent with a shell script as the receiver.
    pub fn receive_by(&mut self, side: Side, script: &str) {
        let path = self.dir.path().join("receiver");
        let other = format!("*) exec '{}' \"$@\";;", self.xl.display());
        let text = format!("#!/bin/sh\ncase $1 in migrate-receive) {script};; {other} esac\n");
        fs::write(&path, text).unwrap();
        lab::program::output(lab::program::command("chmod").arg("755").arg(&path)).unwrap();
        self.configure_with(side, &[side.other().name()], &path);
        self.restart(side);
    }

    /// Kills an agent, and starts it again.
    pub fn restart(&mut self, side: Side) {
        self.world.kill_agent(side);
        self.world.start_agent(side);
    }

    fn store(&self, side: Side) -> &Store {
        &self.stores[side as usize]
    }

    /// Starts a domain on host A.
    pub fn start(&self, name: &str, kind: DomainKind) {
        self.store(Side::A).start(name, kind, PAGES).unwrap();
    }

    /// Has the next program that comes to a point on a host do this there.
    pub fn plant(&self, (side, point): (Side, &str), act: Act) {
        self.store(side).plant(point, act).unwrap();
    }

    /// Waits until a program has come to a point where something was planted.
    pub fn wait_at(&self, (side, point): (Side, &str)) {
        let store = self.store(side);
        until(&format!("it is {point} at {}", side.name()), || store.has_reached(point));
    }

    /// Lets a program go on that waits at a point.
    pub fn release(&self, (side, point): (Side, &str)) {
        self.store(side).release(point).unwrap();
    }

    /// Begins to move a domain to the other host, with these options of `xl migrate`.
    #[must_use]
    pub fn begin(&self, from: Side, name: &str, options: &[&str]) -> Migrating {
        let send = self.transport(from, from.other().name());
        self.begin_by(from, name, options, &format!("exec {send}"))
    }

    /// The same with these options of its transport.
    #[must_use]
    pub fn begin_with(&self, from: Side, name: &str, options: &str) -> Migrating {
        let send = self.transport(from, from.other().name());
        self.begin_by(from, name, &[], &format!("exec {send} {options}"))
    }

    /// The transport to this host.
    #[must_use]
    pub fn transport(&self, from: Side, to: &str) -> String {
        let api = self.world.agent(from).api();
        format!("'{}' --api {api} xen-send {to}", binary().display())
    }

    /// The same by another transport.
    #[must_use]
    pub fn begin_by(&self, from: Side, name: &str, options: &[&str], by: &str) -> Migrating {
        let host = self.world.host(from);
        let log = host.run_dir.join(format!("{name}.xl"));
        let mut command = host.command(&self.xl);
        command.arg("migrate").args(options).args(["-s", "", name, by]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).unwrap());
        Migrating { child: command.spawn().unwrap(), log }
    }

    /// Moves a domain, and checks it at the other host. Returns the report.
    pub fn migrate(&self, from: Side, name: &str, options: &[&str]) -> Report {
        let ended = self.begin(from, name, options).wait(self);
        assert!(ended.success, "{}\n{}", ended.text, self.logs());
        self.assert_runs_at(from.other(), name);
        self.report(from, name)
    }

    /// What an agent lists of the newest migration of a domain.
    #[must_use]
    pub fn progress(&self, side: Side, name: &str) -> Option<Progress> {
        self.world.migrations(side).into_iter().find(|one| one.vm == name)
    }

    /// Waits until the newest migration of a domain has ended for an agent.
    #[must_use]
    pub fn ended(&self, side: Side, name: &str) -> Progress {
        let mut last = None;
        until(&format!("the migration of {name} has ended"), || {
            last = self.progress(side, name).filter(|one| one.outcome.is_some());
            last.is_some()
        });
        last.unwrap()
    }

    /// The report of the newest migration of a domain.
    #[must_use]
    pub fn report(&self, side: Side, name: &str) -> Report {
        let id = self.ended(side, name).id;
        let report = self.world.tells(side, &["report", &id, "--json"]);
        serde_json::from_str(&report).unwrap()
    }

    /// The host at which a domain runs, if it does.
    #[must_use]
    pub fn runs_at(&self, name: &str) -> Option<Side> {
        let hosts = self.life.hosts_of(name);
        let hosts = hosts.unwrap_or_else(|text| {
            fatal(Fatal::RanTwice, format_args!("{name}: {text}\n{}", self.logs()))
        });
        [Side::A, Side::B].into_iter().find(|side| hosts.iter().any(|host| host == side.name()))
    }

    /// Asserts that a domain runs at a host and nowhere else, has never run at two at a time, that
    /// its memory is as it wrote it, and that no copy and no process is left of its migration.
    pub fn assert_runs_at(&self, side: Side, name: &str) {
        assert_eq!(self.wait_until_it_runs(name), side, "{name}: {}", self.logs());
    }

    /// The same wherever it runs.
    pub fn wait_until_it_runs(&self, name: &str) -> Side {
        let end = Instant::now() + MOVE_MAX;
        while self.runs_at(name).is_none() {
            if Instant::now() > end {
                fatal(Fatal::VmLost, format_args!("{name} runs nowhere\n{}", self.logs()));
            }
            std::thread::sleep(PAUSE);
        }
        for side in [Side::A, Side::B] {
            self.world.assert_only(side, &self.qemus[side as usize]);
        }
        let side = self.runs_at(name);
        let side = side.unwrap_or_else(|| fatal(Fatal::VmLost, format_args!("{name} stopped")));
        self.assert_is_all_of(side, name);
        let domain = self.store(side).domain(name).unwrap();
        let wrong = domain.memory().unwrap().wrong(domain.kind().unwrap());
        if let [first, ..] = wrong[..] {
            let text = format!("{} pages of {name}, the first is {first:#x}", wrong.len());
            fatal(Fatal::WrongPage, format_args!("{text}\n{}", self.logs()));
        }
        side
    }

    /// No other name and no other host has anything of a domain.
    fn assert_is_all_of(&self, side: Side, name: &str) {
        until_gone(&format!("nothing else is left of {name}"), || {
            let copies = |side: Side| self.copies(side, name);
            copies(side) == [name] && copies(side.other()).is_empty()
        });
    }

    /// The names that a host has for a domain.
    #[must_use]
    pub fn copies(&self, side: Side, name: &str) -> Vec<String> {
        let names = self.store(side).names().unwrap();
        let own = format!("{name}--");
        names.into_iter().filter(|it| it == name || it.starts_with(&own)).collect()
    }

    /// A connection from host A to the agent of host B, with the certificate of this host.
    ///
    /// # Errors
    /// If it is refused.
    pub fn call(&self, name: &str, kind: Kind) -> Result<Connection, LaneError> {
        let security = Security::Tls(Arc::new(self.certificates.identity(name).unwrap()));
        let address = self.world.host(Side::B).addresses[0];
        let to = Endpoint { local: None, remote: SocketAddr::new(address, AGENTS_PORT) };
        let dial = || connect(to, "host-b", &security, kind);
        let mut connection = self.world.host(Side::A).within(dial)?;
        connection.set_read_deadline(Some(Instant::now() + ANSWER_MAX)).unwrap();
        Ok(connection)
    }

    /// The ends of both agents' logs.
    #[must_use]
    pub fn logs(&self) -> String {
        let log = |side: Side| format!("{}: {}", side.name(), self.world.agent(side).log_text());
        format!("{}\n{}", log(Side::A), log(Side::B))
    }
}

impl Migrating {
    /// Waits for its end.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn wait(mut self, domains: &Domains) -> MigrateEnded {
        let end = Instant::now() + MOVE_MAX;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "no end: {}\n{}", self.text(), domains.logs());
            std::thread::sleep(PAUSE);
        };
        MigrateEnded { success: status.success(), text: self.text() }
    }

    /// Its standard error so far.
    #[must_use]
    pub fn text(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}
