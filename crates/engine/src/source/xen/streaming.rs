//! What sends a domain: lanes, the tap, the audit. It ends before xl is answered.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use wire::carry::Carrying;
use xen::Configuration;

use super::leading::Leading;
use super::passes::XlPasses;
use super::sampling::ByXl;
use super::tap::{XlStopper, XlTap};
use crate::error::MigrationError;
use crate::resources::Pools;
use crate::source::audit::SourceAudit;
use crate::source::bounds::bounded_threads;
use crate::source::context::no_thread;
use crate::source::control::sampler::Sampler;
use crate::source::control::sampler::ticking::Ticking;
use crate::source::control::stream_state::{HIDDEN_LITTLE_BYTES, StreamState, Traits};
use crate::source::flow::{Flow, FlowPlan, Stopping};
use crate::source::notice::Notice;
use crate::source::phases::start::{lanes_plan, lanes_that_yield};
use crate::xen::XlPipes;

/// A destination that reads has accepted what is being written.
const SAID_MAX: Duration = Duration::from_millis(20);

/// A domain's stream on its way.
pub(super) struct Streaming {
    pub(super) flow: Flow<XlStopper>,
    pub(super) notices: Receiver<Notice>,
    pub(super) audit: SourceAudit,
    pub(super) passes: Arc<XlPasses>,
    /// When everything was sent; none before.
    pub(super) sent: Option<Instant>,
    sampler: Option<Ticking>,
    pools: Pools,
}

impl Streaming {
    /// Starts the lanes and the tap.
    pub(super) fn start(
        leading: &Leading<'_>,
        carrying: &Carrying,
        (pipes, header): (Arc<XlPipes>, &[u8]),
        configuration: &Configuration,
    ) -> Result<Self, MigrationError> {
        let Leading { local, peer, request, report_builder, link, .. } = leading;
        let pools = local.resources.leaving(false)?;
        let (notices, noticed) = unbounded();
        let threads = bounded_threads(report_builder, &notices);
        let audited = (request.audit, "it was turned off (--audit off)");
        let hash = carrying.hash.as_deref();
        let audit = SourceAudit::new(audited, hash, &peer.name, report_builder)?;
        // xl counts pages and not time: what is in flight when it suspends the domain is downtime.
        let traits = Traits { hidden_bytes: HIDDEN_LITTLE_BYTES, told_limit: false, held: false };
        let goal = Duration::from_millis(request.downtime_ms.max(1));
        let state = Arc::new(StreamState::new(&pools, goal, traits));
        let bounds = report_builder.watch().bounds();
        let lanes = request.lanes.or_else(|| lanes_that_yield(local, peer, &bounds));
        let lanes = lanes_plan(local, peer, (lanes, request.compress), &carrying.token)?;
        let network = Arc::clone(&local.resources.network);
        let passes = Arc::<XlPasses>::default();
        let plan = FlowPlan {
            state,
            lanes,
            naming: leading.naming(carrying),
            handed_over: audit.handed_over(),
            link,
            network: &network,
            notices: &notices,
            threads: &threads,
            report_builder,
        };
        let (flow, _tap) = Flow::start(plan, |collector| {
            let about = (Arc::clone(&passes), peer.name.as_str());
            XlTap::start(pipes, header, configuration, collector, about)
        })?;
        let sampler = Sampler::new(&flow, request.compress);
        let sampler = ByXl { sampler, passes: Arc::clone(&passes) }.start();
        let mut streaming =
            Self { flow, notices: noticed, audit, passes, sent: None, sampler: None, pools };
        match sampler {
            Ok(sampler) => streaming.sampler = Some(sampler),
            Err(error) => {
                streaming.break_off(leading);
                return Err(no_thread(error));
            }
        }
        Ok(streaming)
    }

    /// Ends all that reads from xl or writes to the destination, so that nothing waits for either.
    pub(super) fn break_off(&mut self, leading: &Leading<'_>) {
        self.sampler = None;
        self.flow.lanes.shut();
        self.flow.tap.stop();
        leading.link.cut_if_stuck(SAID_MAX);
        self.flow.tap.cut();
    }

    /// Ends it, and reports its figures.
    pub(super) fn end(mut self, leading: &Leading<'_>, in_order: bool) {
        self.sampler = None;
        self.flow.pacing.stop();
        self.flow.stop(in_order);
        self.flow.account(&self.pools, leading.link.wire_bytes());
    }
}
