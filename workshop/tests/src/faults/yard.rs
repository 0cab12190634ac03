//! Two hosts, and a guest that moves back and forth between them while faults are injected.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::{fmt, fs, thread};

use api::{Phase, Report};
use lab::certificates::Certificates;
use lab::guest::{Guest, GuestSpec, System};
use lab::hosts::{Link, RUN_DIR};

use super::inject::{Ends, Filled, Traced, break_it, mend};
use super::judge;
use super::plan::{Fault, Moment, Plan, Way};
use crate::files::{Export, Reached, assert_cached_files, export, with_files_by};
use crate::moving::Moving;
use crate::own_program::OwnProgram;
use crate::proxy::Proxies;
use crate::world::{Side, World, bare, until};

/// What has become of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// It runs on its former host; after an upgrade, in its former QEMU.
    Stayed,
    /// It runs at the destination, or in the other QEMU.
    Moved,
    /// It died with its QEMU, and that is reported.
    Died,
}

/// One fault, and its outcome.
#[derive(Clone, Debug)]
pub struct Seen {
    /// What broke.
    pub fault: Fault,
    /// During what.
    pub way: Way,
    /// The phases in the journals just then: the source's, the destination's.
    pub phase: String,
    /// What became of the VM, or what is wrong.
    pub fate: Result<Fate, String>,
    /// Bytes that its migrations did not send, by their reports.
    pub unsent: Unsent,
}

/// Bytes that the destination got without the source sending them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unsent {
    /// By name: from other VMs or from disks.
    pub named_bytes: u64,
    /// From disks.
    pub stored_bytes: u64,
}

/// Unsent bytes by the report of each migration that began at either host.
fn reports(world: &World) -> BTreeMap<PathBuf, Unsent> {
    let dirs = [Side::A, Side::B].map(|side| world.host(side).inside("state/reports"));
    let files = dirs.into_iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
    let read = |path: PathBuf| {
        let report: Report = serde_json::from_slice(&fs::read(&path).ok()?).ok()?;
        let Report { named_bytes, stored_bytes, .. } = report;
        Some((path, Unsent { named_bytes, stored_bytes }))
    };
    files.filter_map(|file| read(file.path())).collect()
}

/// Two hosts for trying faults. The guest lives on from one fault to the next.
pub struct Yard {
    proxies: Proxies,
    /// Arguments that have agents connect through the proxies.
    by_proxy: [String; 2],
    world: World,
    _certificates: Certificates,
    system: System,
    storage: Option<Export>,
    guest: Option<(Guest, Side)>,
    /// Whether the guest's RAM is in files of the agent's.
    in_files: bool,
    /// The guest's, which may have changed as far as agents can tell: a VM gets another QEMU of it.
    program: OwnProgram,
}

/// Longest permitted downtime of a migration with a fault, in seconds: the usual one.
const BLACKOUT_MAX_S: &str = "3";
/// Seed of the proxies' delays.
const SEED: u64 = 7;

const RATE: u64 = 4_000_000;

/// A guest with new disks.
fn with_files(world: &World) -> GuestSpec {
    let mut spec = with_files_by(world, Reached::Nbd);
    spec.orders.rate = RATE;
    spec
}

impl Plan {
    /// Arguments of its migration.
    fn arguments(&self, system: System) -> Vec<&'static str> {
        let share = if self.share { "host" } else { "off" };
        let storage = if self.storage && system == System::Linux { "on" } else { "off" };
        vec!["--shared-disks", "--share", share, "--storage", storage]
    }
}

impl Yard {
    /// Two hosts with certificates, without a guest yet. The guest will have this system; without
    /// an operating system it has no disks.
    #[must_use]
    pub fn new(system: System) -> Self {
        let (mut world, certificates) = World::secured(Link::one(200));
        let proxies = Proxies::start(&world.hosts, SEED);
        world.start_agents_by(&["env", &format!("DROVEWAY_PANIC_FILE={RUN_DIR}/panic")]);
        let by_proxy = ["--peers".to_owned(), Proxies::peers(&world.hosts)];
        for side in [Side::A, Side::B] {
            world.kill_agent(side);
            Filled::prepare(world.host(side));
            world.start_agent(side);
        }
        let program = OwnProgram::new(&mut world);
        Self {
            proxies,
            by_proxy,
            world,
            _certificates: certificates,
            system,
            storage: None,
            guest: None,
            in_files: false,
            program,
        }
    }

    /// Gives agents the arguments that the plan needs.
    fn lay_out(&mut self, plan: &Plan) {
        let mut told = self.program.arguments();
        if plan.secured {
            told.extend(["--tls".to_owned(), Certificates::place()]);
        }
        if plan.fault.by_proxy() {
            told.extend(self.by_proxy.clone());
        }
        self.world.tell_agents(told);
    }

    /// Injects one fault, undoes it, and checks the VM. After an error the yard is of no use any
    /// more.
    pub fn try_one(&mut self, plan: &Plan) -> Seen {
        let mut phase = String::from("?");
        let before = reports(&self.world);
        let tried = catch_unwind(AssertUnwindSafe(|| self.perform(plan, &mut phase)));
        let fate = tried.unwrap_or_else(|fault| {
            let text = fault.downcast_ref::<String>().cloned();
            let text = text.or_else(|| fault.downcast_ref::<&str>().map(|it| (*it).to_owned()));
            Err(text.unwrap_or_else(|| "a panic without words".to_owned()))
        });
        let fate = fate.map_err(|why| format!("{why}\n{}", self.logs()));
        let mut unsent = Unsent::default();
        for (path, of) in reports(&self.world) {
            if !before.contains_key(&path) {
                unsent.named_bytes += of.named_bytes;
                unsent.stored_bytes += of.stored_bytes;
            }
        }
        Seen { fault: plan.fault, way: plan.way, phase, fate, unsent }
    }

