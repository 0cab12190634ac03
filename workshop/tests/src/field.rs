//! The field lab: a guest as people have them, moved one to three times, and what its owner and its
//! guest do after that.

mod domain;
mod results;
mod rows;

use std::cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lab::error::{FileContext, LabError};
use lab::field::{self, Disks, Lan, Machine, Snapshot, Tpm};
use lab::guest::Guest;
use lab::hosts::{Host, Link};
use lab::setup::{self, Release};
use qemu::qmp::Qmp;

use crate::commander::{self, Commanded, Commander, resume};
use crate::{Side, World, assert_intact};

pub use domain::CarriedDomain;
pub use results::{Cell, Results};
pub use rows::{Act, ROWS, Row, named};

/// Its VM's name.
const NAME: &str = "web1";
/// Between the hosts.
const LINK: Link = Link { nics: 1, mbit_per_s: Some(1000) };
/// Where QEMU's own migration listens: no agent carries from there.
const PORT: u16 = 4444;
/// Longest time until a change shows in a guest, whose services may be starting.
const SHOWS_MAX: Duration = Duration::from_secs(240);
const PAUSE: Duration = Duration::from_millis(200);

/// Who moves the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mover {
    /// Agents, as `droveway migrate` has them.
    Own,
    /// QEMU, whose stream agents carry.
    Carried,
    /// QEMU alone, for comparison.
    Qemu,
}

/// QEMU's kind of stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Several channels.
    Multifd,
    /// One connection.
    Classic,
}

/// How a VM has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// By whom.
    pub mover: Mover,
    /// In which kind of stream.
    pub stream: Stream,
}

impl Stream {
    /// QEMU's channels for pages.
    fn channels(self) -> u8 {
        match self {
            Self::Multifd => 4,
            Self::Classic => 0,
        }
    }
}

/// All ways, as the table's columns.
pub const WAYS: [Way; 6] = [
    Way { mover: Mover::Own, stream: Stream::Multifd },
    Way { mover: Mover::Own, stream: Stream::Classic },
    Way { mover: Mover::Carried, stream: Stream::Multifd },
    Way { mover: Mover::Carried, stream: Stream::Classic },
    Way { mover: Mover::Qemu, stream: Stream::Multifd },
    Way { mover: Mover::Qemu, stream: Stream::Classic },
];

impl Way {
    /// Its column's name.
    #[must_use]
    pub fn name(self) -> String {
        let mover = match self.mover {
            Mover::Own => "own",
            Mover::Carried => "carried",
            Mover::Qemu => "QEMU's own",
        };
        format!("{mover}, {}", self.tap())
    }

    fn tap(self) -> &'static str {
        match self.stream {
            Stream::Multifd => "multifd",
            Stream::Classic => "classic",
        }
    }

    fn commands(self, commander: &Commander, from: Side) -> commander::Way {
        let mut commands = commander.way(from, false, self.stream.channels());
        if self.mover == Mover::Qemu {
            let there = commander.world.host(from.other()).addresses[0];
            commands.uris = [(); 2].map(|()| format!("tcp:{there}:{PORT}"));
        }
        commands
    }
}

/// Who has the VM's QEMUs.
enum Managed {
    /// Agents; the first QEMU was adopted.
    Agents { world: Box<World>, guest: Box<Guest>, first: Child },
    /// A commander.
    Commander(Box<Commander>),
}

/// What a row reports: what is worth knowing if it went well, else why not.
pub type Done = Result<String, String>;

/// Of a row that was tried with a VM of the other kind.
const OTHER_VM: &str = "this VM is not the row's";

/// A moved VM of either kind.
pub enum Moved {
    /// A Debian.
    Debian(Box<Field>),
    /// A libvirt domain.
    Domain(Box<CarriedDomain>),
}

