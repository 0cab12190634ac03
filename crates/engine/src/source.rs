//! The source's side of one migration.
//!
//! [`migrate`] is the ordered list of phases. Whatever fails before the commit
//! leads to [`Source::undo`]: the VM goes on here and the destination's QEMU is
//! gone. Whose the VM is decides `switchover::source` alone, which keeps a
//! journal; its hands are in `hands`.

mod blackout;
mod by_name;
mod collector;
mod control;
mod disks;
mod from_disks;
mod lanes;
mod phases;
mod saying;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::audit::HandedOver;
use api::{Bounds, MigrateRequest, Outcome, Phase, Priority, Report};
use crossbeam_channel::{Receiver, Sender, unbounded};
use data_threads::{DataThreads, SchedParams};
use dedup::source::{Announcer, Stage};
use qemu::outgoing::Outgoing;
use qemu::qmp::Event;
use qemu::ram_blocks::RamBlocks;
use qemu::rendezvous::Rendezvous;
use transport::Delivered;
use wire::{ToDestination, ToSource};

use switchover::source::{Driver, Event as Step, Outcome as Fate};
use switchover::{Doubt, Envelope, MigrationId};

use crate::error::MigrationError;
use crate::host::{Local, Peer, SourceVm};
use crate::link::{Heard, Link};
use crate::report_builder::ReportBuilder;
use crate::resources::Pools;
use crate::waits::Pulse;
use crate::watch::Watch;
use blackout::Blackout;
use control::pacing::Pacing;
use control::sampler::Sampler;
use control::stream_state::StreamState;
use control::throttle::OurStops;
pub(crate) use control::throttle::settings as throttle_settings;
use disks::room::DiskRoom;
use disks::{Chosen, Disks};
use from_disks::FromDisks;
use lanes::Lanes;
use phases::audit::{self, Comparison};
use saying::Saying;

/// How often a migration that waits looks whether anything moves.
const LOOK: Duration = Duration::from_secs(1);

/// A migration that has ended here.
#[derive(Debug)]
pub struct Migrated {
    /// How it went. With [`Outcome::Done`] the VM runs at the destination and
    /// its QEMU here has ended; else it goes on here, unless the reason says
    /// otherwise.
    pub report: Report,
    /// A switchover that is not over on this side: the VM is in doubt, or the
    /// other side has not heard all yet.
    pub unsettled: Option<Driver>,
    /// Whether it is settled what becomes of the VM here.
    pub decided: bool,
}

/// Moves `vm` to `peer`. Blocks until it is over; watch it meanwhile.
#[must_use]
pub fn migrate(
    local: &Local,
    peer: &Peer,
    vm: SourceVm,
    request: &MigrateRequest,
    watch: &Arc<Watch>,
) -> Migrated {
    let _until_it_is_over = local.sharing.as_ref().and_then(|sharing| sharing.give_way());
    let report_builder = Arc::new(ReportBuilder::new(Arc::clone(watch), request.downtime_ms));
    let mut source = Source::new(local, peer, vm, request, Arc::clone(&report_builder));
    let outcome = match source.run() {
        Ok(()) => Outcome::Done,
        Err(error) => source.undo(&error),
    };
    source.account();
    let unsettled = source.driver.take().filter(|driver| !driver.machine().is_over());
    let decided = source.fate.is_some() || unsettled.is_none();
    // QEMU's settings are back, and its sockets closed, when it is.
    drop(source);
    Migrated { report: report_builder.end(outcome), unsettled, decided }
}

/// Something that threads of this migration tell the one that leads it.
pub(crate) enum Notice {
    /// QEMU has set its migration up, and begins with RAM.
    FirstPassBegins,
    /// RAM has ended; what follows is the residue's tail.
    TailBegins,
    /// The stream is passed through whole, and why.
    Unsplittable(String),
    /// All disks were copied once, and are kept up to date.
    DisksReady,
    /// The VM can't be followed even as slow as it may be.
    Stalled(String),
    /// The mirrors have written all of the stopped VM's disks; or one failed.
    Disks(Result<(), String>),
    /// A thread of this name that the migration needs has panicked.
    Panicked(String),
    /// The tap has read QEMU's stream to its end, and all pages are placed; or
    /// not.
    Delivered(Result<tap::Summary, MigrationError>),
}

/// What the leading thread waits for.
pub(crate) enum Happening {
    Qemu(Event),
    Peer(ToSource),
    /// Of the switchover.
    Said(Envelope<switchover::ToSource>),
    Notice(Notice),
    /// What was waited for has not come in its time.
    Late,
}