    fn logs(&self) -> String {
        let log = |side| self.world.agent(side).log_text();
        format!("host-a: {}\nhost-b: {}", log(Side::A), log(Side::B))
    }

    /// The guest, and where it is. For an upgrade it starts anew if its RAM is not of the kind that
    /// the plan needs.
    fn guest_for(&mut self, plan: &Plan) -> (Guest, Side) {
        let in_files = match plan.way {
            Way::Move => self.in_files,
            Way::Upgrade { in_files } => in_files,
        };
        match self.guest.take() {
            Some(running) if in_files == self.in_files => return running,
            Some((guest, side)) => {
                self.world.says(side, &["stop", &guest.spec.name, "--force"]);
                self.world.remove_own_sockets(side, &guest.spec.name);
            }
            None => {}
        }
        self.in_files = in_files;
        (self.boot(), Side::A)
    }

    fn boot(&mut self) -> Guest {
        let options: &[&str] = if self.in_files { &["--hand-over"] } else { &[] };
        if self.system == System::Bare {
            return self.world.boot_by(&bare("256M", RATE), &self.program.path, options);
        }
        // The old servers have the old disks open.
        self.storage = None;
        let spec = with_files(&self.world);
        self.storage = Some(export(&self.world));
        self.world.boot_by(&spec, &self.program.path, options)
    }

    fn perform(&mut self, plan: &Plan, phase: &mut String) -> Result<Fate, String> {
        let (guest, from) = self.guest_for(plan);
        let to = if plan.way == Way::Move { from.other() } else { from };
        self.lay_out(plan);
        let (world, proxies) = (&mut self.world, &self.proxies);
        let source_qemu = world.vm(from, "web1").ok_or("the VM is not there")?.pid;
        // A process can have only one tracer.
        let full = matches!(plan.fault, Fault::DiskFull(_));
        let slow = [from, from.other()].map(|side| {
            let pid = world.agent(side).pid();
            let held_up = !full && !plan.slow_notes.is_zero();
            let by = plan.slow_notes;
            held_up.then(|| match plan.way {
                Way::Move => Traced::slow(pid, by),
                Way::Upgrade { .. } => Traced::slow_within(pid, by),
            })
        });
        let arguments = plan.arguments(self.system);
        let faulty = [&arguments[..], &["--blackout-max", BLACKOUT_MAX_S]].concat();
        let mut moving = match plan.way {
            Way::Move => world.begin(&guest, from, &faulty),
            Way::Upgrade { .. } => world.begin_upgrade(&[&guest], from, &["web1"]),
        };
        wait(world, plan, from, &mut moving);
        thread::sleep(plan.delay);
        *phase = judge::phases(world, from, to);
        let destination_qemu = world.arriving_qemu(to, source_qemu);
        let storage = self.storage.as_ref().map(Export::pids).unwrap_or_default();
        let ends = Ends { from, to, source_qemu, destination_qemu, storage };
        let broken = break_it(world, proxies, plan.fault, &ends);
        thread::sleep(plan.lasts);
        drop(slow);
        if plan.fault.outlasts() {
            let _ = moving.wait_status();
            mend(world, proxies, broken);
        } else {
            mend(world, proxies, broken);
            let _ = moving.wait_status();
        }
        let killed = plan.fault.kills();
        judge::settled(world, killed)?;
        let found = judge::where_is(world, killed)?;
        let Some((side, vm)) = found else {
            if !killed {
                return Err("the VM is gone, and its QEMU was not killed".to_owned());
            }
            for side in [Side::A, Side::B] {
                world.remove_own_sockets(side, "web1");
                world.assert_nothing_left(side);
            }
            return Ok(Fate::Died);
        };
        // A killed QEMU leaves the sockets that its owner had it make.
        world.remove_own_sockets(side.other(), "web1");
        world.assert_nothing_left(side.other());
        until("it is heard", || guest.pulse().last_beat.elapsed().as_millis() < 500);
        world.assert_stayed(&guest, side, vm.pid);
        // The next migration of the same VM works, even next to others that are busy.
        let next = if plan.once_more {
            drop(world.migrate(&guest, side, &arguments));
            side.other()
        } else {
            side
        };
        if self.system == System::Linux {
            assert_cached_files(&guest);
        }
        self.guest = Some((guest, next));
        Ok(if (side, vm.pid) == (from, source_qemu) { Fate::Stayed } else { Fate::Moved })
    }
}

/// Waits for the plan's moment.
fn wait(world: &World, plan: &Plan, from: Side, moving: &mut Moving) {
    match (plan.way, plan.moment) {
        (_, Moment::Preparing) => {}
        (Way::Move, Moment::FirstPass) => moving.wait_for(Phase::FirstPass),
        (Way::Move, Moment::Stopped) => moving.wait_for(Phase::Stopped),
        // It may be in a phase for too short a time to print it.
        (Way::Upgrade { .. }, moment) => until("its moment has come", || {
            let phase = judge::phase_within(world, from);
            let is_stopped = ["stopped", "committed"].iter().any(|it| phase.starts_with(it));
            let is_prepared = moment == Moment::FirstPass && phase.starts_with("opened");
            is_stopped || is_prepared || moving.has_ended()
        }),
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.fault, self.way)
    }
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stayed => "stayed",
            Self::Moved => "moved",
            Self::Died => "died with its QEMU",
        })
    }
}
