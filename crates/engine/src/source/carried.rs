//! The source's side of a migration that somebody else commands, such as libvirt. Two
//! agents carry it from QEMU to QEMU; neither of them has started or asks one.
//!
//! ```text
//! opening     somebody has connected to this agent's door; the agent of the destination
//!             connects to the QEMU there, and says whose it is
//! setup       QEMU has set its migration up, and made its channels: the tap takes them
//! first pass, pages go by lanes; the pool's bound keeps little in flight
//! later pass
//! stopped     RAM has ended; when all is placed, the destination compares it, and only
//!             then feeds what comes after RAM to its QEMU
//! loaded      that QEMU has said SHUT, which was passed on; QEMU here closes
//! ```
//!
//! Whoever commands both QEMUs decides what becomes of the VM. All that this can do is to
//! fail, by closing the migration's connections at both ends (see `caller` for how QEMU's
//! are): then the VM goes on here. So there is no journal, and nothing is ever answered in the name of the
//! destination's QEMU.

mod caller;
mod collector;
mod opening;
mod relay;
mod sampler;
mod setup;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ::audit::{HandedOver, NotKept};
use api::{Audit, Audited, Bounds, Compress, LaneReport, Outcome, Phase, Report};
use crossbeam_channel::{Receiver, Sender, select, unbounded};
use data_threads::DataThreads;
use stream::return_path::Follower;
use switchover::Reason;
use tap::{Taken, Tap};
use transport::LanesPlan;
use wire::carry::{Carrying, Channels};
use wire::{ToDestination, ToSource};

use super::context::{local as local_error, no_thread, sched_params};
use super::control::pacing::{Pacing, pace_bounds};
use super::control::sampler::ticking::Ticking;
use super::control::stream_state::{StreamState, Traits};
use super::lanes::{self, Lanes};
use super::phases::audit::{self, Compared, Comparison, UNASKED};
use super::phases::start::{first_encoding, lane_endpoints, token};
use crate::error::MigrationError;
use crate::host::{Local, Peer};
use crate::link::{Heard, Link};
use crate::report_builder::ReportBuilder;
use crate::resources::Pools;
use crate::watch::Watch;
use caller::CLOSING_MAX;
pub use caller::Caller;
use collector::{Collector, Tail};
pub use opening::{More, Opening};
use relay::Passed;
pub use relay::Relay;

/// What an agent's operator has set for migrations that others command.
#[derive(Clone, Debug)]
pub struct CarryRequest {
    /// Connections to carry it; by default as many as for the agent's own.
    pub lanes: Option<u16>,
    /// The downtime that little enough is kept in flight for.
    pub downtime_ms: u64,
    /// How bodies are encoded.
    pub compress: Compress,
    /// What is compared before the VM is loaded.
    pub audit: Audit,
    /// What each may use.
    pub bounds: Bounds,
}

impl Default for CarryRequest {
    fn default() -> Self {
        Self {
            lanes: None,
            downtime_ms: 300,
            compress: Compress::default(),
            audit: Audit::default(),
            bounds: Bounds::default(),
        }
    }
}

/// What somebody connected for.
pub enum Content {
    /// A migration.
    Stream(Carried),
    /// Something else: a disk.
    Other(Relay),
}

/// A migration, about to be carried.
pub enum Carried {
    /// Its pages by lanes.
    Split(Box<Split>),
    /// As it is.
    Relayed {
        /// Its only connection.
        relay: Relay,
        /// Why, if that is known.
        why: Option<String>,
    },
}

impl Carried {
    /// Carries it until it is over, which those who watch it see.
    #[must_use]
    pub fn run(self, request: &CarryRequest, watch: &Arc<Watch>) -> Report {
        let report_builder = Arc::new(ReportBuilder::new(Arc::clone(watch), request.downtime_ms));
        report_builder
            .note("carried for whoever commands its QEMUs: they decide, and measure the downtime");
        let ended = match self {
            Self::Split(split) => split.carry(&report_builder),
            Self::Relayed { relay, why } => relayed(relay, why, &report_builder),
        };
        let outcome = match ended {
            Ok(()) => Outcome::Done,
            Err(MigrationError::Cancelled) => Outcome::Cancelled,
            Err(error) => Outcome::Failed(error.to_string()),
        };
        report_builder.end(outcome)
    }
}

