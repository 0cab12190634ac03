//! From the command to a flowing stream: connect, prepare, tap.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use api::{Compress, TapChoice};
use dedup::source::Stage;
use page::Encoding;
use qemu::disks::Allowed;
use qemu::outgoing::{self, Hold, Outgoing, StreamKind};
use qemu::ram_blocks::RamBlocks;
use qemu::rendezvous::Rendezvous;
use qemu::shape;
use ram::Numbered;
use switchover::Reason;
use tap::{Channels, Tap};
use transport::{Endpoint, LanesPlan, StaleFilter, connect};
use wire::{Kind, Prepare, ToDestination, ToSource, Token};

use super::audit;
use crate::error::MigrationError;
use crate::host::lane_endpoint;
use crate::link::Link;
use crate::source::collector::Collector;
use crate::source::control::pacing::{Pacing, pace_bounds};
use crate::source::control::sampler::{Sampler, Watched};
use crate::source::control::stream_state::{StreamState, Traits};
use crate::source::control::throttle::{self, Throttling};
use crate::source::disks::{self, Around, Chosen, Disks};
use crate::source::lanes::{self, Lanes};
use crate::source::saying::Saying;
use crate::source::{Control, Happening, Notice, Source, Stream, sched_params};

/// QEMU's multifd channels: its threads copy pages into our socket, and more
/// than four only compete with the tap's for cores.
const CHANNELS: u8 = 4;
/// Most lanes by default; more than one per core only adds switches.
const LANES_DEFAULT_MAX: usize = 8;
/// Most lanes at all.
const LANES_MAX: u16 = 64;

