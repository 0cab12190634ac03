//! Sets QEMU up for its migration into the tap, and starts the stream: the lanes, the tap,
//! and their control.

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use ::audit::HandedOver;
use api::{Bounds, Compress, TapChoice};
use dedup::source::Announcer;
use page::Encoding;
use parking_lot::Mutex;
use policy::switchover::is_missed;
use qemu::outgoing::{self, Hold, Outgoing, StreamKind};
use qemu::rendezvous::Rendezvous;
use qemu::shape::{self, Device};
use ram::Numbered;
use stream::GlobalState;
use tap::{Channels, Tap};
use transport::{Deltas, Endpoint, LanesPlan, StaleFilter};
use wire::Token;

use super::connect::Connected;
use super::prepare::Prepared;
use crate::error::MigrationError;
use crate::host::{Local, Peer, lane_endpoint};
use crate::predict;
use crate::resources::LANES_MAX;
use crate::source::audit::SourceAudit;
use crate::source::context::{Context, no_thread};
use crate::source::control::by_progress::{self, Watched};
use crate::source::control::sampler::Sampler;
use crate::source::control::sampler::ticking::Ticking;
use crate::source::control::stream_state::{
    HIDDEN_BYTES, HIDDEN_LITTLE_BYTES, StreamState, Traits,
};
use crate::source::control::throttle::{self, Brakes, Throttling, Vcpus};
use crate::source::flow::{Flow, FlowPlan};
use crate::source::own::Own;

/// Number of QEMU's multifd channels. QEMU's threads copy pages into the tap's socket, and
/// more than four only compete with the tap's threads for cores.
const CHANNELS: u8 = 4;
/// Most lanes by default: more than one per core only add context switches.
const LANES_DEFAULT_MAX: usize = 8;

/// QEMU is set up for its migration, and the tap's socket exists. Dropping this restores
/// QEMU's settings.
pub(crate) struct SetUp {
    outgoing: Arc<Outgoing>,
    kind: StreamKind,
    listener: UnixListener,
    socket: Rendezvous,
}

/// The parts that start with the stream.
pub(super) struct Started {
    pub(super) outgoing: Arc<Outgoing>,
    pub(super) flow: Flow,
    pub(super) announcer: Option<Announcer>,
    pub(super) global_state: Arc<Mutex<GlobalState>>,
    pub(super) tap: Tap,
    pub(super) sampler: Ticking,
    pub(super) socket: Rendezvous,
    pub(super) audit: SourceAudit,
    /// Whether the guest may report free pages.
    pub(super) hints: bool,
}

impl Connected<'_> {
    /// Sets QEMU up, without the destination. With `pausing`, for disks that move, QEMU
    /// waits before its switchover.
    pub(super) fn set_up(
        &self,
        devices: &[Device],
        pausing: bool,
    ) -> Result<SetUp, MigrationError> {
        let context = &self.context;
        let machine = &context.vm.machine;
        let hands_over = context.vm.hand_over.is_some();
        let kind = if hands_over { StreamKind::Whole } else { self.choose_kind(devices)? };
        let (listener, socket) = Rendezvous::open(machine, &context.local.scratch)?;
        let outgoing = if hands_over {
            Outgoing::handing_over(machine, socket.path())
        } else if pausing {
            Outgoing::pausing(machine, kind, socket.path())
        } else {
            Outgoing::new(machine, kind, socket.path())
        };
        let outgoing = Arc::new(outgoing?);
        if let StreamKind::Multifd(_) = kind {
            outgoing.keep_open(&listener)?;
        }
        if hands_over {
            context
                .report_builder
                .note("RAM was handed over: it stays where it is, and the next QEMU maps it");
        }
        if outgoing.hold() == Hold::DevicesOnly {
            context.report_builder.note(
                "this QEMU stops the VM by itself: only small buffers keep it from doing so too \
                 early. Started by `droveway run`, or with -global \
                 migration.switchover-ack-legacy=on, it waits for the agent",
            );
        }
        Ok(SetUp { outgoing, kind, listener, socket })
    }

    fn choose_kind(&self, devices: &[Device]) -> Result<StreamKind, MigrationError> {
        let context = &self.context;
        if context.request.tap == TapChoice::Classic {
            return Ok(StreamKind::classic(devices));
        }
        let (kind, reason) = outgoing::choose_stream(&context.vm.machine.qmp, devices, CHANNELS)?;
        if let Some(reason) = reason {
            if context.request.tap == TapChoice::Multifd {
                return Err(MigrationError::Qemu(format!("multifd cannot be used: {reason}")));
            }
            context.report_builder.note(format!("classic stream: {reason}"));
        }
        Ok(kind)
    }
}