/// Passes a stream on as it is.
fn relayed(
    relay: Relay,
    why: Option<String>,
    report_builder: &ReportBuilder,
) -> Result<(), MigrationError> {
    // What is encrypted says nothing of how it ends.
    let is_read = why.is_some();
    let why = why.unwrap_or_else(|| "it is encrypted, or none of QEMU's".to_owned());
    report_builder.note(format!("the stream is passed through as it is: {why}"));
    report_builder.enter(Phase::FirstPass);
    let passed = Arc::<Passed>::default();
    let ended = relay.run_until(&passed, report_builder.watch().cancelled());
    report_builder.tell(|report| {
        report.tap = "relayed".to_owned();
        report.residue_bytes = passed.bytes.load(Relaxed);
        report.wire_bytes = report.residue_bytes;
    });
    let is_loaded = passed.answers.lock().shut() == Some(0);
    match ended {
        // Who is first to close after the last word is no matter.
        Err(error) if !is_loaded || matches!(error, MigrationError::Cancelled) => Err(error),
        Ok(()) if is_read && !is_loaded => Err(MigrationError::Qemu(
            "both QEMUs closed before the destination's had loaded the VM".to_owned(),
        )),
        _ => Ok(()),
    }
}

/// A migration whose pages go by lanes, about to be.
pub struct Split {
    local: Local,
    peer: Peer,
    request: CarryRequest,
    link: Arc<Link<ToDestination>>,
    hear: Receiver<Heard<ToSource>>,
    carrying: Carrying,
    caller: Caller,
    /// What was read of its main connection.
    before: Vec<u8>,
    channels: Option<Channels>,
}

/// Something that threads of this migration tell the one that leads it.
enum Notice {
    /// The block list is known.
    FirstPassBegins,
    /// RAM has ended on the main connection.
    TailBegins,
    /// And on all others: every page is handed on.
    RamOver,
    /// One more came after that.
    PageAfterRam,
    /// The stream is passed through whole after all, and why.
    Unsplittable(String),
    /// From here on it is passed through as it is, and why.
    SplitEnds(String),
    /// All pages are placed, or can't be.
    Placed(Result<(), MigrationError>),
    /// QEMU has closed its connections, or its stream can't be read.
    Ended(Result<tap::Summary, MigrationError>),
    /// A thread of this name has panicked.
    Panicked(String),
}

/// What there is while pages come.
struct Running<'r> {
    split: &'r mut Split,
    report_builder: &'r Arc<ReportBuilder>,
    notices: (Sender<Notice>, Receiver<Notice>),
    threads: Arc<DataThreads>,
    handed_over: Arc<HandedOver>,
    comparison: Comparison,
    state: Arc<StreamState>,
    lanes: Arc<Lanes>,
    tail: Arc<Tail>,
    /// The way back to QEMU.
    main: UnixStream,
    tap: tap::Stopper,
    pacing: Pacing,
    answers: Follower,
    /// When RAM ended.
    stopped: Option<Instant>,
    pools: Pools,
}

impl Split {
    fn carry(mut self, report_builder: &Arc<ReportBuilder>) -> Result<(), MigrationError> {
        report_builder.tell(|report| {
            report.tap = if self.channels.is_some() { "multifd" } else { "classic" }.to_owned();
        });
        for note in &self.carrying.notes {
            report_builder.note(note.clone());
        }
        let mut running = self.start(report_builder)?;
        let sampler = running.sampler();
        let ended = sampler.and_then(|sampler| {
            let ended = running.follow();
            drop(sampler);
            ended
        });
        running.close();
        ended
    }