pub(crate) struct Source<'m> {
    local: &'m Local,
    peer: &'m Peer,
    vm: SourceVm,
    request: &'m MigrateRequest,
    report_builder: Arc<ReportBuilder>,
    notices: (Sender<Notice>, Receiver<Notice>),
    qemu_events: Receiver<Event>,
    was_running: bool,
    pools: Option<Pools>,
    /// Its data threads at this end.
    threads: Arc<DataThreads>,
    control: Option<Control>,
    /// What can be read of it.
    ram: RamBlocks,
    /// What QEMU handed over, for the audit.
    handed_over: Arc<HandedOver>,
    comparison: Comparison,
    storage: Option<FromDisks>,
    chosen: Option<Chosen>,
    disk_room: Arc<DiskRoom>,
    disks: Option<Disks>,
    stream: Option<Stream>,
    /// Stops of the VM that are for slowing it.
    stops: Arc<OurStops>,
    stopped: Option<Stop>,
    blackout: Blackout,
    /// What the journals call this migration.
    switchover: Option<MigrationId>,
    /// Whose the VM is; none before the destination is ready.
    driver: Option<Driver>,
    /// What it has decided.
    fate: Option<Fate>,
    /// What it can't know or do.
    doubt: Option<Doubt>,
    /// When the operator's patience ends.
    over: Option<Instant>,
    /// `go` was said: the operator can't cancel any more.
    committed: bool,
    cpu: Duration,
}

/// The VM's stop: when, and what was delivered by then.
struct Stop {
    at: Instant,
    delivered: Delivered,
}

/// The control connection.
struct Control {
    link: Arc<Link<ToDestination>>,
    /// What the leading thread says.
    saying: Saying,
    hear: Receiver<Heard<ToSource>>,
    prepared: Option<wire::Prepared>,
}

/// Everything that lives while QEMU streams.
struct Stream {
    outgoing: Arc<Outgoing>,
    state: Arc<StreamState>,
    lanes: Arc<Lanes>,
    stage: Option<Arc<Stage>>,
    tap: tap::Stopper,
    sampler: Option<Sampler>,
    pacing: Option<Pacing>,
    /// Ends before the lanes do.
    announcer: Option<Announcer>,
    /// Where QEMU connects to the tap.
    _socket: Rendezvous,
}

impl<'m> Source<'m> {
    fn new(
        local: &'m Local,
        peer: &'m Peer,
        vm: SourceVm,
        request: &'m MigrateRequest,
        report_builder: Arc<ReportBuilder>,
    ) -> Self {
        let qemu_events = vm.machine.qmp.events();
        let notices = unbounded();
        let tell: Sender<Notice> = notices.0.clone();
        let threads = DataThreads::new(
            sched_params(&report_builder.watch().bounds(), false),
            move |thread| {
                let _ = tell.send(Notice::Panicked(thread.to_owned()));
            },
        );
        Self {
            local,
            peer,
            vm,
            request,
            report_builder,
            notices,
            qemu_events,
            was_running: false,
            pools: None,
            threads,
            control: None,
            ram: RamBlocks::default(),
            handed_over: audit::handed_over(request.audit),
            comparison: Comparison::default(),
            storage: None,
            chosen: None,
            disk_room: Arc::default(),
            disks: None,
            stream: None,
            stops: Arc::default(),
            stopped: None,
            blackout: Blackout::default(),
            switchover: None,
            driver: None,
            fate: None,
            doubt: None,
            over: request.timeout_s.map(|s| Instant::now() + Duration::from_secs(s)),
            committed: false,
            cpu: Duration::ZERO,
        }
    }

    fn run(&mut self) -> Result<(), MigrationError> {
        self.connect()?;
        self.prepare()?;
        self.open_journal()?;
        self.stream()?;
        self.deliver()?;
        let loaded = self.complete()?;
        self.check_lanes()?;
        self.commit(loaded) // with the point of no return
    }

