//! The metrics of `/metrics`, in Prometheus' text format.
//!
//! Ended migrations are counted here, and the present state is read at each request.
//!
//! No label has short-lived values, except for VMs while they move.

mod now;

use api::{Audited, Outcome, Phase, Report};
use prometheus::core::Collector;
use prometheus::{
    Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry, TextEncoder,
};

pub(crate) use now::Now;

/// Mostly below the default goal of 300 ms, and past the default blackout bound of 3 s.
const DOWNTIME_S: [f64; 11] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 10.0];
/// From a nearly idle VM on a fast network to a VM of a terabyte.
const DURATION_S: [f64; 11] = [0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 7200.0];
/// The label of lanes whose NIC is chosen by routing.
const ROUTED: &str = "routed";
const PHASES: [Phase; 7] = [
    Phase::Prepare,
    Phase::FirstPass,
    Phase::LaterPass,
    Phase::Stopped,
    Phase::Loaded,
    Phase::Committed,
    Phase::Running,
];
const OUTCOMES: [&str; 3] = [DONE, FAILED, CANCELLED];
const DONE: &str = "done";
const FAILED: &str = "failed";
const CANCELLED: &str = "cancelled";
const AUDITS: [&str; 3] = [SAME, DIFFERENCES, NOT_MADE];
const SAME: &str = "same";
const DIFFERENCES: &str = "differences";
const NOT_MADE: &str = "not-made";

/// The sums over all migrations from this host since its agent started.
pub(crate) struct Metrics {
    registry: Registry,
    ended: IntCounterVec,
    audited: IntCounterVec,
    downtime: Histogram,
    duration: Histogram,
    guest_bytes: IntCounterVec,
    wire_bytes: IntCounterVec,
    storage_read_bytes: IntCounter,
    lane_deaths: IntCounterVec,
    slowed: IntCounter,
}

impl Default for Metrics {
    fn default() -> Self {
        let registry = Registry::new();
        let metrics = Self {
            ended: counters(
                &registry,
                "droveway_migrations_total",
                "Migrations from this host that ended, by outcome and by the phase they had come \
                 to",
                &["outcome", "phase"],
            ),
            audited: counters(
                &registry,
                "droveway_audits_total",
                "Audits of migrations: same, differences, or not made",
                &["result"],
            ),
            downtime: histogram(
                &registry,
                "droveway_migration_downtime_seconds",
                "From a VM's stop at the source to its start at the destination",
                &DOWNTIME_S,
            ),
            duration: histogram(
                &registry,
                "droveway_migration_duration_seconds",
                "From the command to the end of migrations that were done",
                &DURATION_S,
            ),
            guest_bytes: counters(
                &registry,
                "droveway_guest_bytes_total",
                "Guest memory that QEMU handed over: sent (sent as bytes), fill (of one byte's \
                 value), dropped (changed again before it was sent), named (the destination's \
                 host had it), peer (a host of its rack had it), stored (read from its disks)",
                &["kind"],
            ),
            wire_bytes: counters(
                &registry,
                "droveway_lane_bytes_total",
                "Bytes written to lanes, by the address of the NIC they leave by",
                &["nic"],
            ),
            storage_read_bytes: counter(
                &registry,
                "droveway_storage_read_bytes_total",
                "Bytes that destinations read from VMs' disks instead of having them sent",
            ),
            lane_deaths: counters(
                &registry,
                "droveway_lane_deaths_total",
                "Connections of lanes that were lost or could not be made, by NIC",
                &["nic"],
            ),
            slowed: counter(
                &registry,
                "droveway_migrations_slowed_total",
                "Migrations during which the VM was throttled",
            ),
            registry,
        };
        metrics.begin();
        metrics
    }
}

impl Metrics {
    /// Shows counters that alerts watch from the beginning: Prometheus doesn't take a series that
    /// appears with 1 for an increase, and would miss the first failure.
    fn begin(&self) {
        for outcome in OUTCOMES {
            for phase in PHASES {
                self.ended.with_label_values(&[outcome, &label(&phase)]).inc_by(0);
            }
        }
        for audit in AUDITS {
            self.audited.with_label_values(&[audit]).inc_by(0);
        }
    }

    /// Counts a migration that has ended.
    pub(crate) fn count(&self, report: &Report) {
        let phase = report.phases.last().map_or(Phase::Prepare, |started| started.phase);
        self.ended.with_label_values(&[outcome(&report.outcome), &label(&phase)]).inc();
        let audit = match report.audit {
            Audited::Same { .. } => SAME,
            Audited::Differences { .. } => DIFFERENCES,
            Audited::Nothing { .. } => NOT_MADE,
        };
        self.audited.with_label_values(&[audit]).inc();
        if report.outcome == Outcome::Done {
            self.duration.observe(report.total_s);
            if let Some(downtime_ms) = report.downtime_ms {
                self.downtime.observe(downtime_ms / 1000.0);
            }
        }
        // The destination reports these figures, so they are capped by what was named.
        let peer_bytes = report.peer_bytes.min(report.named_bytes);
        let stored_bytes = report.stored_bytes.min(report.named_bytes - peer_bytes);
        let unsent = report.dropped_bytes.saturating_add(report.named_bytes);
        for (kind, bytes) in [
            ("sent", report.body_bytes.saturating_sub(unsent)),
            ("fill", report.fill_bytes),
            ("dropped", report.dropped_bytes),
            ("named", report.named_bytes - peer_bytes - stored_bytes),
            ("peer", peer_bytes),
            ("stored", stored_bytes),
        ] {
            self.guest_bytes.with_label_values(&[kind]).inc_by(bytes);
        }
        self.storage_read_bytes.inc_by(report.storage_read_bytes);
        for lane in &report.lanes {
            let nic = [lane.name.split_once(" -> ").map_or(ROUTED, |(nic, _)| nic)];
            self.wire_bytes.with_label_values(&nic).inc_by(lane.wire_bytes);
            self.lane_deaths.with_label_values(&nic).inc_by(lane.deaths.into());
        }
        if report.slowed.is_some() {
            self.slowed.inc();
        }
    }

    /// All metrics, including those of the present state.
    pub(crate) fn text(&self, now: &Now) -> String {
        let mut families = self.registry.gather();
        families.extend(now.gather());
        let mut text = Vec::new();
        TextEncoder::new().encode(&families, &mut text).expect("a vector takes it");
        String::from_utf8(text).expect("names are texts")
    }
}

fn outcome(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Done => DONE,
        Outcome::Failed(_) => FAILED,
        Outcome::Cancelled => CANCELLED,
    }
}

/// The value as the API writes it.
fn label<T: serde::Serialize>(value: &T) -> String {
    let json = serde_json::to_value(value).unwrap_or_default();
    json.as_str().unwrap_or("unknown").to_owned()
}

const FIXED: &str = "the names are fixed, and used once";

fn added<C: Collector + Clone + 'static>(registry: &Registry, metric: C) -> C {
    registry.register(Box::new(metric.clone())).expect(FIXED);
    metric
}

fn counter(registry: &Registry, name: &str, help: &str) -> IntCounter {
    added(registry, IntCounter::new(name, help).expect(FIXED))
}

fn counters(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    added(registry, IntCounterVec::new(Opts::new(name, help), labels).expect(FIXED))
}

fn histogram(registry: &Registry, name: &str, help: &str, bounds: &[f64]) -> Histogram {
    let options = HistogramOpts::new(name, help).buckets(bounds.to_vec());
    added(registry, Histogram::with_opts(options).expect(FIXED))
}

#[cfg(test)]
mod tests;
