//! The results of a benchmark, as in `target/bench/NAME.json`: all runs, medians, and ratios
//! between contenders.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::apps::AppFigures;
use super::cache::figures::CacheFigures;
use super::gang::figures::GangFigures;
use super::goal::Goal;
use super::paired::{self, Interval};
use super::served::Served;

/// One run of one contender.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Whether the VM runs at the destination.
    pub ok: bool,
    /// Whether the guest found all its memory as it wrote it.
    pub intact: bool,
    /// From the command until the VM runs at the destination, whose QEMU was started before.
    pub total_s: f64,
    /// Time to start the destination's QEMU, and for everything else that comes before.
    pub prepare_s: f64,
    /// From the VM's stop at the source to its start at the destination, by the host's clock.
    pub downtime_ms: f64,
    /// The longest gap between the guest's beats, minus their interval; where guests are throttled,
    /// at the switchover.
    pub guest_gap_ms: f64,
    /// Bytes on the interfaces, in both directions.
    pub wire_bytes: u64,
    /// CPU time spent on the migration on both hosts.
    pub cpu_s: f64,
    /// CPU time that the hypervisor took from this machine meanwhile.
    #[serde(default)]
    pub stolen_s: f64,
    /// Share of its full rate that the guest kept while it moved.
    pub guest_work: f64,
    /// The same for its writes to its disk, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_work: Option<f64>,
    /// Whether its disk is as it was written, both as the guest reads it and in the image at the
    /// destination. None if no disk moves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_intact: Option<bool>,
    /// Space that the image takes up at the destination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_allocated_bytes: Option<u64>,
    /// Peak memory of the source's agent and the destination's, where that is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agents_peak_bytes: Option<[u64; 2]>,
    /// Share of its throughput that a neighbour kept, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbour_kept: Option<f64>,
    /// Work that the neighbour lost, as seconds at its undisturbed rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbour_lost_s: Option<f64>,
    /// Share of the link's capacity next to the neighbour that the migration used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spare_used: Option<f64>,
    /// Where guests are throttled: the longest gap between beats before the switchover.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_ms: Option<f64>,
    /// Work that the guest lost, as seconds at its undisturbed rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_s: Option<f64>,
    /// Its undisturbed rate of writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undisturbed_bytes_per_s: Option<f64>,
    /// The lowest share of its CPUs that the guest had, if the contender reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_lowest: Option<f64>,
    /// How long the guest was throttled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowed_s: Option<f64>,
    /// Passes over its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passes: Option<u64>,
    /// Figures from the clients of a server in the guest, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served: Option<Served>,
    /// What a program in the guest did, if that is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app: Option<AppFigures>,
    /// Figures of a gang's move, if many VMs moved at once.
    #[serde(flatten)]
    pub gang: Option<GangFigures>,
    /// Figures of storage, if the disk is on a storage host.
    #[serde(flatten)]
    pub cache: Option<CacheFigures>,
    /// The timeout, if the contender did not finish within it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfinished_s: Option<f64>,
    /// Why the run failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A figure's name, and how to get it from a run, if the run has it.