    /// Waits until QEMU has stopped the VM and handed over everything, and
    /// everything is placed: the barrier.
    fn deliver(&mut self) -> Result<(), MigrationError> {
        let (mut pulse, mut look) = (Pulse::new(), Instant::now());
        loop {
            match self.next_or_late(Some(look))? {
                Happening::Late => {
                    self.check_progress(&mut pulse)?;
                    look = Instant::now() + LOOK;
                }
                Happening::Notice(Notice::FirstPassBegins) => {
                    self.report_builder.enter(Phase::FirstPass);
                }
                Happening::Notice(Notice::TailBegins) => {
                    self.report_builder.enter(Phase::Stopped);
                    self.stands_still(Instant::now());
                    // QEMU tells of no stop of a VM that its owner paused before,
                    // or that stood still for a moment.
                    self.step(Step::Stopped { run: self.was_running });
                }
                Happening::Notice(Notice::Unsplittable(reason)) => {
                    self.report_builder.enter(Phase::FirstPass);
                    self.report_builder
                        .note(format!("the stream is passed through whole: {reason}"));
                    self.report_builder.tell(|report| report.tap = "whole".to_owned());
                }
                Happening::Notice(Notice::DisksReady) => {
                    let stream = self.stream.as_ref().expect("disks move beside a stream");
                    if !stream.outgoing.is_held() {
                        stream.outgoing.start()?;
                    }
                }
                Happening::Notice(Notice::Disks(drained)) => {
                    drained.map_err(MigrationError::Disks)?;
                    self.blackout.drained();
                    let stream = self.stream.as_ref().expect("disks move beside a stream");
                    stream.outgoing.continue_switchover()?;
                }
                Happening::Notice(Notice::Stalled(why)) => {
                    return Err(MigrationError::NotFollowed(why));
                }
                Happening::Notice(Notice::Panicked(thread)) => {
                    return Err(MigrationError::Panicked { thread });
                }
                Happening::Notice(Notice::Delivered(outcome)) => {
                    outcome.map_err(|error| self.behind(error))?;
                    self.note_broken_hold();
                    return Ok(());
                }
                Happening::Qemu(event) => self.follow(&event)?,
                Happening::Peer(ToSource::Placement { mapped, inline }) => {
                    self.note_placement(&mapped, &inline);
                }
                Happening::Peer(other) => return Err(self.unexpected(&other)),
                Happening::Said(said) => return Err(self.said_early(&said)),
            }
        }
    }

    fn note_placement(&self, mapped: &[String], inline: &[String]) {
        let how = if mapped.is_empty() { "inline" } else { "mapped" };
        tracing::debug!(?mapped, ?inline, "placement");
        self.report_builder.tell(|report| report.placement = how.to_owned());
    }

    /// A QEMU that stops the VM by itself, although it was to wait until it may, has
    /// left more in flight than is meant for the blackout.
    fn note_broken_hold(&self) {
        let early = self.stream.as_ref().is_some_and(|stream| stream.tap.ended_early());
        if early && self.stopped.is_some() {
            self.report_builder.note(
                "QEMU stopped the VM before it was allowed to: more was in flight than the \
                 downtime goal has room for",
            );
        }
    }

    fn follow(&mut self, event: &Event) -> Result<(), MigrationError> {
        match event.name.as_str() {
            "STOP" if self.stops.take_slice(event.at) => {}
            "STOP" if self.owner_paused() => self.was_running = false,
            "STOP" => {
                self.stopped = Some(Stop { at: event.at, delivered: self.delivered() });
                self.report_builder.enter(Phase::Stopped);
                self.stands_still(event.at);
                self.step(Step::Stopped { run: self.was_running });
            }
            "RESUME" => {
                self.was_running = true;
                self.blackout.is_over();
            }
            "MIGRATION" if event.data["status"] == "pre-switchover" => {
                if let Some(disks) = &mut self.disks {
                    disks.drain(self.notices.0.clone(), self.local.waits.drain)?;
                }
            }
            "MIGRATION" if event.data["status"] == "failed" => {
                let why = self.stream.as_ref().and_then(|stream| stream.outgoing.error());
                let why =
                    why.unwrap_or_else(|| "it says only that the migration failed".to_owned());
                return Err(MigrationError::Qemu(why));
            }
            "SHUTDOWN" => {
                let reason = event.data["reason"].as_str().unwrap_or("unknown reason");
                return Err(MigrationError::VmGone(format!("it shut down ({reason})")));
            }
            _ => {}
        }
        Ok(())
    }
}

/// What of it is for data threads.
/// For threads that carry data of a VM that stands still, or runs.
fn sched_params(bounds: &Bounds, stands_still: bool) -> SchedParams {
    let least = if stands_still { Priority::Normal } else { Priority::Low };
    SchedParams { priority: bounds.priority.max(least), cpus: bounds.cpus.clone() }
}
