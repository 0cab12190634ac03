//! The source's side of one migration.
//!
//! [`migrate`] is the ordered list of phases. Whatever fails before the commit
//! leads to [`Source::undo`]: the VM goes on here and the destination's QEMU is
//! gone. After [`Source::commit`] has said `go` there is no way back.

mod collector;
mod disk_tap;
mod disks;
mod flushes;
mod live;
mod pacing;
mod sampler;
mod sieve;
mod start;
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

use crate::error::MigrationError;
use crate::host::{Local, Peer, SourceVm};
use crate::link::{Heard, Link};
use crate::resources::Pools;
use crate::story::Story;
use crate::watch::Watch;
use disks::{Chosen, Disks};
use live::Live;
use pacing::{Pacing, pace_bounds};
use sampler::Sampler;
use sieve::Sieve;

/// The destination may have to make gigabytes of hugetlb RAM and start QEMU.
const PREPARE_MAX: Duration = Duration::from_secs(120);
/// Loading device state takes QEMU below a second; this is for a host in swap.
const LOAD_MAX: Duration = Duration::from_secs(60);
/// `cont` opens the disks: a slow storage network may take seconds.
const RUN_MAX: Duration = Duration::from_secs(60);
/// A note on disk there, after that.
const NOTED_MAX: Duration = Duration::from_secs(5);
/// From the stream's end to QEMU's word that it is complete.
const COMPLETED_MAX: Duration = Duration::from_secs(10);
/// A QEMU that is not finishing answers in a millisecond or two.
const STATUS_MAX: Duration = Duration::from_millis(200);