pub type Figure = (&'static str, fn(&Run) -> Option<f64>);

/// The figures for which medians and ratios are computed.
pub const FIGURES: [Figure; 52] = [
    ("total_s", |run| Some(run.total_s)),
    ("prepare_s", |run| Some(run.prepare_s)),
    ("downtime_ms", |run| Some(run.downtime_ms)),
    ("guest_gap_ms", |run| Some(run.guest_gap_ms)),
    ("wire_bytes", |run| Some(run.wire_bytes as f64)),
    ("cpu_s", |run| Some(run.cpu_s)),
    ("stolen_s", |run| Some(run.stolen_s)),
    ("guest_work", |run| Some(run.guest_work)),
    ("disk_work", |run| run.disk_work),
    ("neighbour_kept", |run| run.neighbour_kept),
    ("neighbour_lost_s", |run| run.neighbour_lost_s),
    ("spare_used", |run| run.spare_used),
    ("stall_ms", |run| run.stall_ms),
    ("lost_s", |run| run.lost_s),
    ("undisturbed_bytes_per_s", |run| run.undisturbed_bytes_per_s),
    ("share_lowest", |run| run.share_lowest),
    ("slowed_s", |run| run.slowed_s),
    ("passes", |run| run.passes.map(|passes| passes as f64)),
    ("served_before_per_s", |run| Some(run.served.as_ref()?.before_per_s)),
    ("served_during_per_s", |run| Some(run.served.as_ref()?.during_per_s)),
    ("served_after_per_s", |run| Some(run.served.as_ref()?.after_per_s)),
    ("served_silence_before_ms", |run| Some(run.served.as_ref()?.silence_before_ms)),
    ("served_silence_ms", |run| Some(run.served.as_ref()?.silence_ms)),
    ("served_silence_after_ms", |run| Some(run.served.as_ref()?.silence_after_ms)),
    ("requests_s", |run| run.served.as_ref()?.requests_s),
    ("served_lost", |run| Some(run.served.as_ref()?.lost)),
    ("app_before_per_s", |run| Some(run.app?.before_per_s)),
    ("app_per_s", |run| Some(run.app?.meanwhile_per_s)),
    ("app_lost_s", |run| Some(run.app?.lost_s)),
    ("core_bytes", |run| Some(run.gang.as_ref()?.core_bytes as f64)),
    ("core_from_target_bytes", |run| Some(run.gang.as_ref()?.core_from_target_bytes as f64)),
    ("edge_bytes", |run| Some(run.gang.as_ref()?.edge_bytes as f64)),
    ("target_edge_bytes", |run| Some(run.gang.as_ref()?.target_edge_bytes as f64)),
    ("named_bytes", |run| Some(run.gang.as_ref()?.named_bytes? as f64)),
    ("again_share", |run| run.gang.as_ref()?.again_share),
    ("load_lost_before", |run| Some(run.gang.as_ref()?.load.as_ref()?.lost_before)),
    ("load_lost", |run| Some(run.gang.as_ref()?.load.as_ref()?.lost)),
    ("answers_before_per_s", |run| Some(run.gang.as_ref()?.pair.as_ref()?.before_per_s)),
    ("answers_per_s", |run| Some(run.gang.as_ref()?.pair.as_ref()?.meanwhile_per_s)),
    ("answers_lost_s", |run| Some(run.gang.as_ref()?.pair.as_ref()?.lost_s)),
    ("san_bytes", |run| Some(run.cache.as_ref()?.san_bytes as f64)),
    ("restorable_bytes", |run| Some(run.cache.as_ref()?.restorable_bytes as f64)),
    ("restored_bytes", |run| Some(run.cache.as_ref()?.restored_bytes? as f64)),
    ("storage_read_bytes", |run| Some(run.cache.as_ref()?.storage_read_bytes? as f64)),
    ("cores_busy", |run| Some(run.cache.as_ref()?.cores_busy)),
    ("touched_before_per_s", |run| Some(run.cache.as_ref()?.touched_before_per_s)),
    ("touched_per_s", |run| Some(run.cache.as_ref()?.touched_per_s)),
    ("pages_lost", |run| Some(run.cache.as_ref()?.pages_lost)),
    ("back_to_full_s", |run| run.cache.as_ref()?.back_to_full_s),
    ("source_agent_bytes", |run| Some(run.agents_peak_bytes?[0] as f64)),
    ("destination_agent_bytes", |run| Some(run.agents_peak_bytes?[1] as f64)),
    ("disk_allocated_bytes", |run| run.disk_allocated_bytes.map(|bytes| bytes as f64)),
];

/// A contender's runs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Contender {
    /// All of them, in order.
    pub runs: Vec<Run>,
    /// Medians of the good runs, by figure. Empty if there are none.
    pub median: BTreeMap<String, f64>,
}