impl Prepared<'_> {
    pub(super) fn start(&self, set_up: SetUp) -> Result<Started, MigrationError> {
        let SetUp { outgoing, kind, listener, socket } = set_up;
        let context = &self.connected.context;
        let request = context.request;
        let channels = self.channels(kind);
        let traits = Traits {
            hidden_bytes: if outgoing.takes_bandwidth() {
                HIDDEN_LITTLE_BYTES
            } else {
                HIDDEN_BYTES
            },
            told_limit: true,
            held: outgoing.is_held(),
        };
        let goal = Duration::from_millis(request.downtime_ms.max(1));
        let state = Arc::new(StreamState::new(&self.connected.pools, goal, traits));
        let numbered = Arc::<Numbered>::default();
        let audited = (request.audit, "it was turned off (--audit off)");
        let (hash, host) = (self.there.hash.as_deref(), &context.peer.name);
        let audit = SourceAudit::new(audited, hash, host, &context.report_builder)?;
        let handed_over = audit.handed_over();
        let naming = self.naming(&numbered, handed_over, traits.held).map(Arc::new);
        let hints = self.hints_free_pages();
        let global_state = Arc::<Mutex<GlobalState>>::default();
        let control = &self.connected.control;
        let plan = FlowPlan {
            state: Arc::clone(&state),
            lanes: self.lanes_plan(&numbered, handed_over, hints)?,
            naming,
            handed_over,
            link: &control.link,
            network: &context.local.resources.network,
            notices: &context.notices,
            threads: &context.threads,
            report_builder: &context.report_builder,
        };
        let (mut flow, tap) = Flow::start(plan, |collector| {
            control.disk_room.is_for(&collector.lanes);
            let output = Own {
                collector,
                ram: self.ram.clone(),
                numbered,
                global_state: Arc::clone(&global_state),
            };
            let (held, pool) = (traits.held, Arc::clone(&state.pool));
            let qmp = Arc::clone(&context.vm.machine.qmp);
            let until_set_up = move || outgoing::wait_set_up(&qmp);
            Tap::start(listener, channels, held, pool, Arc::new(output), until_set_up)
                .map_err(MigrationError::Tap)
        })?;
        let announcer = flow.stage.as_ref();
        let announcer = announcer.map(|stage| Announcer::start(stage, &context.threads));
        let announcer = announcer.transpose().map_err(no_thread)?.flatten();
        let fixed = self.fixed_cost(goal);
        let brakes = self.brakes();
        // Holes of RAM that stays where it is remain holes.
        if context.vm.hand_over.is_none() {
            flow.prefault(hints, &self.ram);
        }
        let throttling = throttle::settings(request.downtime_ms, &request.slowing, fixed);
        let sampler = by_progress::start(Watched {
            sampler: Sampler::new(&flow, request.compress),
            qemu: Arc::clone(&outgoing),
            tap: flow.tap.clone(),
            used_bytes: predict::used(context.vm.machine.process.pid()),
            fixed,
            blackout_max: request.blackout_max_s.map(Duration::from_secs),
            stands_still: context.blackout.flag(),
            throttling: Throttling::new(brakes, throttling),
            notices: context.notices.clone(),
        });
        let sampler = sampler.map_err(no_thread)?;
        Ok(Started { outgoing, flow, announcer, global_state, tap, sampler, socket, audit, hints })
    }

    /// Whether the guest may report free pages to QEMU. If QEMU doesn't answer, it may.
    fn hints_free_pages(&self) -> bool {
        let asked = shape::has_free_page_hint(&self.connected.context.vm.machine.qmp);
        asked.unwrap_or_else(|error| {
            tracing::warn!(%error, "whether the guest reports free pages isn't known");
            true
        })
    }

    /// The downtime without pages to plan with; notes one that leaves too little time for them.
    fn fixed_cost(&self, goal: Duration) -> Duration {
        let Context { local, peer, report_builder, .. } = &self.connected.context;
        let misses = |fixed: &Duration| is_missed(goal, *fixed);
        if let Some(learned) = local.fixed_cost.learned(&peer.name).filter(misses) {
            report_builder.expect_miss(format!(
                "downtime is likely to miss its goal of {} ms: the last moves to {} took {} ms \
                 apart from sending memory",
                goal.as_millis(),
                peer.name,
                learned.as_millis(),
            ));
        }
        local.fixed_cost.expected(&peer.name)
    }

    fn brakes(&self) -> Brakes {
        let context = &self.connected.context;
        Brakes {
            vcpus: Vcpus::of(&context.vm.machine).map_err(|error| {
                tracing::warn!(%error, "it has no visible vCPUs");
                "its vCPUs are not visible".to_owned()
            }),
            notes: context.local.quota_notes.clone(),
            report_builder: Arc::clone(&context.report_builder),
        }
    }

    fn channels(&self, kind: StreamKind) -> Channels {
        let (channels, tap) = match kind {
            StreamKind::Classic | StreamKind::Whole | StreamKind::Multifd(0) => {
                (Channels::Classic, "classic")
            }
            StreamKind::Multifd(count) => (Channels::Multifd(count), "multifd"),
        };
        self.connected.context.report_builder.update(|report| report.tap = tap.to_owned());
        channels
    }

    fn lanes_plan(
        &self,
        ram: &Arc<Numbered>,
        handed_over: &Arc<HandedOver>,
        hints: bool,
    ) -> Result<LanesPlan, MigrationError> {
        let Context { local, peer, request, report_builder, .. } = &self.connected.context;
        let bounds = report_builder.watch().bounds();
        let lanes = request.lanes.or_else(|| lanes_that_yield(local, peer, &bounds));
        let stale_filter =
            StaleFilter { ram: Arc::clone(ram), handed_over: Arc::clone(handed_over) };
        Ok(LanesPlan {
            // Free page hints clear dirty bits, so a dropped page would not be sent again.
            stale_filter: Some(stale_filter).filter(|_| !hints),
            deltas: self.there.deltas.then(|| Arc::new(Deltas::new(&local.resources.deltas))),
            ..lanes_plan(local, peer, (lanes, request.compress), &self.there.token)?
        })
    }
}

