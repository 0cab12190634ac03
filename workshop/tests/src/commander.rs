//! A manager that moves a VM between two QEMUs of its own, by the commands that libvirt gives; the
//! agents are told nothing.

mod disk;

use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use lab::fatal::{Kind, fatal};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::RUN_DIR;
use lab::libvirt::WAITS_AT;
use lab::systemd::systemctl;
use qemu::qmp::{Event, Qmp};
use serde_json::{Value, json};

use crate::world::assert_arrived;
use crate::{Side, World, assert_intact, own_qmp_argument, until};

/// Longest time that a migration may take.
const MOVE_MAX: Duration = Duration::from_secs(120);
/// Longest time that the destination may load the VM.
const LOAD_MAX: Duration = Duration::from_secs(60);
const UUID: &str = "4dea22b3-1d52-d8f3-2516-782e98ab3fa0";
const NO_LIMIT: u64 = 9_223_372_036_853_727_232;

/// The first port for VMs that move to a host, by its place in the peers file.
#[must_use]
pub fn port(side: Side) -> u16 {
    match side {
        Side::A => 49152,
        Side::B => 49216,
    }
}

/// Options of a migration.
#[derive(Clone, Debug)]
pub struct Way {
    /// Where the destination's QEMU listens, and where the source's connects.
    pub uris: [String; 2],
    /// multifd channels; 0 for the classic stream.
    pub channels: u8,
    /// How QEMU compresses multifd's pages itself.
    pub compression: &'static str,
    /// Additional capabilities of both ends.
    pub more: Vec<&'static str>,
    /// Capabilities that neither end gets.
    pub without: Vec<&'static str>,
    /// Whether the disk of a guest of [`with_disk`](crate::disk::with_disk) moves with it.
    pub disk: bool,
    /// Path of the socket for the disk, if it doesn't go by a port.
    pub disk_socket: Option<String>,
}

/// A QEMU that only the commander controls.
pub struct Commanded {
    child: Child,
    /// The systemd of its host, and the unit by which that runs it.
    service: Option<(u32, String)>,
    /// Its monitor.
    pub qmp: Arc<Qmp>,
    events: Receiver<Event>,
}

impl Drop for Commanded {
    fn drop(&mut self) {
        self.end();
    }
}

