//! What a gang's moves came to.

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
    /// From the first VM's start to this one running at its destination.
    pub total_s: f64,
    /// From its stop to that.
    pub downtime_ms: f64,
    /// The longest that it was not heard of.
    pub guest_gap_ms: f64,
    /// QEMU's sweeps over its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passes: Option<u64>,
    /// Pages that it found as it wrote them, or not.
    pub pages: u64,
    /// Pages that are wrong.
    pub wrong: u64,
}

/// How a load on the core fared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadFigures {
    /// What it sent per second while VMs moved.
    pub sent_bytes_per_s: f64,
    /// The share of it that did not arrive.
    pub lost: f64,
    /// The same before.
    pub lost_before: f64,
}

/// How two VMs fared that ask and answer each other.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PairFigures {
    /// Answers per second before any VM moved.
    pub before_per_s: f64,
    /// While they moved.
    pub meanwhile_per_s: f64,
    /// Answers that are missing, as seconds of what there was before.
    pub lost_s: f64,
    /// Answers that were wrong, and connections that broke.
    pub wrong: u64,
}

/// What is counted where many VMs move.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GangFigures {
    /// Crossed the core, both ways, but for a load's bytes.
    pub core_bytes: u64,
    /// Of it, from the source racks to the target rack, or among them.
    pub core_from_sources_bytes: u64,
    /// Of it, sent by the target rack.
    pub core_from_target_bytes: u64,
    /// Crossed hosts' edges, both ways: what goes from host to host crosses two.
    pub edge_bytes: u64,
    /// Of it, sent by source hosts.
    pub source_edge_sent_bytes: u64,
    /// Of it, sent by target hosts.
    pub target_edge_sent_bytes: u64,
    /// Of it, delivered to target hosts.
    pub target_edge_bytes: u64,
    /// Content that was not sent, because a host had it, as the mover reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named_bytes: Option<u64>,
    /// Content that was sent though a host had it or got it from elsewhere, of all
    /// that QEMU handed over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again_share: Option<f64>,
    /// Each VM that moved.
    pub vms: Vec<VmFigures>,
    /// A load on the core, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<LoadFigures>,
    /// Two VMs that ask and answer each other, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pair: Option<PairFigures>,
}

impl GangFigures {
    /// From what the links counted.
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
    fn they_stand_among_the_other_figures_of_a_run() {
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