/// Moves `vm` to `peer`. Blocks until it is over; watch it meanwhile.
///
/// With [`Outcome::Done`] the VM runs at the destination and its QEMU here has
/// ended. Else it goes on here, unless the report's reason says otherwise.
#[must_use]
pub fn migrate(
    local: &Local,
    peer: &Peer,
    vm: SourceVm,
    request: &MigrateRequest,
    watch: &Arc<Watch>,
) -> Report {
    let story = Arc::new(Story::new(Arc::clone(watch), request.downtime_ms));
    let mut source = Source::new(local, peer, vm, request, Arc::clone(&story));
    let outcome = match source.run() {
        Ok(()) => Outcome::Done,
        Err(error) => source.undo(&error),
    };
    source.account();
    story.end(outcome)
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
    Notice(Notice),
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
    disks: Option<Disks>,
    stream: Option<Stream>,
    stopped: Option<Stop>,
    /// `go` was said: nothing is undone any more.
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
            disks: None,
            stream: None,
            stopped: None,
            committed: false,
            cpu: Duration::ZERO,
        }
    }

    fn run(&mut self) -> Result<(), MigrationError> {
        self.connect()?;
        self.prepare()?;
        self.stream()?;
        self.deliver()?;
        self.complete()?;
        self.commit()?; // the point of no return
        self.leave();
        Ok(())
    }

    /// Waits until QEMU has stopped the VM and handed over everything, and
    /// everything is placed: the barrier.
    fn deliver(&mut self) -> Result<(), MigrationError> {
        loop {
            match self.next(None)? {
                Happening::Notice(Notice::FirstPassBegins) => self.story.enter(Phase::FirstPass),
                Happening::Notice(Notice::TailBegins) => self.story.enter(Phase::Stopped),
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
                Happening::Notice(Notice::Delivered(outcome)) => {
                    outcome?;
                    return Ok(());
                }
                Happening::Qemu(event) => self.follow(&event)?,
                Happening::Peer(ToSource::Placement { mapped, inline }) => {
                    self.note_placement(&mapped, &inline);
                }
                Happening::Peer(other) => return Err(self.unexpected(&other)),
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
            "STOP" if self.owner_paused() => self.was_running = false,
            "STOP" => {
                let lanes_busy = self.lanes_busy();
                self.stopped = Some(Stop { at: event.at, lanes_busy });
                self.story.enter(Phase::Stopped);
            }
            "RESUME" => self.was_running = true,
            "MIGRATION" if event.data["status"] == "pre-switchover" => {
                if let Some(disks) = &mut self.disks {
                    disks.drain(self.notices.0.clone())?;
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

    /// Lets the destination load, and waits until it has.
    fn complete(&mut self) -> Result<(), MigrationError> {
        let stream = self.stream.as_ref().expect("a stream was delivered");
        let residue_bytes = stream.live.residue_bytes.load(Relaxed);
        self.say(&ToDestination::Complete { residue_bytes })?;
        let until = Instant::now() + LOAD_MAX;
        loop {
            match self.next(Some(until))? {
                Happening::Peer(ToSource::Loaded) => break,
                Happening::Peer(ToSource::Placement { mapped, inline }) => {
                    self.note_placement(&mapped, &inline);
                }
                Happening::Peer(other) => return Err(self.unexpected(&other)),
                Happening::Qemu(event) => self.follow(&event)?,
                Happening::Notice(_) => {}
            }
        }
        self.story.enter(Phase::Loaded);
        Ok(())
    }

    /// Gives the VM up, and waits until it runs there.
    fn commit(&mut self) -> Result<(), MigrationError> {
        let stream = self.stream.as_ref().expect("a stream was delivered");
        // A QEMU that ends `failed` or `cancelled` runs the VM again by itself:
        // only one that says `completed` and `postmigrate` has let go of it.
        stream.outgoing.wait_completed(COMPLETED_MAX)?;
        self.committed = true;
        self.story.enter(Phase::Committed);
        self.say(&ToDestination::Go { run: self.was_running })
            .map_err(|error| self.in_doubt(&error.to_string()))?;
        let until = Instant::now() + RUN_MAX;
        loop {
            match self.next(Some(until)) {
                Ok(Happening::Peer(ToSource::Running { cpu_s, pool_high_water_bytes })) => {
                    self.running(cpu_s, pool_high_water_bytes);
                    return Ok(());
                }
                Ok(Happening::Peer(ToSource::CannotRun { reason })) => {
                    // It never ran there, and its QEMU there is gone.
                    self.committed = false;
                    let host = self.peer.name.clone();
                    return Err(MigrationError::DestinationFailed { host, reason });
                }
                Ok(_) => {}
                Err(error) => return Err(self.in_doubt(&error.to_string())),
            }
        }
    }

    fn running(&mut self, cpu_s: f64, pool_high_water_bytes: u64) {
        self.story.enter(Phase::Running);
        let mut downtime_ms = None;
        if let Some(stop) = &self.stopped {
            let gone = stop.at.elapsed();
            let moving = self.lanes_busy().saturating_sub(stop.lanes_busy);
            self.local.fixed_cost.learn(gone.saturating_sub(moving));
            downtime_ms = Some(gone.as_secs_f64() * 1e3);
        }
        self.story.tell(|report| {
            report.downtime_ms = downtime_ms;
            report.cpu_destination_s = cpu_s;
            report.pool_high_water_bytes[1] = pool_high_water_bytes;
        });
    }

    fn lanes_busy(&self) -> Duration {
        self.stream.as_ref().map_or(Duration::ZERO, |stream| stream.lanes.delivered().busy)
    }

    fn in_doubt(&self, why: &str) -> MigrationError {
        MigrationError::InDoubt { host: self.peer.name.clone(), why: why.to_owned() }
    }

    /// The VM runs elsewhere: ends its QEMU here.
    fn leave(&mut self) {
        self.stop_stream(true);
        self.account_disks();
        self.disks = None;
        if let Err(error) = self.vm.machine.quit() {
            self.story.note(format!("the source's QEMU had to be left behind: {error}"));
        }
        self.wait_noted();
    }

    /// The destination hangs up once it has noted that the VM is its own: who
    /// is told that the migration is over finds the VM there, free to move on.
    fn wait_noted(&self) {
        let Some(control) = &self.control else { return };
        let until = Instant::now() + NOTED_MAX;
        while let Ok(heard) = control.hear.recv_deadline(until) {
            if matches!(heard, Heard::Gone(_)) {
                return;
            }
        }
    }

    /// The next thing that matters; what ends any phase is an error here.
    fn next(&mut self, until: Option<Instant>) -> Result<Happening, MigrationError> {
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
        let host = &self.peer.name;
        let lost = |why: String| MigrationError::PeerLost { host: host.clone(), why };
        select! {
            recv(self.qemu_events) -> event => match event {
                Ok(event) => Ok(Some(Happening::Qemu(event))),
                Err(_) => Err(MigrationError::VmGone("its QEMU ended".to_owned())),
            },
            recv(control.hear) -> heard => match heard {
                Ok(Heard::Message(ToSource::Refused { reason })) => {
                    Err(MigrationError::Refused { host: host.clone(), reason })
                }
                Ok(Heard::Message(ToSource::Failed { reason })) => {
                    Err(MigrationError::DestinationFailed { host: host.clone(), reason })
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
            recv(late) -> _ => Err(lost("it did not answer in time".to_owned())),
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
        if self.committed { Ok(()) } else { self.say(&ToDestination::Terms(terms(&bounds))) }
    }

    fn say(&self, message: &ToDestination) -> Result<(), MigrationError> {
        let control = self.control.as_ref().expect("connected");
        control.link.say(message).map_err(|error| MigrationError::PeerLost {
            host: self.peer.name.clone(),
            why: error.to_string(),
        })
    }

    fn unexpected(&self, message: &ToSource) -> MigrationError {
        MigrationError::PeerLost {
            host: self.peer.name.clone(),
            why: format!("it said something out of turn: {message:?}"),
        }
    }
}

/// What of it is for data threads.
fn terms(bounds: &Bounds) -> Terms {
    Terms { priority: bounds.priority, cpus: bounds.cpus.clone() }
}