impl Moved {
    /// Moves a VM so many times: a snapshot's, between hosts with this root if there is one, or else
    /// a domain.
    ///
    /// # Panics
    /// If it doesn't arrive well.
    #[must_use]
    pub fn new(snapshot: Option<&Snapshot>, root: Option<&Path>, way: Way, moves: u32) -> Self {
        match (snapshot, root) {
            (Some(snapshot), None) => Self::Debian(Box::new(Field::moved(snapshot, way, moves))),
            (Some(snapshot), Some(root)) => {
                let world = World::installed(LINK, root);
                Self::Debian(Box::new(Field::between(world, snapshot, way, moves)))
            }
            (None, _) => Self::Domain(Box::new(CarriedDomain::moved(way.stream, moves))),
        }
    }

    /// Moves it to the other host, so many times.
    ///
    /// # Panics
    /// If it doesn't arrive well.
    pub fn move_on(&mut self, moves: u32) {
        match self {
            Self::Debian(vm) => vm.move_on(moves),
            Self::Domain(vm) => vm.move_on(moves),
        }
    }

    /// Does what a row says.
    ///
    /// # Errors
    /// If it can't be done, or the row is for another VM.
    pub fn does(&mut self, row: &Row) -> Done {
        match self {
            Self::Debian(vm) => vm.does(row),
            Self::Domain(vm) => vm.does(row),
        }
    }

    /// Asserts that it lives.
    ///
    /// # Errors
    /// As [`Field::lives`].
    ///
    /// # Panics
    /// If it doesn't run, or a page is wrong.
    pub fn lives(&self) -> Result<(), String> {
        match self {
            Self::Debian(vm) => vm.lives(),
            Self::Domain(vm) => {
                vm.assert_lives();
                Ok(())
            }
        }
    }
}

/// A moved Debian.
pub struct Field {
    managed: Managed,
    /// The guests' network.
    pub lan: Lan,
    snapshot: Snapshot,
    /// What the QEMU at each host has, if its VM has a TPM.
    tpms: [Option<Tpm>; 2],
    way: Way,
    side: Side,
    /// The last row of its guest's database that is known to be acknowledged.
    acknowledged: cell::Cell<u64>,
}

/// The snapshot from which all start, which is made if it is missing; that takes some minutes.
///
/// # Errors
/// If it can't be made.
pub fn snapshot(release: Release, machine: Machine) -> Result<Snapshot, LabError> {
    let kit = setup::ensure()?;
    // Several tests start from the same snapshot, and one of them makes it.
    let path = setup::store().join("field.lock");
    let lock = File::create(&path).at("create", &path)?;
    lock.lock().at("lock", &path)?;
    let image = setup::field_image(release)?;
    let qemu = kit.own_qemu();
    Snapshot::of(&kit, image, machine, qemu)
}

impl Field {
    /// Has the snapshot's VM go on at A, and moves it so many times.
    ///
    /// # Panics
    /// If it doesn't arrive well.
    #[must_use]
    pub fn moved(snapshot: &Snapshot, way: Way, moves: u32) -> Self {
        Self::between(World::new(LINK), snapshot, way, moves)
    }

    /// The same between these hosts.
    ///
    /// # Panics
    /// If it doesn't arrive well.
    #[must_use]
    pub fn between(mut world: World, snapshot: &Snapshot, way: Way, moves: u32) -> Self {
        let lan = Lan::join(&world.hosts).unwrap();
        snapshot.disks(&world.hosts.a.run_dir).unwrap();
        let spec = snapshot.spec(NAME, &Disks::within(&world.hosts.shared()));
        let (qemu, incoming) = (world.kit.own_qemu(), snapshot.incoming());
        let tpms = [snapshot.tpm(&world.hosts.a, NAME).unwrap(), None];
        let managed = if way.mover == Mover::Own {
            // An adopted QEMU's command line names the program that the kit's wrapper has started.
            if let Some(variable) = qemu.environment() {
                world.start_agents_by(&["env", &variable]);
                for side in [Side::A, Side::B] {
                    world.kill_agent(side);
                    world.start_agent(side);
                }
            }
            let more = ["-incoming", incoming.as_str()];
            let first = world.start_unmanaged(Side::A, &spec, &qemu.program, &more);
            resume(&field::monitor(&world.hosts.a, NAME).unwrap());
            let guest = Guest::listen(spec, &world.hosts.a).unwrap();
            world.attach(NAME);
            Managed::Agents { world: Box::new(world), guest: Box::new(guest), first }
        } else {
            let commander = Commander::resumed(world, spec, &qemu.program, &incoming);
            Managed::Commander(Box::new(commander))
        };
        let snapshot = snapshot.clone();
        let acknowledged = cell::Cell::default();
        let mut field = Self { managed, lan, snapshot, tpms, way, side: Side::A, acknowledged };
        field.guest().wait_beat(SHOWS_MAX).unwrap();
        field.move_on(moves);
        field
    }