/// The plan for lanes, of which there are as many as requested.
pub(crate) fn lanes_plan(
    local: &Local,
    peer: &Peer,
    (lanes, compress): (Option<u16>, Compress),
    token: &str,
) -> Result<LanesPlan, MigrationError> {
    let why = "it sent a migration ID that cannot be read";
    let token = parse_token(token).ok_or_else(|| MigrationError::lost(&peer.name, why))?;
    Ok(LanesPlan {
        endpoints: lane_endpoints(local, peer, lanes),
        peer: peer.name.clone(),
        security: local.security.clone(),
        token,
        encoding: first_encoding(compress),
        stale_filter: None,
        deltas: None,
    })
}

/// The initial encoding of bodies, until the bottleneck is known.
fn first_encoding(compress: Compress) -> Encoding {
    match compress {
        Compress::Off => Encoding::Raw,
        Compress::Lz4 => Encoding::Lz4,
        // While nothing is known yet, bytes saved are worth more than a tenth of a second
        // of CPU.
        Compress::Auto | Compress::Zstd => Encoding::Zstd,
    }
}

/// The number of lanes whose threads have a CPU floor, where the limit decides it: each lane wakes
/// up two threads at each host, and so disturbs others.
pub(crate) fn lanes_that_yield(local: &Local, peer: &Peer, bounds: &Bounds) -> Option<u16> {
    bounds.cpu_floor?;
    let limit = bounds.limit_bits_per_s?.bits_per_s();
    let (nics, by_default) = lanes_by_default(local, peer);
    u16::try_from(policy::yielding::lanes(limit, nics, by_default)).ok()
}

/// The number of NICs, and that of lanes.
fn lanes_by_default(local: &Local, peer: &Peer) -> (usize, usize) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let nics = local.nics.len().max(peer.nics.len());
    (nics, cores.min(LANES_DEFAULT_MAX).max(nics))
}

/// The endpoints of `lanes` lanes, or of the default number.
fn lane_endpoints(local: &Local, peer: &Peer, lanes: Option<u16>) -> Vec<Endpoint> {
    let (_, by_default) = lanes_by_default(local, peer);
    let count = lanes.map_or(by_default, |lanes| usize::from(lanes).clamp(1, LANES_MAX));
    (0..count).map(|nth| lane_endpoint(local, peer, nth)).collect()
}

/// Parses a migration's token from the destination.
fn parse_token(hex: &str) -> Option<Token> {
    let number = u128::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 32)?;
    Some(Token(number.to_be_bytes()))
}