impl Source<'_> {
    pub(crate) fn connect(&mut self) -> Result<(), MigrationError> {
        self.pools = Some(self.local.resources.leaving(self.request.disks.is_some())?);
        let lost = |why: String| MigrationError::PeerLost { host: self.peer.name.clone(), why };
        let endpoint = Endpoint { local: None, remote: self.peer.address };
        let connection = connect(endpoint, &self.peer.name, &self.local.security, Kind::Control)
            .map_err(|e| lost(e.to_string()))?;
        let room = Arc::clone(&self.disk_room);
        let (link, hear) =
            Link::start_with(connection, &self.peer.name, move |message| room.hear(message))
                .map_err(|e| lost(e.to_string()))?;
        let link = Arc::new(link);
        let saying = Saying::start(Arc::clone(&link), &self.peer.name)
            .map_err(|error| local("starting a thread", error))?;
        self.control = Some(Control { link, saying, hear, prepared: None });
        Ok(())
    }

    /// Has the destination check, and start a QEMU that waits.
    pub(crate) fn prepare(&mut self) -> Result<(), MigrationError> {
        let qmp = &self.vm.machine.qmp;
        self.was_running = outgoing::runs(qmp)?;
        let shape = shape::of(qmp)?;
        let id = self.report_builder.watch().progress().1.id;
        let (chosen, shape) =
            disks::choose(&self.vm.machine, shape, self.request, &id, &self.report_builder)?;
        // The challenges' files beside the images go when this is dropped.
        let (challenges, _cleanup) = if self.request.shared_disks {
            Default::default()
        } else {
            qemu::disks::challenges(&shape, &id)
        };
        let switchover = self.switchover_id()?;
        let order = Prepare {
            migration: id,
            switchover,
            agent_port: self.local.agent_port,
            from: self.local.agent.clone(),
            vm: self.vm.name.clone(),
            argv: self.vm.machine.argv.clone(),
            cwd: self.vm.cwd.clone(),
            overrides: overrides(&self.request.set)?,
            qemu: self.vm.machine.version.clone(),
            shape: shape.into(),
            disks: challenges.into(),
            shared_disks: self.request.shared_disks,
            moving: chosen.as_ref().map_or_else(Vec::new, |chosen| chosen.moving.clone()).into(),
            allowed: Allowed {
                create: self.request.create_disks,
                overwrite: self.request.overwrite_disks,
            }
            .into(),
            incoming_qmp: self.request.incoming_qmp.clone(),
            overcommit: self.request.overcommit_memory,
            terms: sched_params(&self.report_builder.watch().bounds(), false),
            sharing: self.sharing(),
            storage: None,
            share_domain: self.domain(),
            guest_port: self.vm.machine.guest_port,
            audit: audit::ordered(self.request.audit),
        };
        let ram = RamBlocks::of(&self.vm.machine);
        let moving = chosen.as_ref().map_or(&[][..], |chosen| &chosen.disks);
        self.storage = self.ask_guest(&ram, moving);
        let storage = self.storage.as_ref().map(|storage| storage.order.clone());
        self.send(&ToDestination::Prepare(Box::new(Prepare { storage, ..order })))?;
        // While the destination makes its QEMU.
        self.ram = ram;
        let prepared = self.wait_prepared()?;
        self.chosen = chosen.filter(|chosen| !chosen.disks.is_empty()).map(Chosen::answered);
        for note in self.vm.machine.notes.iter().chain(&prepared.notes) {
            self.report_builder.note(note);
        }
        if let Some(storage) = &self.storage {
            prepared.storage_notes.iter().for_each(|note| storage.notes.note(note));
        }
        let theirs = Reason::new(prepared.qemu.as_str()).into();
        let qemu = [self.vm.machine.version.clone(), theirs];
        let prepare_s = self.report_builder.elapsed_s();
        self.report_builder.tell(|report| {
            report.qemu = qemu;
            report.prepare_s = prepare_s;
        });
        self.control.as_mut().expect("connected").prepared = Some(prepared);
        Ok(())
    }

    fn wait_prepared(&mut self) -> Result<wire::Prepared, MigrationError> {
        let until = Instant::now() + self.local.waits.prepare;
        loop {
            match self.next(until)? {
                Happening::Peer(ToSource::Prepared(prepared)) => return Ok(prepared),
                Happening::Peer(other) => return Err(self.unexpected(&other)),
                Happening::Said(said) => return Err(self.said_early(&said)),
                Happening::Qemu(event) => self.follow(&event)?,
                Happening::Notice(_) | Happening::Late => {}
            }
        }
    }

    /// Starts lanes, tap and QEMU's migration into it.
    pub(crate) fn stream(&mut self) -> Result<(), MigrationError> {
        let kind = self.choose_stream()?;
        let channels = match kind {
            StreamKind::Classic => 0,
            StreamKind::Multifd(count) => count,
        };
        self.report_builder.tell(|report| {
            report.tap = if channels == 0 { "classic" } else { "multifd" }.to_owned();
        });
        let goal = std::time::Duration::from_millis(self.request.downtime_ms.max(1));
        let (listener, socket) = Rendezvous::open(&self.vm.machine, &self.local.scratch)
            .map_err(|error| MigrationError::Qemu(error.to_string()))?;
        let outgoing = Arc::new(self.outgoing(kind, socket.path())?);
        if outgoing.hold() == Hold::DevicesOnly {
            self.report_builder.note(
                "this QEMU stops the VM by itself: only small buffers keep it from doing so too \
                 early. Started by `droveway run`, or with -global \
                 migration.switchover-ack-legacy=on, it waits until it may",
            );
        }
        let traits = Traits {
            told_bandwidth: outgoing.takes_bandwidth(),
            held: outgoing.is_held(),
            sectioned: kind == StreamKind::Classic,
        };
        let pools = self.pools.as_ref().expect("had before anything else");
        let state = Arc::new(StreamState::new(pools, goal, traits));
        let numbered = Arc::<Numbered>::default();
        let naming = self.naming(&numbered, traits.held).map(Arc::new);
        let plan = self.lanes_plan(&numbered)?;
        let lanes = Arc::new(Lanes::new(plan, Some(Arc::clone(&self.threads))));
        let stage = |naming| Arc::new(Stage::new(Arc::clone(naming), Arc::clone(lanes.queue())));
        let stage = naming.as_ref().map(stage);
        let link = &self.control.as_ref().expect("connected").link;
        lanes::start(&lanes, stage.as_ref(), link)
            .map_err(|error| local("starting the lanes' threads", error))?;
        self.disk_room.is_for(&lanes);
        let control = self.control.as_ref().expect("connected");
        let collector = Arc::new(Collector {
            state: Arc::clone(&state),
            ram: self.ram.clone(),
            numbered,
            handed_over: Arc::clone(&self.handed_over),
            naming: naming.clone(),
            lanes: Arc::clone(&lanes),
            link: Arc::clone(&control.link),
            notices: self.notices.0.clone(),
            stops: Arc::clone(&self.stops),
            threads: Arc::clone(&self.threads),
        });
        let channels = if channels == 0 { Channels::Classic } else { Channels::Multifd(channels) };
        let tap = Tap::start(listener, channels, traits.held, Arc::clone(&state.pool), collector)
            .map_err(|error| MigrationError::Tap(error.to_string()))?;
        let announcer = self.tell_ahead(stage.as_ref())?;
        let stopper = tap.stopper();
        let fixed = self.local.fixed_cost.expected();
        let around = throttle::Around {
            machine: Arc::clone(&self.vm.machine),
            notes: self.local.slowed.clone(),
            stops: Arc::clone(&self.stops),
            tap: stopper.clone(),
            report_builder: Arc::clone(&self.report_builder),
            held: traits.held,
        };
        let sampler = Sampler::start(Watched {
            state: Arc::clone(&state),
            naming,
            lanes: Arc::clone(&lanes),
            report_builder: Arc::clone(&self.report_builder),
            outgoing: Arc::clone(&outgoing),
            tap: stopper.clone(),
            compress: self.request.compress,
            fixed,
            blackout_max: self.request.blackout_max_s.map(std::time::Duration::from_secs),
            throttling: Throttling::new(around, self.request, fixed),
            notices: self.notices.0.clone(),
        });
        let sampler = Some(sampler.map_err(|e| local("starting a thread", e))?);
        let pacing = Some(self.pace(&lanes)?);
        self.stream = Some(Stream {
            outgoing: Arc::clone(&outgoing),
            state,
            lanes: Arc::clone(&lanes),
            stage,
            tap: stopper,
            sampler,
            pacing,
            announcer,
            _socket: socket,
        });
        self.wait_in_background(tap, Arc::clone(&lanes))?;
        self.start_disks(&lanes)?;
        // A QEMU that can't be held might stop the VM long before its disks
        // are there: its memory follows them.
        if self.disks.is_none() || outgoing.is_held() {
            outgoing.start()?;
        }
        Ok(())
    }

    fn pace(&self, lanes: &Arc<Lanes>) -> Result<Pacing, MigrationError> {
        let bounds = pace_bounds(&self.report_builder.watch().bounds());
        let network = &self.local.resources.network;
        let (lanes, threads) = (Arc::clone(lanes), Arc::clone(&self.threads));
        Pacing::start(lanes, network, bounds, threads, Arc::clone(&self.report_builder))
            .map_err(|error| local("starting a thread", error))
    }

    fn outgoing(&self, kind: StreamKind, socket: &Path) -> Result<Outgoing, MigrationError> {
        let machine = &self.vm.machine;
        Ok(match &self.chosen {
            Some(_) => Outgoing::pausing(machine, kind, socket)?,
            None => Outgoing::new(machine, kind, socket)?,
        })
    }

    fn start_disks(&mut self, lanes: &Arc<Lanes>) -> Result<(), MigrationError> {
        let (Some(chosen), Some(stream)) = (&self.chosen, &self.stream) else { return Ok(()) };
        let control = self.control.as_ref().expect("connected");
        let blocks = self.pools.as_ref().and_then(|pools| pools.blocks.as_ref());
        stream.state.disks_ready.store(false, Relaxed);
        let disks = Disks::start(
            chosen,
            &Around {
                machine: &self.vm.machine,
                local: self.local,
                pool: blocks.expect("had with the order to move disks"),
                lanes,
                link: &control.link,
                notices: &self.notices.0,
                threads: &self.threads,
                report_builder: &self.report_builder,
                ready: Arc::clone(&stream.state.disks_ready),
            },
        )?;
        self.disks = Some(disks);
        Ok(())
    }

    fn choose_stream(&self) -> Result<StreamKind, MigrationError> {
        if self.request.tap == TapChoice::Classic {
            return Ok(StreamKind::Classic);
        }
        let (kind, reason) = outgoing::choose_stream(&self.vm.machine.qmp, CHANNELS)?;
        if let Some(reason) = reason {
            if self.request.tap == TapChoice::Multifd {
                return Err(MigrationError::Qemu(format!("multifd cannot be used: {reason}")));
            }
            self.report_builder.note(format!("classic stream: {reason}"));
        }
        Ok(kind)
    }

    fn lanes_plan(&self, ram: &Arc<Numbered>) -> Result<LanesPlan, MigrationError> {
        let control = self.control.as_ref().expect("connected");
        let prepared = control.prepared.as_ref();
        let token = prepared.and_then(|prepared| token(&prepared.token)).ok_or_else(|| {
            MigrationError::PeerLost {
                host: self.peer.name.clone(),
                why: "it named the migration in a way that cannot be read".to_owned(),
            }
        })?;
        let encoding = match self.request.compress {
            Compress::Off => Encoding::Raw,
            Compress::Lz4 => Encoding::Lz4,
            // Where nothing is known yet, bytes saved at the start are worth
            // more than a tenth of a second of CPU.
            Compress::Auto | Compress::Zstd => Encoding::Zstd,
        };
        let handed_over = Arc::clone(&self.handed_over);
        let stale_filter = StaleFilter { ram: Arc::clone(ram), handed_over };
        Ok(LanesPlan {
            endpoints: self.endpoints(),
            peer: self.peer.name.clone(),
            security: self.local.security.clone(),
            token,
            encoding,
            stale_filter: Some(stale_filter),
        })
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let nics = self.local.nics.len().max(self.peer.nics.len());
        let by_default = cores.min(LANES_DEFAULT_MAX).max(nics);
        let count =
            self.request.lanes.map_or(by_default, |lanes| usize::from(lanes.clamp(1, LANES_MAX)));
        (0..count).map(|nth| lane_endpoint(self.local, self.peer, nth)).collect()
    }

    /// Tells the leading thread when the tap is through and all is placed.
    fn wait_in_background(&self, tap: Tap, lanes: Arc<Lanes>) -> Result<(), MigrationError> {
        let notices = self.notices.0.clone();
        let host = self.peer.name.clone();
        let wait = move || {
            let lanes_failed = |source| MigrationError::Lanes { host: host.clone(), source };
            let outcome = tap
                .join()
                // A tap that was refused a batch knows nothing of why.
                .map_err(|error| {
                    lanes
                        .failure()
                        .map_or_else(|| MigrationError::Tap(error.to_string()), lanes_failed)
                })
                .and_then(|summary| {
                    lanes.wait_drained().map_err(lanes_failed)?;
                    // The destination ends the lanes when it loads: that is no
                    // failure to mend.
                    lanes.close();
                    Ok(summary)
                });
            let _ = notices.send(Notice::Delivered(outcome));
        };
        std::thread::Builder::new()
            .name("barrier".to_owned())
            .spawn(wait)
            .map_err(|error| local("starting a thread", error))?;
        Ok(())
    }
}

pub(crate) fn local(what: &'static str, source: std::io::Error) -> MigrationError {
    MigrationError::Local { what, source }
}

fn token(hex: &str) -> Option<Token> {
    let number = u128::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 32)?;
    Some(Token(number.to_be_bytes()))
}

fn overrides(set: &[String]) -> Result<Vec<(String, String)>, MigrationError> {
    let parsed = set.iter().map(|one| qemu::command_line::parse_override(one));
    parsed.map(|one| one.map_err(|error| MigrationError::Qemu(error.to_string()))).collect()
}
