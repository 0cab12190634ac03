//! The source's side of one migration.
//!
//! [`migrate`] is the ordered list of phases. Whatever fails before the commit
//! leads to [`Source::undo`]: the VM goes on here and the destination's QEMU is
//! gone. Whose the VM is decides `switchover::source` alone, which keeps a
//! journal; its hands are in `hands`.

mod collector;
mod commit;
mod disk_room;
mod disk_tap;
mod disks;
mod flushes;
mod hands;
mod limit;
mod live;
mod pacing;
mod sampler;
mod settle;
mod sieve;
mod start;
mod throttle;
mod undo;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use api::{Bounds, MigrateRequest, Outcome, Phase, Report};
use crew::{Crew, Terms};
use crossbeam_channel::{Receiver, Sender, select, unbounded};
use qemu::outgoing::Outgoing;
use qemu::qmp::Event;
use qemu::rendezvous::Rendezvous;
use transport::Lanes;
use wire::{ToDestination, ToSource};

use switchover::source::{Driver, Event as Step, Outcome as Fate};
use switchover::{Doubt, Envelope, MigrationId, Reason};

use crate::error::MigrationError;
use crate::host::{Local, Peer, SourceVm};
use crate::link::{Heard, Link};
use crate::resources::Pools;
use crate::story::Story;
use crate::waits::Pulse;
use crate::watch::Watch;
use disk_room::DiskRoom;
use disks::{Chosen, Disks};
use live::Live;
use pacing::{Pacing, pace_bounds};
use sampler::Sampler;
use sieve::Sieve;
use throttle::OurStops;
pub(crate) use throttle::settings as throttle_settings;

/// How often a migration that waits looks whether anything moves.
const LOOK: Duration = Duration::from_secs(1);
/// A QEMU that is not finishing answers in a millisecond or two.
const STATUS_MAX: Duration = Duration::from_millis(200);

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
    let story = Arc::new(Story::new(Arc::clone(watch), request.downtime_ms));
    let mut source = Source::new(local, peer, vm, request, Arc::clone(&story));
    let outcome = match source.run() {
        Ok(()) => Outcome::Done,
        Err(error) => source.undo(&error),
    };
    source.account();
    let unsettled = source.driver.take().filter(|driver| !driver.machine().is_over());
    let decided = source.fate.is_some() || unsettled.is_none();
    // QEMU's settings are back, and its sockets closed, when it is.
    drop(source);
    Migrated { report: story.end(outcome), unsettled, decided }
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
    /// The tap has read QEMU's stream to its end, and all pages are placed; or
    /// not.
    Delivered(Result<tap::Summary, MigrationError>),
}