    /// Moves it to the other host, so many times.
    ///
    /// # Panics
    /// If it doesn't arrive well.
    pub fn move_on(&mut self, moves: u32) {
        for _ in 0..moves {
            self.move_once();
        }
    }

    /// Does what a row says.
    ///
    /// # Errors
    /// If it can't be done, or the row is for another VM.
    pub fn does(&mut self, row: &Row) -> Done {
        match row.act {
            Act::OfDebian(act) => act(self),
            Act::OfDomain(_) => Err(OTHER_VM.to_owned()),
        }
    }

    /// Another TPM at a host, for its next QEMU.
    fn fit_tpm(&mut self, side: Side) {
        // The old one has its socket until it ends.
        self.tpms[side as usize] = None;
        self.tpms[side as usize] = self.snapshot.tpm(self.world().host(side), NAME).unwrap();
    }

    fn move_once(&mut self) {
        let (from, way) = (self.side, self.way);
        if let Some(row) = self.row().unwrap() {
            self.acknowledged.set(row);
        }
        self.fit_tpm(from.other());
        match &mut self.managed {
            Managed::Agents { world, guest, first } => {
                let report = world.migrate(guest, from, &["--tap", way.tap()]);
                assert_eq!(report.tap, way.tap(), "{:?}", report.notes);
                // Reaps it once it has left.
                let _ = first.try_wait();
            }
            Managed::Commander(commander) => {
                let commands = way.commands(commander, from);
                if way.mover == Mover::Carried {
                    drop(commander.migrate(from, &commands));
                } else {
                    commander.begin(from, &commands);
                    assert_eq!(commander.follow(from), "completed", "{}", commander.logs());
                    commander.run_there(from);
                    assert_intact(&commander.guest);
                }
            }
        }
        self.side = from.other();
    }

    /// Tries to move it, which can't be done: checks that this is in the reason, and that the VM
    /// stays.
    fn stays(&mut self, reason: &str) -> Result<(), String> {
        let (from, way) = (self.side, self.way);
        self.fit_tpm(from.other());
        let why = match &mut self.managed {
            Managed::Agents { world, .. } => {
                world.refuses(from, &["migrate", NAME, from.other().name(), "--tap", way.tap()])
            }
            Managed::Commander(commander) => {
                let commands = way.commands(commander, from);
                commander.expect(from, &commands);
                commander.refused(from, &commands)
            }
        };
        if why.contains(reason) {
            Ok(())
        } else {
            Err(format!("refused for another reason: {why}"))
        }
    }

    /// Its guest.
    #[must_use]
    pub fn guest(&self) -> &Guest {
        match &self.managed {
            Managed::Agents { guest, .. } => guest,
            Managed::Commander(commander) => &commander.guest,
        }
    }

    pub(crate) fn world(&self) -> &World {
        match &self.managed {
            Managed::Agents { world, .. } => world,
            Managed::Commander(commander) => &commander.world,
        }
    }

    fn host(&self) -> &Host {
        self.world().host(self.side)
    }