/// A scenario's outcome.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Name of the scenario.
    pub scenario: String,
    /// The guest and what it does.
    pub guest: serde_json::Value,
    /// The links between the hosts.
    pub links: serde_json::Value,
    /// QEMU's version.
    pub qemu: String,
    /// `kvm` or `tcg`.
    pub accel: String,
    /// Contenders by name.
    pub contenders: BTreeMap<String, Contender>,
    /// `X/Y`: X's median over Y's, by figure.
    pub ratios: BTreeMap<String, BTreeMap<String, f64>>,
    /// The same from pairs of runs: the nth of X over the nth of Y.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub paired: BTreeMap<String, BTreeMap<String, Interval>>,
    /// Goals, and whether they were reached.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub goals: Vec<Goal>,
}

impl Outcome {
    /// Computes medians and ratios from the runs so far; `against` names the contenders that others
    /// are compared with.
    pub fn conclude(&mut self, against: &[&str]) {
        for contender in self.contenders.values_mut() {
            contender.median = medians(&contender.runs);
        }
        self.ratios.clear();
        self.paired.clear();
        for ours in against {
            let Some(our) = self.contenders.get(*ours) else { continue };
            for (name, theirs) in &self.contenders {
                if name != ours && !theirs.median.is_empty() && !our.median.is_empty() {
                    let ratios = ratios(&theirs.median, &our.median);
                    self.ratios.insert(format!("{name}/{ours}"), ratios);
                    let paired = paired::all(&theirs.runs, &our.runs);
                    self.paired.insert(format!("{name}/{ours}"), paired);
                }
            }
        }
    }
}

fn medians(runs: &[Run]) -> BTreeMap<String, f64> {
    let ok: Vec<_> = runs.iter().filter(|run| run.ok).collect();
    let median_of = |(name, figure): &Figure| {
        let values: Vec<f64> = ok.iter().filter_map(|run| figure(run)).collect();
        (!values.is_empty()).then(|| ((*name).to_owned(), median(values)))
    };
    FIGURES.iter().filter_map(median_of).collect()
}

/// The middle value, or the mean of the two in the middle; 0 if there are none.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.len() % 2, values.get(middle)) {
        (_, None) => 0.0,
        (1, Some(value)) => *value,
        (_, Some(value)) => f64::midpoint(values[middle - 1], *value),
    }
}

fn ratios(over: &BTreeMap<String, f64>, under: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let ratio = |(name, value): (&String, &f64)| {
        let under = under.get(name).copied().filter(|under| *under > 0.0)?;
        Some((name.clone(), value / under))
    };
    over.iter().filter_map(ratio).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(ok: bool, total_s: f64) -> Run {
        Run { ok, intact: ok, total_s, ..Run::default() }
    }

    #[test]
    fn medians_are_of_good_runs_only_and_ratios_of_medians() {
        let contender = |totals: &[(bool, f64)]| Contender {
            runs: totals.iter().map(|(ok, total)| run(*ok, *total)).collect(),
            median: BTreeMap::new(),
        };
        let mut outcome = Outcome {
            scenario: "idle".to_owned(),
            guest: serde_json::Value::Null,
            links: serde_json::Value::Null,
            qemu: "10.0.2".to_owned(),
            accel: "tcg".to_owned(),
            contenders: BTreeMap::from([
                ("droveway".to_owned(), contender(&[(true, 1.0), (true, 3.0), (true, 2.0)])),
                ("qemu-precopy".to_owned(), contender(&[(true, 6.0), (false, 0.1), (true, 4.0)])),
                ("qemu-zstd".to_owned(), contender(&[(false, 1.0)])),
            ]),
            ..Outcome::default()
        };
        outcome.conclude(&["droveway"]);
        assert_eq!(outcome.contenders["droveway"].median["total_s"], 2.0);
        assert_eq!(outcome.contenders["qemu-precopy"].median["total_s"], 5.0);
        assert!(outcome.contenders["qemu-zstd"].median.is_empty());
        assert_eq!(outcome.ratios["qemu-precopy/droveway"]["total_s"], 2.5);
        assert!(!outcome.ratios.contains_key("qemu-zstd/droveway"));
        // The second pair has a failed run.
        let paired = &outcome.paired["qemu-precopy/droveway"]["total_s"];
        assert_eq!(paired.pairs, 2);
        assert!((paired.ratio - 12_f64.sqrt()).abs() < 1e-9, "6 and 2, {paired:?}");
    }
}