impl Commanded {
    /// Kills it, as libvirt does.
    pub fn end(&mut self) {
        let _ = match &self.service {
            Some((systemd, unit)) => systemctl(*systemd, &["kill", "--signal=KILL", unit]),
            None => self.child.kill().is_ok(),
        };
        let _ = self.child.wait();
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Its process ID.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn do_it(&self, command: &str, arguments: Value) -> Value {
        self.qmp.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    /// Its status as it reports it: `running`, `inmigrate` and so on.
    #[must_use]
    pub fn status(&self) -> String {
        let status = self.qmp.execute("query-status", json!({}));
        status.map_or_else(|error| error.to_string(), |it| it["status"].to_string())
    }

    fn capabilities(&self, way: &Way, own: &'static str) {
        // All others are turned off, since this QEMU may have been a destination.
        let mut wanted = vec!["events", "return-path", own];
        wanted.extend(&way.more);
        wanted.retain(|name| !way.without.contains(name));
        if way.channels > 0 {
            wanted.push("multifd");
        }
        let others = ["multifd", "late-block-activate", "pause-before-switchover", "return-path"];
        let others =
            others.iter().filter(|other| !wanted.contains(other)).map(|name| (name, false));
        let capabilities: Vec<Value> = (wanted.iter().map(|name| (name, true)).chain(others))
            .map(|(name, state)| json!({ "capability": name, "state": state }))
            .collect();
        self.do_it("migrate-set-capabilities", json!({ "capabilities": capabilities }));
        if way.channels > 0 {
            let multifd = json!({
                "multifd-channels": way.channels,
                "multifd-compression": way.compression,
            });
            self.do_it("migrate-set-parameters", multifd);
        }
    }
}

/// Has both agents carry migrations.
///
/// # Panics
/// If an agent can't be started.
pub fn carrying(world: &mut World) {
    carrying_with(world, "", "");
}

/// The same, with more lines in their files: at the top, and under `[carry]`.
fn carrying_with(world: &mut World, top: &str, carry: &str) {
    if world.hosts.a.systemd().is_some() {
        return world.add_to_files(&format!("{top}\n[carry]\n{carry}\n"));
    }
    configure(world, top, carry);
    world.tell_agents_also(&["--config", &format!("{RUN_DIR}/agent.toml")]);
}

fn configure(world: &World, top: &str, carry: &str) {
    for side in [Side::A, Side::B] {
        let usual = format!("directory = \"{RUN_DIR}/migrate\"\n");
        let directory = if carry.contains("directory") { "" } else { &usual };
        let config = format!("{top}\n[carry]\n{directory}{carry}\n");
        std::fs::write(world.host(side).run_dir.join("agent.toml"), config).unwrap();
    }
}

/// Runs a VM that comes from a stream, once it is loaded.
pub(crate) fn resume(qmp: &Qmp) {
    until("the VM is loaded", || {
        let status = qmp.execute("query-status", json!({})).unwrap();
        status["status"] == "paused"
    });
    qmp.execute("cont", json!({})).unwrap();
}

/// Two agents that carry, and QEMUs that they don't manage.
pub struct Commander {
    /// The hosts and their agents.
    pub world: World,
    spec: GuestSpec,
    /// The guest.
    pub guest: Guest,
    program: std::path::PathBuf,
    /// The UUID of QEMUs that are started from now on.
    pub uuid: &'static str,
    /// The QEMU at each host.
    pub qemus: [Option<Commanded>; 2],
    /// How many QEMUs were started.
    started: usize,
}

impl Commander {
    /// Starts a guest with this QEMU program on host A.
    ///
    /// # Panics
    /// If anything fails, as in all of this file.
    #[must_use]
    pub fn new(world: World, spec: GuestSpec, program: &std::path::Path) -> Self {
        Self::with(world, spec, program, ["", ""])
    }

    /// The same, with more lines in the agents' files: at the top, and under `[carry]`.
    ///
    /// # Panics
    /// If anything fails.
    #[must_use]
    pub fn with(
        mut world: World,
        spec: GuestSpec,
        program: &std::path::Path,
        [top, carry]: [&str; 2],
    ) -> Self {
        carrying_with(&mut world, top, carry);
        let mut commander = Self::listening(world, spec, program);
        commander.start(Side::A, &[]);
        commander.guest.wait_boot(commander.world.host(Side::A)).unwrap();
        commander
    }

    /// Starts a guest on host A from a stream of QEMU's.
    ///
    /// # Panics
    /// If anything fails.
    #[must_use]
    pub fn resumed(
        mut world: World,
        spec: GuestSpec,
        program: &std::path::Path,
        incoming: &str,
    ) -> Self {
        carrying(&mut world);
        let mut commander = Self::listening(world, spec, program);
        commander.start(Side::A, &["-incoming", incoming]);
        resume(&commander.at(Side::A).qmp);
        commander
    }

    /// Restarts both agents with these lines under `[carry]`.
    ///
    /// # Panics
    /// If an agent can't be started.
    pub fn restart_agents_with(&mut self, carry: &str) {
        configure(&self.world, "", carry);
        for side in [Side::A, Side::B] {
            self.world.kill_agent(side);
            self.world.start_agent(side);
        }
    }

    fn listening(world: World, spec: GuestSpec, program: &std::path::Path) -> Self {
        let guest = Guest::listen(spec.clone(), world.host(Side::A)).unwrap();
        let (program, qemus) = (program.to_owned(), [None, None]);
        Self { world, spec, guest, program, uuid: UUID, qemus, started: 0 }
    }

    /// Starts its QEMU on a host, with these arguments besides the usual ones.
    ///
    /// # Panics
    /// If it doesn't answer.
    pub fn start(&mut self, side: Side, more: &[&str]) {
        let host = self.world.host(side);
        let argv = self.spec.argv(&self.world.kit, &self.program);
        // systemd knows a unit that has ended for a moment longer.
        let unit = format!("{}-{}", self.spec.name, self.started);
        self.started += 1;
        let mut command = host.service(&unit, &argv[0]);
        command.args(&argv[1..]).args(own_qmp_argument(&self.spec.name)).args(["-uuid", self.uuid]);
        let log = std::fs::File::create(host.run_dir.join("qemu.log")).unwrap();
        let child = command.args(more).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = child.spawn().unwrap();
        let qmp = self.world.own_qmp(side, &self.spec.name);
        let events = qmp.events();
        let service = host.systemd().map(|systemd| (systemd, unit));
        self.qemus[side as usize] = Some(Commanded { child, service, qmp, events });
    }

    /// A migration by a loopback port, or by unix sockets.
    #[must_use]
    pub fn way(&self, from: Side, by_path: bool, channels: u8) -> Way {
        let to = from.other();
        let uris = if by_path {
            let path = format!("unix:{RUN_DIR}/migrate/{}.sock", to.name());
            [path.clone(), path]
        } else {
            let here = if to == Side::A { "127.7.0.1" } else { "127.7.0.2" };
            let port = port(to);
            [format!("tcp:{WAITS_AT}:{port}"), format!("tcp:{here}:{port}")]
        };
        Way {
            uris,
            channels,
            compression: "none",
            more: vec![],
            without: vec![],
            disk: false,
            disk_socket: None,
        }
    }

    /// The QEMU at a host.
    #[must_use]
    pub fn at(&self, side: Side) -> &Commanded {
        self.qemus[side as usize].as_ref().expect("it was started")
    }

    /// Has a QEMU wait on the other host, and this one migrate.
    pub fn begin(&mut self, from: Side, way: &Way) {
        self.expect(from, way);
        self.leave(from, way);
    }

    /// Has a QEMU wait on the other host, with its disk if that moves.
    pub fn expect(&mut self, from: Side, way: &Way) {
        let to = from.other();
        self.world.remove_own_sockets(to, &self.spec.name);
        self.guest.expect_on(self.world.host(to)).unwrap();
        if way.disk {
            disk::make_image(self.world.host(to));
        }
        self.start(to, &["-S", "-incoming", "defer"]);
        let destination = self.at(to);
        destination.capabilities(way, "late-block-activate");
        destination.do_it("migrate-incoming", json!({ "uri": way.uris[0] }));
        if way.disk {
            disk::export(self.world.host(to), way, destination);
        }
    }

    /// Has this QEMU migrate to the waiting one.
    pub fn leave(&mut self, from: Side, way: &Way) {
        self.prepare(from, way);
        self.at(from).do_it("migrate", json!({ "uri": way.uris[1] }));
    }

    /// Has this QEMU try to migrate to the waiting one, which it can't; returns why.
    ///
    /// # Panics
    /// If it can, or the guest does not live on here.
    pub fn refused(&mut self, from: Side, way: &Way) -> String {
        self.prepare(from, way);
        let source = self.at(from);
        if let Err(error) = source.qmp.execute("migrate", json!({ "uri": way.uris[1] })) {
            self.qemus[from.other() as usize] = None;
            assert_intact(&self.guest);
            return error.to_string();
        }
        assert_eq!(self.follow(from), "failed", "{}", self.logs());
        let why = self.at(from).do_it("query-migrate", json!({}))["error-desc"].to_string();
        self.assert_stayed(from);
        why
    }

    fn prepare(&self, from: Side, way: &Way) {
        let source = self.at(from);
        source.capabilities(way, "pause-before-switchover");
        source.do_it("migrate-set-parameters", json!({ "max-bandwidth": NO_LIMIT }));
        if way.disk {
            disk::copy(from, way, source);
        }
        // Events of its own arrival.
        while source.events.try_recv().is_ok() {}
        // After a failed migration, QEMU may still be cleaning up. QEMU 10.0 then refuses this
        // migration and all later ones.
        until("QEMU has cleared up", || {
            let known = source.do_it("query-yank", json!({}));
            !known.as_array().unwrap().iter().any(|one| one["type"] == "migration")
        });
    }

    /// Follows the source's QEMU until its migration has ended; returns the final status.
    #[must_use]
    pub fn follow(&self, from: Side) -> String {
        let source = self.at(from);
        let end = Instant::now() + MOVE_MAX;
        loop {
            let event = source.events.recv_deadline(end);
            let event = event.unwrap_or_else(|_| panic!("no end: {}", self.logs()));
            if event.name != "MIGRATION" {
                continue;
            }
            match event.data["status"].as_str().unwrap_or_default() {
                "pre-switchover" => {
                    disk::complete(source);
                    let state = json!({ "state": "pre-switchover" });
                    // It may have been cancelled.
                    let _ = source.qmp.execute("migrate-continue", state);
                }
                end @ ("completed" | "failed" | "cancelled") => {
                    disk::complete(source);
                    return end.to_owned();
                }
                _ => {}
            }
        }
    }

    /// Moves the guest as libvirt does, and checks it at the destination.
    pub fn migrate(&mut self, from: Side, way: &Way) -> api::Report {
        self.begin(from, way);
        let ended = self.follow(from);
        if ended != "completed" {
            panic!("{ended}: {:?}: {}", self.report(from).outcome, self.logs());
        }
        self.arrive(from)
    }

    /// Resumes the guest at the destination, as libvirt does, and checks it there.
    ///
    /// # Panics
    /// If it isn't intact, or the agent reports another outcome.
    pub fn arrive(&mut self, from: Side) -> api::Report {
        self.run_there(from);
        let report = self.report(from);
        assert_eq!(report.outcome, api::Outcome::Done, "{}", self.logs());
        assert_arrived(&self.guest, &self.world.kit, &report.audit);
        report
    }

    /// Resumes the guest at the destination.
    ///
    /// # Panics
    /// If it isn't loaded.
    pub fn run_there(&mut self, from: Side) {
        let to = from.other();
        // QEMU may still be loading it.
        let end = Instant::now() + LOAD_MAX;
        while !self.at(to).status().contains("paused") {
            let status = self.at(to).status();
            assert!(Instant::now() < end, "it is {status}: {}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
        disk::release(self.at(to));
        self.at(to).do_it("cont", json!({}));
        self.qemus[from as usize] = None;
    }

    /// What an agent lists of the last migration that it carries, or has carried.
    #[must_use]
    pub fn progress(&self, from: Side) -> Option<api::Progress> {
        self.world.migrations(from).into_iter().next()
    }

    /// The report of the last migration that an agent has carried from its host, once it has ended.
    #[must_use]
    pub fn report(&self, from: Side) -> api::Report {
        let mut last = None;
        until("its report is there", || {
            last = self.progress(from).filter(|last| last.outcome.is_some());
            last.is_some()
        });
        let last = last.expect("just seen");
        let report = self.world.tells(from, &["report", &last.id, "--json"]);
        serde_json::from_str(&report).unwrap()
    }

    /// Asserts that the guest has not moved: it runs here, only here, and nothing of the migration
    /// is left open at either end.
    pub fn assert_stayed(&mut self, at: Side) {
        until("it runs on", || self.at(at).status().contains("running"));
        let other = at.other();
        let arriving = self.qemus[other as usize].as_mut().expect("it was started");
        // Depending on its version, QEMU exits or reports a failed migration.
        until("the other QEMU sees its stream end", || {
            let status = arriving.status();
            if status.contains("running") {
                fatal(Kind::RanTwice, "it runs at its destination, and at its source");
            }
            arriving.has_ended()
                || arriving
                    .qmp
                    .execute("query-migrate", json!({}))
                    .map_or(true, |it| it["status"] == "failed")
        });
        self.qemus[other as usize] = None;
        assert_intact(&self.guest);
    }

    /// The logs of both ends.
    #[must_use]
    pub fn logs(&self) -> String {
        let of = |side: Side| {
            let qemu = std::fs::read_to_string(self.world.host(side).run_dir.join("qemu.log"));
            format!(
                "{}: {}\nQEMU: {}",
                side.name(),
                self.world.agent(side).log_text(),
                qemu.unwrap_or_default()
            )
        };
        format!("{}\n{}", of(Side::A), of(Side::B))
    }
}
