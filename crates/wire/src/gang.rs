//! Orders of a gang's coordinator to an agent, and the answers. A newer agent may know more of
//! them; an order that is not understood is answered with [`Answer::Unknown`].

use api::{BoundsChange, Figures, MigrateRequest, Phase, Progress, VmStatus};
use serde::{Deserialize, Serialize};

/// An order of the coordinating agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "order")]
pub enum Order {
    /// Report the host's VMs and its memory.
    Census,
    /// Report which of these VMs the host could run.
    Able {
        /// At most [`NEEDS_MAX`].
        #[serde(rename = "wants")]
        needs: Vec<VmNeeds>,
    },
    /// Sample a VM's content.
    Sample {
        /// The VM.
        vm: String,
        /// One in this many contents.
        one_in: u32,
    },
    /// Start to move a VM.
    Start {
        /// The migration's id from now on: eight hex digits.
        migration: String,
        /// The request.
        request: Box<MigrateRequest>,
    },
    /// Report a migration's progress, at once if it is in another phase or has ended.
    Watch {
        /// The migration.
        migration: String,
        /// The phase that the coordinator knows.
        seen: Option<Phase>,
        /// How long to wait for another phase.
        wait_ms: u64,
    },
    /// Change a migration's bounds. Agents of release 0.1.0 don't know this order.
    Set {
        /// The migration.
        migration: String,
        /// The change.
        change: BoundsChange,
    },
    /// End a migration with its VM where it is.
    Cancel {
        /// The migration.
        migration: String,
    },
    /// An order of a newer version.
    #[serde(other)]
    Unknown,
}

/// The most kinds of VMs in one order.
pub const NEEDS_MAX: usize = 64;

/// The most contents in a sample of one VM: half a MiB of text.
pub const HINTS_MAX: usize = 1 << 16;
/// What a VM needs of a host besides ordinary memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct VmNeeds {
    /// The program of its QEMU.
    pub program: String,
    /// Its accelerator, as in `accel=`.
    pub accelerator: String,
    /// Its machine type.
    pub machine: String,
    /// Its CPU model, if its command line names one.
    pub cpu: Option<String>,
    /// Sizes of huge pages, and the bytes of each.
    pub huge_bytes: Vec<(u64, u64)>,
}

/// The answer of the ordered agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum Answer {
    /// Answers [`Order::Census`].
    Census(Census),
    /// Answers [`Order::Able`].
    Able {
        /// For each VM, why the host can't run it.
        unfit: Vec<Option<String>>,
    },
    /// Answers [`Order::Sample`].
    Sample(Sampled),
    /// Answers [`Order::Start`]: the migration proceeds by itself.
    Started,
    /// Answers [`Order::Watch`].
    Progress {
        /// The migration's progress.
        progress: Box<Progress>,
        /// Its figures, once it has ended.
        figures: Option<Figures>,
    },
    /// Answers [`Order::Set`].
    Set,
    /// Answers [`Order::Cancel`]: the migration was ordered to end.
    Cancelling,
    /// There is no such migration.
    NoSuch,
    /// The agent refuses.
    Refused {
        /// Why, for the operator.
        reason: String,
        /// It is stopping, and may carry out the order once it runs again. Agents of release 0.1.0
        /// don't say so.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        is_stopping: bool,
    },
    /// The order was not understood.
    #[serde(other)]
    Unknown,
}

/// A host's VMs, and its room for arriving VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Census {
    /// Memory that it can give to arriving VMs; none if the kernel doesn't report it.
    pub free_bytes: Option<u64>,
    /// Its VMs, including those that are arriving.
    pub vms: Vec<Counted>,
    /// The hosts that gangs evacuate which its agent coordinates. Agents of release 0.1.0 say none.
    pub evacuating: Vec<String>,
    /// The migrations from it that have not ended. Agents of release 0.1.0 send none.
    pub moving: Vec<Progress>,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Counted {
    /// Its name.
    pub name: String,
    /// Its status.
    pub status: VmStatus,
    /// The migration that moves it now.
    pub migration: Option<String>,
    /// The host that sends it, if it arrives. Agents of release 0.1.0 send none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrives_from: Option<String>,
    /// Its RAM.
    pub ram_bytes: u64,
    /// The part of it that it has touched.
    pub used_bytes: u64,
    /// Ordinary memory that it needs.
    pub needed_bytes: u64,
    /// Its virtual CPUs.
    pub vcpus: u32,
    /// What else it needs.
    #[serde(rename = "want")]
    pub needs: VmNeeds,
    /// The domain of VMs with which it shares content.
    #[serde(default)]
    pub share_domain: String,
    /// Whether its QEMU loses what its guest writes while it moves.
    #[serde(default)]
    pub loses_writes: bool,
    /// Whether its QEMU's program was replaced on disk since it started, as far as that is known.
    #[serde(default)]
    pub program_replaced: bool,
}

