//! Figures of a gang's move.

use serde::{Deserialize, Serialize};

use lab::hosts::{Crossed, Edges};

/// One VM of a gang.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmFigures {
    /// Its name.
    pub name: String,
    /// The host that it left.
    pub from: String,
    /// The host that it went to.
    pub to: String,
    /// From the start of the first move until this VM ran at its destination.
    pub total_s: f64,
    /// From the VM's stop until then.
    pub downtime_ms: f64,
    /// The longest time without a beat of the guest.
    pub guest_gap_ms: f64,
    /// QEMU's passes over its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passes: Option<u64>,
    /// Pages that the guest checked.
    pub pages: u64,
    /// Those of them that were wrong.
    pub wrong: u64,
}

/// Figures of a load on the core.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadFigures {
    /// Bytes that it sent per second while VMs moved.
    pub sent_bytes_per_s: f64,
    /// The share of these that was lost.
    pub lost: f64,
    /// The share that was lost before.
    pub lost_before: f64,
}

/// Figures of a pair of VMs, of which one asks and the other answers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PairFigures {
    /// Answers per second before any VM moved.
    pub before_per_s: f64,
    /// Answers per second while they moved.
    pub meanwhile_per_s: f64,
    /// Missing answers, as seconds at the earlier rate.
    pub lost_s: f64,
    /// Wrong answers, and broken connections.
    pub wrong: u64,
}

/// Figures of the move of many VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GangFigures {
    /// Bytes on the core, in both directions, without a load's.
    pub core_bytes: u64,
    /// Of these, from the source racks to the target rack, or among the source racks.
    pub core_from_sources_bytes: u64,
    /// Of these, sent by the target rack.
    pub core_from_target_bytes: u64,
    /// Bytes on hosts' edges, in both directions: what goes from host to host crosses two.
    pub edge_bytes: u64,
    /// Of these, sent by source hosts.
    pub source_edge_sent_bytes: u64,
    /// Of these, sent by target hosts.
    pub target_edge_sent_bytes: u64,
    /// Of these, delivered to target hosts.
    pub target_edge_bytes: u64,
    /// Content that was not sent because a host had it, by the mover's report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named_bytes: Option<u64>,
    /// Of the content from QEMU, the share that was sent though a host had it or got it elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again_share: Option<f64>,
    /// The VMs that moved.
    pub vms: Vec<VmFigures>,
    /// Figures of a load on the core, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<LoadFigures>,
    /// Figures of a pair of VMs, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pair: Option<PairFigures>,
}

impl GangFigures {
    /// Figures from the links' counters.
    #[must_use]
    pub fn counted(core: Crossed, edges: Edges) -> Self {
        Self {
            core_bytes: core.bytes(),
            core_from_sources_bytes: core.from_sources,
            core_from_target_bytes: core.from_target,
            edge_bytes: edges.sent() + edges.to_sources + edges.to_target,
            source_edge_sent_bytes: edges.from_sources,
            target_edge_sent_bytes: edges.from_target,
            target_edge_bytes: edges.to_target,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::Run;

    #[test]
    fn figures_serialize_among_the_others_of_a_run() {
        let edges = Edges { from_sources: 8, to_sources: 1, from_target: 1, to_target: 8 };
        let core = Crossed { from_sources: 8, from_target: 1 };
        let gang = GangFigures::counted(core, edges);
        assert_eq!((gang.core_bytes, gang.edge_bytes), (9, 18));
        let run = Run { ok: true, gang: Some(gang), ..Run::default() };
        let json = serde_json::to_value(&run).unwrap();
        assert_eq!(json["core_bytes"], 9);
        assert_eq!(serde_json::from_value::<Run>(json).unwrap(), run);
        let without = serde_json::to_value(Run::default()).unwrap();
        assert_eq!(serde_json::from_value::<Run>(without).unwrap(), Run::default());
    }
}