/// What the leading thread waits for.
enum Happening {
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
    story: Arc<Story>,
    notices: (Sender<Notice>, Receiver<Notice>),
    qemu_events: Receiver<Event>,
    was_running: bool,
    pools: Option<Pools>,
    /// Its data threads at this end.
    crew: Arc<Crew>,
    control: Option<Control>,
    sieve: Option<Arc<Sieve>>,
    chosen: Option<Chosen>,
    disk_room: Arc<DiskRoom>,
    disks: Option<Disks>,
    stream: Option<Stream>,
    /// Stops of the VM that are for slowing it.
    stops: Arc<OurStops>,
    stopped: Option<Stop>,
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

/// The VM's stop: when, and how long lanes had been busy by then.
struct Stop {
    at: Instant,
    lanes_busy: Duration,
}

/// The control connection.
struct Control {
    link: Arc<Link<ToDestination>>,
    hear: Receiver<Heard<ToSource>>,
    prepared: Option<wire::Prepared>,
}

/// Everything that lives while QEMU streams.
struct Stream {
    outgoing: Arc<Outgoing>,
    live: Arc<Live>,
    lanes: Arc<Lanes>,
    tap: tap::Stopper,
    sampler: Option<Sampler>,
    pacing: Option<Pacing>,
    /// Where QEMU connects to the tap.
    _socket: Rendezvous,
}

impl<'m> Source<'m> {
    fn new(
        local: &'m Local,
        peer: &'m Peer,
        vm: SourceVm,
        request: &'m MigrateRequest,
        story: Arc<Story>,
    ) -> Self {
        let qemu_events = vm.machine.qmp.events();
        let crew = Crew::new(terms(&story.watch().bounds()));
        Self {
            local,
            peer,
            vm,
            request,
            story,
            notices: unbounded(),
            qemu_events,
            was_running: false,
            pools: None,
            crew,
            control: None,
            sieve: None,
            chosen: None,
            disk_room: Arc::default(),
            disks: None,
            stream: None,
            stops: Arc::default(),
            stopped: None,
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
        self.commit(loaded) // with the point of no return
    }

    /// Waits until QEMU has stopped the VM and handed over everything, and
    /// everything is placed: the barrier.
    fn deliver(&mut self) -> Result<(), MigrationError> {
        let (mut pulse, mut look) = (Pulse::new(), Instant::now());
        loop {
            match self.next_or_late(Some(look))? {
                Happening::Late => {
                    self.feel(&mut pulse)?;
                    look = Instant::now() + LOOK;
                }
                Happening::Notice(Notice::FirstPassBegins) => self.story.enter(Phase::FirstPass),
                Happening::Notice(Notice::TailBegins) => {
                    self.story.enter(Phase::Stopped);
                    // QEMU tells of no stop of a VM that its owner paused before,
                    // or that stood still for a moment.
                    self.step(Step::Stopped { run: self.was_running });
                }
                Happening::Notice(Notice::Unsplittable(reason)) => {
                    self.story.enter(Phase::FirstPass);
                    self.story.note(format!("the stream is passed through whole: {reason}"));
                    self.story.tell(|report| report.tap = "whole".to_owned());
                }
                Happening::Notice(Notice::DisksReady) => {
                    let stream = self.stream.as_ref().expect("disks move beside a stream");
                    if !stream.outgoing.is_held() {
                        stream.outgoing.start()?;
                    }
                }
                Happening::Notice(Notice::Disks(drained)) => {
                    drained.map_err(MigrationError::Disks)?;
                    let stream = self.stream.as_ref().expect("disks move beside a stream");
                    stream.outgoing.continue_switchover()?;
                }
                Happening::Notice(Notice::Stalled(why)) => {
                    return Err(MigrationError::NotFollowed(why));
                }
                Happening::Notice(Notice::Delivered(outcome)) => {
                    outcome.map_err(|error| self.behind(error))?;
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
        self.story.tell(|report| report.placement = how.to_owned());
    }

    fn follow(&mut self, event: &Event) -> Result<(), MigrationError> {
        match event.name.as_str() {
            "STOP" if self.stops.take_slice() => {}
            "STOP" if self.owner_paused() => self.was_running = false,
            "STOP" => {
                let lanes_busy = self.lanes_busy();
                self.stopped = Some(Stop { at: event.at, lanes_busy });
                self.story.enter(Phase::Stopped);
                self.step(Step::Stopped { run: self.was_running });
            }
            "RESUME" => self.was_running = true,
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

    /// Whether a stop is its owner's. QEMU's own, to finish, shows as
    /// `finish-migrate`, or QEMU is too busy finishing to answer.
    fn owner_paused(&self) -> bool {
        let status =
            self.vm.machine.qmp.execute_within("query-status", serde_json::json!({}), STATUS_MAX);
        status.is_ok_and(|status| status["status"] == "paused")
    }

    /// Whether anything of the VM still arrives.
    fn feel(&self, pulse: &mut Pulse) -> Result<(), MigrationError> {
        let Some(stream) = &self.stream else { return Ok(()) };
        let come = stream.lanes.delivered();
        let memory = come.body_bytes + come.fill_bytes + come.dropped_bytes;
        let disks = come.block_bytes + come.block_zero_bytes;
        let tapped = stream.live.residue_bytes.load(Relaxed) + stream.live.taken().0;
        let waited = pulse.beat(memory + disks + tapped, LOOK);
        if waited < self.local.waits.stall {
            return Ok(());
        }
        Err(MigrationError::Stalled { host: self.peer.name.clone(), waited })
    }

    /// The next thing that matters; what ends any phase is an error here, and so
    /// is a wait that was too long.
    fn next(&mut self, until: Instant) -> Result<Happening, MigrationError> {
        match self.next_or_late(Some(until))? {
            Happening::Late => Err(MigrationError::PeerLost {
                host: self.peer.name.clone(),
                why: "it did not answer in time".to_owned(),
            }),
            happening => Ok(happening),
        }
    }

    fn next_or_late(&mut self, until: Option<Instant>) -> Result<Happening, MigrationError> {
        loop {
            match self.happening(until)? {
                // In whatever phase, somebody else waits for it.
                Some(Happening::Peer(ToSource::DiskFlushed { ticket, error })) => {
                    if let Some(disks) = &self.disks {
                        disks.flushed(ticket, error);
                    }
                }
                Some(Happening::Peer(ToSource::NicUse(used))) => {
                    if let Some(pacing) = self.pacing() {
                        pacing.hear(used);
                    }
                }
                Some(Happening::Peer(ToSource::Note { text })) => self.story.note(text),
                Some(Happening::Peer(ToSource::Switchover { said })) => {
                    return Ok(Happening::Said(said));
                }
                Some(happening) => return Ok(happening),
                None => self.rebind()?,
            }
        }
    }

    /// None: the operator has changed what it may use.
    fn happening(&self, until: Option<Instant>) -> Result<Option<Happening>, MigrationError> {
        let control = self.control.as_ref().expect("connected");
        let cancelled = self.story.watch().cancelled();
        let never = crossbeam_channel::never();
        let late = until.map_or_else(crossbeam_channel::never, crossbeam_channel::at);
        let cancelled = if self.committed { &never } else { cancelled };
        let over = self.over.filter(|_| !self.committed);
        let over = over.map_or_else(crossbeam_channel::never, crossbeam_channel::at);
        let host = &self.peer.name;
        let lost = |why: String| MigrationError::PeerLost { host: host.clone(), why };
        select! {
            recv(self.qemu_events) -> event => match event {
                Ok(event) => Ok(Some(Happening::Qemu(event))),
                Err(_) => Err(MigrationError::VmGone("its QEMU ended".to_owned())),
            },
            recv(control.hear) -> heard => match heard {
                Ok(Heard::Message(ToSource::Refused { reason })) => {
                    let reason = Reason::new(reason).into();
                    Err(MigrationError::Refused { host: host.clone(), reason })
                }
                Ok(Heard::Message(message)) => Ok(Some(Happening::Peer(message))),
                Ok(Heard::Gone(error)) => Err(lost(error.to_string())),
                Ok(_) => Err(lost("it sent residue, which only a source does".to_owned())),
                Err(_) => Err(lost("the connection has ended".to_owned())),
            },
            recv(self.notices.1) -> notice => match notice {
                Ok(notice) => Ok(Some(Happening::Notice(notice))),
                Err(_) => unreachable!("this struct holds a sender"),
            },
            recv(cancelled) -> _ => Err(MigrationError::Cancelled),
            recv(self.story.watch().rebound()) -> _ => Ok(None),
            recv(late) -> _ => Ok(Some(Happening::Late)),
            recv(over) -> _ => {
                let allowed = Duration::from_secs(self.request.timeout_s.unwrap_or_default());
                Err(MigrationError::TooLong { allowed })
            }
        }
    }

    fn pacing(&self) -> Option<&Pacing> {
        self.stream.as_ref().and_then(|stream| stream.pacing.as_ref())
    }

    /// The operator has changed what it may use: that holds at both ends.
    fn rebind(&self) -> Result<(), MigrationError> {
        let bounds = self.story.watch().bounds();
        tracing::info!(vm = self.vm.name, ?bounds, "other bounds");
        self.story.rebound(&bounds);
        self.crew.set(&terms(&bounds));
        if let Some(pacing) = self.pacing() {
            pacing.set(pace_bounds(&bounds));
        }
        // With the VM given up, no data thread is left to be told.
        if self.committed { Ok(()) } else { self.send(&ToDestination::Terms(terms(&bounds))) }
    }

    fn send(&self, message: &ToDestination) -> Result<(), MigrationError> {
        let control = self.control.as_ref().expect("connected");
        control.link.say(message).map_err(|error| MigrationError::PeerLost {
            host: self.peer.name.clone(),
            why: error.to_string(),
        })
    }

    /// What the destination said of the switchover before it was to.
    fn said_early(&self, said: &Envelope<switchover::ToSource>) -> MigrationError {
        use switchover::ToSource::{Loaded, Lost, Refused, Running, Unknown};
        let reason = match &said.message {
            Refused { reason } | Lost { reason } => reason.to_string(),
            Unknown => "its agent knows nothing of this migration any more".to_owned(),
            Loaded | Running => "it says that it has the VM, which it was not given".to_owned(),
        };
        MigrationError::DestinationFailed { host: self.peer.name.clone(), reason }
    }

    fn unexpected(&self, message: &ToSource) -> MigrationError {
        MigrationError::PeerLost {
            host: self.peer.name.clone(),
            why: Reason::new(format!("it said something out of turn: {message:?}")).into(),
        }
    }
}

/// What of it is for data threads.
fn terms(bounds: &Bounds) -> Terms {
    Terms { priority: bounds.priority, cpus: bounds.cpus.clone() }
}