    /// Starts lanes and tap.
    fn start<'r>(
        &'r mut self,
        report_builder: &'r Arc<ReportBuilder>,
    ) -> Result<Running<'r>, MigrationError> {
        let pools = self.local.resources.leaving(false)?;
        let notices = unbounded();
        let tell: Sender<Notice> = notices.0.clone();
        let bounds = report_builder.watch().bounds();
        let threads = DataThreads::new(sched_params(&bounds, false), move |thread| {
            let _ = tell.send(Notice::Panicked(thread.to_owned()));
        });
        let handed_over = audit::handed_over(self.request.audit);
        let traits =
            Traits { told_bandwidth: false, held: false, sectioned: self.channels.is_none() };
        let goal = Duration::from_millis(self.request.downtime_ms.max(1));
        let state = Arc::new(StreamState::new(&pools, goal, traits));
        let lanes = Arc::new(Lanes::new(self.lanes_plan()?, Some(Arc::clone(&threads))));
        lanes::start(&lanes, None, &self.link)
            .map_err(|error| local_error("starting the lanes' threads", error))?;
        if let Some(channels) = &self.channels {
            self.say(&ToDestination::Channels(channels.clone()))?;
        }
        let tail = Arc::<Tail>::default();
        let collector = Arc::new(Collector {
            state: Arc::clone(&state),
            handed_over: Arc::clone(&handed_over),
            lanes: Arc::clone(&lanes),
            link: Arc::clone(&self.link),
            notices: notices.0.clone(),
            threads: Arc::clone(&threads),
            tail: Arc::clone(&tail),
            ram_over: AtomicBool::new(false),
        });
        let main = self.caller.main().try_clone();
        let main = main.map_err(|error| local_error("keeping QEMU's connection", error))?;
        let (socket, channels) = std::mem::take(&mut self.caller).take_over();
        let channels = channels.into_iter().map(|one| (one.id, one.socket)).collect();
        let before = std::mem::take(&mut self.before);
        let taken = Taken { main: socket, before, channels };
        let tap = Tap::of_taken(taken, Arc::clone(&state.pool), collector)
            .map_err(|error| MigrationError::Tap(error.to_string()))?;
        let stopper = tap.stopper();
        let network = &self.local.resources.network;
        let pacing = Pacing::start(
            Arc::clone(&lanes),
            network,
            pace_bounds(&bounds),
            Arc::clone(&threads),
            Arc::clone(report_builder),
        );
        let pacing = pacing.map_err(no_thread);
        let waiting = wait_for_end(tap, notices.0.clone());
        let (pacing, ()) = pacing.and_then(|pacing| Ok((pacing, waiting?))).inspect_err(|_| {
            lanes.shut();
            stopper.hang_up(CLOSING_MAX);
        })?;
        Ok(Running {
            split: self,
            report_builder,
            notices,
            threads,
            handed_over,
            comparison: Comparison::default(),
            state,
            lanes,
            tail,
            main,
            tap: stopper,
            pacing,
            answers: Follower::default(),
            stopped: None,
            pools,
        })
    }

    fn lanes_plan(&self) -> Result<LanesPlan, MigrationError> {
        let token = token(&self.carrying.token).ok_or_else(|| {
            self.lost("it named the migration in a way that cannot be read".to_owned())
        })?;
        Ok(LanesPlan {
            endpoints: lane_endpoints(&self.local, &self.peer, self.request.lanes),
            peer: self.peer.name.clone(),
            security: self.local.security.clone(),
            token,
            encoding: first_encoding(self.request.compress),
            // Which pages are dirty again only QEMU could say.
            stale_filter: None,
        })
    }

    fn say(&self, message: &ToDestination) -> Result<(), MigrationError> {
        self.link.say(message).map_err(|error| self.lost(error.to_string()))
    }

    fn lost(&self, why: String) -> MigrationError {
        MigrationError::PeerLost { host: self.peer.name.clone(), why }
    }
}

/// Tells when QEMU has closed its connections.
fn wait_for_end(tap: Tap, notices: Sender<Notice>) -> Result<(), MigrationError> {
    let wait = move || {
        let ended = tap.join().map_err(|error| MigrationError::Tap(error.to_string()));
        let _ = notices.send(Notice::Ended(ended));
    };
    let spawned = std::thread::Builder::new().name("carry-end".to_owned()).spawn(wait);
    spawned.map(drop).map_err(no_thread)
}