impl Counted {
    /// Whether it is this host's, and no operation is in progress.
    pub fn is_settled(&self) -> bool {
        matches!(self.status, VmStatus::Running | VmStatus::Paused) && self.migration.is_none()
    }

    /// Whether it is not this host's yet. If its QEMU has ended, its status is that of a dead VM.
    pub fn is_arriving(&self) -> bool {
        self.status == VmStatus::Arriving || self.arrives_from.is_some()
    }
}

/// The sample of a VM, as sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampled {
    /// How many times all of its memory was scanned.
    pub rounds: u64,
    /// The number of pages with a name.
    pub pages: u64,
    /// One in this many contents is in it; perhaps a larger number than requested.
    pub one_in: u32,
    /// Eight hex digits for each content.
    pub hints: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_orders_are_recognized_and_known_ones_round_trip() {
        let order: Order = serde_json::from_str(r#"{"order":"dance","with":"host-b"}"#).unwrap();
        assert!(matches!(order, Order::Unknown));
        let watch = r#"{"order":"watch","migration":"0a0b0c0d","seen":"first-pass","wait_ms":500}"#;
        let order: Order = serde_json::from_str(watch).unwrap();
        assert_eq!(serde_json::to_string(&order).unwrap(), watch);
        let sample = r#"{"order":"sample","vm":"web1","one_in":4}"#;
        let order: Order = serde_json::from_str(sample).unwrap();
        assert_eq!(serde_json::to_string(&order).unwrap(), sample);
        let set = r#"{"order":"set","migration":"0a0b0c0d","change":{"limit_bits_per_s":1000}}"#;
        let order: Order = serde_json::from_str(set).unwrap();
        assert_eq!(serde_json::to_string(&order).unwrap(), set);
        let one = VmNeeds { huge_bytes: vec![(2 << 20, 4 << 20)], ..VmNeeds::default() };
        let json = serde_json::to_value(Order::Able { needs: vec![one.clone()] }).unwrap();
        let Ok(Order::Able { needs }) = serde_json::from_value(json) else { panic!() };
        assert_eq!(needs, [one]);
    }

    #[test]
    fn an_arriving_vm_of_the_first_release_has_no_sender() {
        let json = r#"{"name":"web1","status":"arriving","migration":"0a0b0c0d","ram_bytes":1,
            "used_bytes":1,"needed_bytes":1,"vcpus":1,"want":{}}"#;
        let mut vm: Counted = serde_json::from_str(json).unwrap();
        assert!(vm.arrives_from.is_none() && vm.is_arriving());
        assert!(!serde_json::to_string(&vm).unwrap().contains("arrives_from"));
        vm.status = VmStatus::Dead;
        assert!(!vm.is_arriving());
        vm.arrives_from = Some("host-a".to_owned());
        assert!(vm.is_arriving(), "its QEMU has ended, and it has not");
    }

    #[test]
    fn a_refusal_of_the_first_release_is_final() {
        for (says, stopping) in [("", false), (r#","is_stopping":true"#, true)] {
            let json = format!(r#"{{"answer":"refused","reason":"no"{says}}}"#);
            let answer: Answer = serde_json::from_str(&json).unwrap();
            assert_eq!(serde_json::to_string(&answer).unwrap(), json);
            let Answer::Refused { is_stopping, .. } = answer else { panic!("{answer:?}") };
            assert_eq!(is_stopping, stopping);
        }
    }
}
