//! The activity between two samples.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use policy::effort;
use transport::{Delivered, LaneTimes};

use crate::source::lanes::Lanes;

/// Counters at one moment.
#[derive(Clone, Default)]
pub(crate) struct Counts {
    pub(crate) delivered: Delivered,
    pub(crate) times: LaneTimes,
    pub(crate) wire_bytes: u64,
    pub(crate) lanes_bytes: Vec<u64>,
}

impl Counts {
    pub(crate) fn of(lanes: &Lanes) -> Self {
        Self {
            delivered: lanes.delivered(),
            times: lanes.times(),
            wire_bytes: lanes.wire_bytes(),
            lanes_bytes: lanes.meters().map(|(_, meter)| meter.wire_bytes.load(Relaxed)).collect(),
        }
    }
}

/// The activity between two samples.
pub(crate) struct Window {
    pub(crate) elapsed: Duration,
    pub(crate) bodies: u64,
    /// Batches of pages.
    pub(crate) batches: u64,
    /// Pages without bodies: fills, and pages that the destination had or got elsewhere.
    pub(crate) bodiless: u64,
    /// Data of disks, or of relayed streams.
    pub(crate) blocks: u64,
    pub(crate) dropped: u64,
    pub(crate) busy: Duration,
    pub(crate) delivered_per_s: f64,
    pub(crate) wire_per_s: f64,
    pub(crate) lanes_per_s: Vec<f64>,
    pub(crate) effort: effort::Sample,
    /// The lanes' time in writes, and of that the time for which the destination took nothing.
    pub(crate) writing: Duration,
    pub(crate) for_peer: Duration,
}

impl Window {
    pub(crate) fn between(from: &Counts, to: &Counts, elapsed: Duration) -> Self {
        let seconds = elapsed.as_secs_f64();
        let bodies = to.delivered.body_bytes - from.delivered.body_bytes;
        let fills = to.delivered.fill_bytes - from.delivered.fill_bytes;
        let found = to.delivered.found_bytes - from.delivered.found_bytes;
        let blocks = to.delivered.block_bytes - from.delivered.block_bytes;
        let times = to.times - from.times;
        let all = (times.writing + times.encoding + times.waiting).as_secs_f64();
        let share = |time: Duration| if all > 0.0 { time.as_secs_f64() / all } else { 0.0 };
        Self {
            elapsed,
            bodies,
            batches: to.delivered.batches - from.delivered.batches,
            bodiless: fills + found,
            blocks,
            dropped: to.delivered.dropped_bytes - from.delivered.dropped_bytes,
            busy: to.delivered.busy.saturating_sub(from.delivered.busy),
            delivered_per_s: (bodies + fills) as f64 / seconds,
            wire_per_s: (to.wire_bytes - from.wire_bytes) as f64 / seconds,
            lanes_per_s: to
                .lanes_bytes
                .iter()
                .enumerate()
                .map(|(nth, bytes)| {
                    (bytes - from.lanes_bytes.get(nth).unwrap_or(&0)) as f64 / seconds
                })
                .collect(),
            effort: effort::Sample {
                writing: share(times.writing),
                encoding: share(times.encoding),
                waiting: share(times.waiting),
                for_cpu: share(times.for_cpu),
                running: share(times.running),
                delivered_bytes_per_s: (bodies + blocks) as f64 / seconds,
                wire_bytes_per_s: (to.wire_bytes - from.wire_bytes) as f64 / seconds,
            },
            writing: times.writing,
            for_peer: times.for_peer,
        }
    }
}