impl Running<'_> {
    fn sampler(&self) -> Result<Ticking, MigrationError> {
        let watched = sampler::Watched {
            state: Arc::clone(&self.state),
            lanes: Arc::clone(&self.lanes),
            report_builder: Arc::clone(self.report_builder),
            compress: self.split.request.compress,
        };
        sampler::start(watched).map_err(no_thread)
    }

    /// Hears both ends until QEMU has closed its connections after the destination's last
    /// word, or something fails.
    fn follow(&mut self) -> Result<(), MigrationError> {
        loop {
            let watch = self.report_builder.watch();
            select! {
                recv(self.split.hear) -> heard => match heard {
                    Ok(heard) => self.hear(heard)?,
                    // All was said: QEMU here is about to close.
                    Err(_) if self.is_loaded() => return self.wait_closed(),
                    Err(_) => return Err(self.split.lost("the connection has ended".to_owned())),
                },
                recv(self.notices.1) -> notice => match notice {
                    Ok(Notice::Ended(ended)) => return self.ended(ended),
                    Ok(notice) => self.notice(notice)?,
                    Err(_) => unreachable!("this struct holds a sender"),
                },
                recv(watch.cancelled()) -> _ => return Err(MigrationError::Cancelled),
                recv(watch.rebound()) -> _ => self.rebind()?,
            }
        }
    }

    fn notice(&mut self, notice: Notice) -> Result<(), MigrationError> {
        match notice {
            Notice::FirstPassBegins => self.report_builder.enter(Phase::FirstPass),
            Notice::TailBegins => {
                self.stopped = Some(Instant::now());
                self.report_builder.enter(Phase::Stopped);
            }
            Notice::Unsplittable(why) => {
                self.report_builder.enter(Phase::FirstPass);
                self.report_builder.note(format!("the stream is passed through as it is: {why}"));
                self.report_builder.tell(|report| report.tap = "relayed".to_owned());
            }
            Notice::SplitEnds(why) => self.report_builder.note(format!(
                "from its {} on, the stream is passed through as it is, without audit: {why}",
                if self.state.first_pass_over.load(Relaxed) {
                    "later passes"
                } else {
                    "first pass"
                }
            )),
            Notice::RamOver => self.wait_placed()?,
            Notice::Placed(placed) => self.placed(placed)?,
            Notice::PageAfterRam => {
                return Err(MigrationError::Tap(
                    "QEMU sent a page after it had ended its RAM".to_owned(),
                ));
            }
            Notice::Panicked(thread) => return Err(MigrationError::Panicked { thread }),
            Notice::Ended(_) => {}
        }
        Ok(())
    }

    /// The barrier.
    fn wait_placed(&self) -> Result<(), MigrationError> {
        let (lanes, notices) = (Arc::clone(&self.lanes), self.notices.0.clone());
        let host = self.split.peer.name.clone();
        let wait = move || {
            let placed = lanes.wait_drained();
            // The destination ends the lanes when it loads: that is no failure to mend.
            lanes.close();
            let placed = placed.map_err(|source| MigrationError::Lanes { host, source });
            let _ = notices.send(Notice::Placed(placed));
        };
        let spawned = std::thread::Builder::new().name("barrier".to_owned()).spawn(wait);
        spawned.map(drop).map_err(no_thread)
    }

    fn placed(&self, placed: Result<(), MigrationError>) -> Result<(), MigrationError> {
        placed?;
        let totals = self.audit_totals();
        let said = self.tail.placed(&self.split.link, totals);
        said.map_err(|error| self.split.lost(error.to_string()))
    }

    fn audit_totals(&self) -> Vec<u64> {
        let why = match self.handed_over.ledger() {
            Ok(ledger) => return ledger.totals(),
            Err(NotKept::NotWanted) => "it is turned off: `audit` under [carry]",
            Err(NotKept::NoMemory) => "this host has no memory for it: 8 bytes for each page",
            Err(NotKept::NoBlocks) => "QEMU's stream was passed through whole",
        };
        self.report_builder.tell(|report| report.audit = Audited::Nothing { why: why.to_owned() });
        Vec::new()
    }

    fn hear(&mut self, heard: Heard<ToSource>) -> Result<(), MigrationError> {
        let host = || self.split.peer.name.clone();
        match heard {
            Heard::Back(bytes) => self.back(&bytes),
            Heard::Message(ToSource::Placement { mapped, inline }) => {
                let how = if mapped.is_empty() { "inline" } else { "mapped" };
                tracing::debug!(?mapped, ?inline, "placement");
                self.report_builder.tell(|report| report.placement = how.to_owned());
                Ok(())
            }
            Heard::Message(ToSource::NicUse(used)) => {
                self.pacing.hear(used);
                Ok(())
            }
            Heard::Message(ToSource::Note { text }) => {
                self.report_builder.note(text);
                Ok(())
            }
            Heard::Message(ToSource::Cost { cpu_s, pool_high_water_bytes, .. }) => {
                self.report_builder.tell(|report| {
                    report.cpu_destination_s = cpu_s;
                    report.pool_high_water_bytes[1] = pool_high_water_bytes;
                });
                Ok(())
            }
            Heard::Message(ToSource::Refused { reason }) => {
                let reason = Reason::new(reason).into();
                Err(MigrationError::DestinationFailed { host: host(), reason })
            }
            Heard::Message(other) => self.compare(&other),
            // All was said: QEMU here is about to close.
            Heard::Gone(_) if self.is_loaded() => Ok(()),
            Heard::Gone(error) => Err(self.split.lost(error.to_string())),
            _ => Err(self.split.lost("it sent a message out of turn".to_owned())),
        }
    }

    fn compare(&mut self, heard: &ToSource) -> Result<(), MigrationError> {
        let lost = |why: String| self.split.lost(why);
        match self.comparison.compare(&self.handed_over, heard) {
            None => Err(lost("it sent a message out of turn".to_owned())),
            Some(Compared::Waits) => Ok(()),
            Some(Compared::Asks(said)) => self.split.say(&said),
            Some(Compared::Unasked) => Err(lost(UNASKED.to_owned())),
            Some(Compared::Same { reread_pages }) => {
                let pages = self.handed_over.ledger().map_or(0, ::audit::Ledger::pages);
                let same = Audited::Same { pages, reread_pages };
                self.report_builder.tell(|report| report.audit = same);
                self.tail.go_on(&self.split.link).map_err(|error| lost(error.to_string()))
            }
            Some(Compared::Differs { pages, examples }) => {
                for example in &examples {
                    tracing::error!(
                        vm = self.split.carrying.vm,
                        "the audit found a difference: {example}"
                    );
                }
                let first = examples.first().cloned().unwrap_or_default();
                let found = Audited::Differences { pages, examples };
                self.report_builder.tell(|report| report.audit = found);
                let host = self.split.peer.name.clone();
                Err(MigrationError::Audit { host, pages, first })
            }
        }
    }

    /// Passes on what the destination's QEMU answers, at once and as it is.
    fn back(&mut self, bytes: &[u8]) -> Result<(), MigrationError> {
        if bytes.is_empty() {
            return if self.is_loaded() {
                Ok(())
            } else {
                let reason =
                    "its QEMU closed its connection before it had loaded the VM".to_owned();
                let host = self.split.peer.name.clone();
                Err(MigrationError::DestinationFailed { host, reason })
            };
        }
        let written = (&self.main).write_all(bytes);
        written.map_err(|error| {
            MigrationError::Qemu(format!("it does not take its destination's answer: {error}"))
        })?;
        let was_loaded = self.is_loaded();
        self.answers.push(bytes);
        if self.is_loaded() && !was_loaded {
            self.report_builder.enter(Phase::Loaded);
            if let Some(stopped) = self.stopped {
                let took = stopped.elapsed().as_secs_f64() * 1e3;
                self.report_builder.note(format!(
                    "from the last page that QEMU handed over until its destination had loaded \
                     the VM it took {took:.0} ms"
                ));
            }
        }
        Ok(())
    }

    fn is_loaded(&self) -> bool {
        self.answers.shut() == Some(0)
    }

    /// QEMU has closed, or its stream makes no sense.
    fn ended(&self, ended: Result<tap::Summary, MigrationError>) -> Result<(), MigrationError> {
        if self.is_loaded() {
            return Ok(());
        }
        ended?;
        Err(MigrationError::Qemu(
            "it ended its migration before the destination had loaded the VM: it was cancelled, or \
             has failed"
                .to_owned(),
        ))
    }

    fn wait_closed(&self) -> Result<(), MigrationError> {
        for notice in &self.notices.1 {
            if let Notice::Ended(_) = notice {
                break;
            }
        }
        Ok(())
    }

    /// The operator has changed what it may use: that holds at both ends.
    fn rebind(&self) -> Result<(), MigrationError> {
        let bounds = self.report_builder.watch().bounds();
        self.report_builder.rebound(&bounds);
        let params = sched_params(&bounds, self.stopped.is_some());
        self.threads.set(&params);
        self.pacing.set(pace_bounds(&bounds));
        if self.is_loaded() { Ok(()) } else { self.split.say(&ToDestination::Terms(params)) }
    }

    /// Closes everything of the migration at once, and accounts for it.
    fn close(self) {
        let Self { split, report_builder, state, lanes, tail, tap, pools, pacing, .. } = self;
        // Nobody writes to the destination any more, so nobody waits for it.
        let control_bytes = split.link.wire_bytes();
        lanes.shut();
        split.link.close();
        tail.end();
        tap.hang_up(CLOSING_MAX);
        drop(pacing);
        let cpu = lanes.stop() + tap.cpu();
        let (body_bytes, fill_bytes) = state.taken();
        let report_of_lanes = lanes.meters().map(|(endpoint, meter)| LaneReport {
            name: endpoint.to_string(),
            wire_bytes: meter.wire_bytes.load(Relaxed),
            batches: meter.batches.load(Relaxed),
            deaths: meter.deaths.load(Relaxed),
        });
        report_builder.tell(|report| {
            report.ram_bytes = state.ram_bytes();
            (report.body_bytes, report.fill_bytes) = (body_bytes, fill_bytes);
            report.residue_bytes = state.residue_bytes.load(Relaxed);
            report.wire_bytes = lanes.wire_bytes() + control_bytes;
            report.cpu_source_s = cpu.as_secs_f64();
            report.pool_high_water_bytes[0] = pools.high_water_bytes();
            report.lanes = report_of_lanes.collect();
        });
    }
}