    /// A file that both hosts see: its path here, and theirs.
    fn shared(&self, name: &str) -> (PathBuf, String) {
        let hosts = &self.world().hosts;
        (hosts.a.run_dir.join(name), hosts.shared().join(name).display().to_string())
    }

    /// The QMP connection of its owner.
    fn qmp(&self) -> Result<Arc<Qmp>, String> {
        field::monitor(self.host(), NAME).map_err(|error| error.to_string())
    }

    /// The output of a line that a shell in the guest runs.
    fn sh(&self, line: &str) -> Done {
        self.guest().ask(&format!("sh {line}")).map_err(|error| error.to_string())
    }

    /// Runs a line in the guest a second later, when it may no longer be able to answer.
    fn sh_later(&self, line: &str) -> Done {
        self.sh(&format!("(sleep 1; {line}) >/dev/null 2>&1 &"))
    }

    /// Waits for a state that no event reports.
    fn shows(&self, what: &str, is_so: impl Fn(&Self) -> bool) -> Result<(), String> {
        let end = Instant::now() + SHOWS_MAX;
        while !is_so(self) {
            if Instant::now() > end {
                return Err(format!("not within {SHOWS_MAX:?}: {what}"));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// The row that its guest's database has acknowledged last; none before the first one since the
    /// guest has booted. A guest that does not answer is an error: nothing would be checked.
    fn row(&self) -> Result<Option<u64>, String> {
        match self.guest().ask(field::ACKNOWLEDGED) {
            Ok(row) => Ok(row.parse().ok()),
            Err(LabError::Guest { .. }) => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Waits for another row, and checks all that were acknowledged before.
    fn rows_are_there(&self) -> Result<(), String> {
        let known = self.acknowledged.get();
        // Fewer, too: the check reports what is missing.
        self.shows("the guest's database acknowledges a row", |field| {
            field.row().is_ok_and(|row| row.is_some_and(|row| row != known))
        })?;
        let answer = self.guest().ask(&field::check_rows(known));
        let answer = answer.map_err(|error| error.to_string())?;
        let last = answer.parse().map_err(|_| format!("the check of rows: {answer}"))?;
        self.acknowledged.set(last);
        Ok(())
    }

    /// Asserts that it lives: its guest runs, memory, files and the rows of its database are as they
    /// were written, and its network answers.
    ///
    /// # Errors
    /// If the network doesn't answer, a file isn't as it was, or a row is missing or wrong.
    ///
    /// # Panics
    /// If it doesn't run, or a page is wrong.
    pub fn lives(&self) -> Result<(), String> {
        if let Managed::Agents { world, .. } = &self.managed {
            let vm = world.vm(self.side, NAME).ok_or("the agent no longer lists it")?;
            world.assert_runs(self.side, &vm);
        }
        assert_intact(self.guest());
        self.guest().ask(&field::check_kept()).map_err(|error| error.to_string())?;
        self.rows_are_there()?;
        self.shows("the guest's SSH server answers", |field| field.lan.greets())
    }

    /// Starts its QEMU again where it was, after it has ended.
    fn start_again(&mut self) {
        let side = self.side;
        match &mut self.managed {
            Managed::Agents { world, guest, first } => {
                let _ = first.try_wait();
                world.wait_dead(side, NAME);
                world.says(side, &["stop", NAME]);
                guest.expect_on(world.host(side)).unwrap();
                world.run_at(side, &guest.spec);
            }
            Managed::Commander(commander) => {
                crate::until("QEMU has ended", || {
                    commander.qemus[side as usize].as_mut().is_none_or(Commanded::has_ended)
                });
                commander.guest.expect_on(commander.world.host(side)).unwrap();
                commander.start(side, &[]);
            }
        }
    }
}

impl Drop for Field {
    fn drop(&mut self) {
        if let Managed::Agents { first, .. } = &mut self.managed {
            let _ = first.kill();
            let _ = first.wait();
        }
    }
}
