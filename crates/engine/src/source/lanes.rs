//! The lanes' threads, which send batches or pass them to deduplication.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use api::{LaneReport, Limit, Report};
use dedup::source::{Errand, Stage};
use transport::{Endpoint, LaneMeter, Sender, Sent, Work, run_plain};
use wire::ToDestination;

use crate::link::Link;
use crate::resources::Pools;

/// Lanes that can also carry the deduplication stage's loads.
pub(crate) type Lanes = transport::Lanes<Errand>;

/// Reports what a migration has cost at this end: its bytes, by lanes and the control connection,
/// buffers, and CPU time.
pub(crate) fn account(
    lanes: &Lanes,
    pools: &Pools,
    control_bytes: u64,
    cpu: Duration,
    report: &mut Report,
) {
    report.wire_bytes = lanes.wire_bytes() + control_bytes;
    report.cpu_source_s = cpu.as_secs_f64();
    report.pool_high_water_bytes[0] = pools.high_water_bytes();
    let of_lane = |(endpoint, meter): (Endpoint, &LaneMeter)| LaneReport {
        name: endpoint.to_string(),
        wire_bytes: meter.wire_bytes.load(Relaxed),
        batches: meter.batches.load(Relaxed),
        deaths: meter.deaths.load(Relaxed),
    };
    report.lanes = lanes.meters().map(of_lane).collect();
}

/// Decides whether lanes note the content of all pages, so that pages sent again can go
/// as deltas: not where that would slow the migration.
pub(crate) fn note_pages(lanes: &Lanes, limit: Limit) {
    if let Some(deltas) = lanes.deltas() {
        deltas.note_pages(!matches!(limit, Limit::Cpu | Limit::Qemu | Limit::Unknown));
    }
}

/// Starts the lanes' threads.
pub(crate) fn start(
    lanes: &Lanes,
    stage: Option<&Arc<Stage>>,
    link: &Arc<Link<ToDestination>>,
) -> io::Result<()> {
    let Some(stage) = stage else { return lanes.start_with(run_plain) };
    let (stage, link) = (Arc::clone(stage), Arc::clone(link));
    lanes.start_with(move |lane| {
        lane.run(|sender| send(&stage, sender, &link), |acks| stage.receive(acks));
    })
}

fn send(
    stage: &Stage,
    sender: &mut Sender<'_, Errand>,
    link: &Link<ToDestination>,
) -> io::Result<Sent> {
    let mut at_lane = stage.at_lane();
    loop {
        if let Some(pages) = stage.spare() {
            // The leading thread notices a lost connection.
            let _ = link.send(&ToDestination::Spare { pages });
        }
        match sender.take() {
            Work::Send(load) => at_lane.send(sender, load)?,
            Work::Settled => {}
            Work::Over(sent) => return Ok(sent),
        }
    }
}
