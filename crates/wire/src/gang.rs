//! What a coordinator orders an agent, and its answers. A newer agent may know
//! more of them: what isn't understood is answered so.

use api::{Figures, MigrateRequest, Phase, Progress, VmStatus};
use serde::{Deserialize, Serialize};

/// From the agent that coordinates.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "order")]
pub enum Order {
    /// Say which VMs there are, and what memory.
    Census,
    /// Say which of these VMs the host could have.
    Able {
        /// At most [`WANTS_MAX`].
        wants: Vec<Want>,
    },
    /// Say what a VM contains.
    Sample {
        /// Which.
        vm: String,
        /// One in so many contents.
        one_in: u32,
    },
    /// Begin to move a VM.
    Start {
        /// What its migration is called from now on: eight hex digits.
        migration: String,
        /// What is asked.
        request: Box<MigrateRequest>,
    },
    /// Say how a migration goes, at once if it is in another phase or has ended.
    Watch {
        /// Which.
        migration: String,
        /// The phase that is known.
        seen: Option<Phase>,
        /// How long to wait for another one.
        wait_ms: u64,
    },
    /// Have a migration end with its VM where it is.
    Cancel {
        /// Which.
        migration: String,
    },
    /// Of a newer version.
    #[serde(other)]
    Unknown,
}

/// Kinds of VMs that are asked about at a time.
pub const WANTS_MAX: usize = 64;

/// Contents of one VM that are said at most: half a MiB of text.
pub const HINTS_MAX: usize = 1 << 16;
/// What a VM takes of a host besides ordinary memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct Want {
    /// The program of its QEMU.
    pub program: String,
    /// As `accel=` takes it.
    pub accelerator: String,
    /// Its machine type.
    pub machine: String,
    /// Its CPU model, if its command line names one.
    pub cpu: Option<String>,
    /// Sizes of huge pages, and the bytes of each.
    pub huge_bytes: Vec<(u64, u64)>,
}

/// From the agent that is ordered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum Answer {
    /// To [`Order::Census`].
    Census(Census),
    /// To [`Order::Able`].
    Able {
        /// For each what speaks against it.
        unfit: Vec<Option<String>>,
    },
    /// To [`Order::Sample`].
    Sample(Sampled),
    /// To [`Order::Start`]: it goes on by itself.
    Started,
    /// To [`Order::Watch`].
    Progress {
        /// Where it is.
        progress: Box<Progress>,
        /// What it took, once it has ended.
        figures: Option<Figures>,
    },
    /// To [`Order::Cancel`]: it was told to end.
    Cancelling,
    /// There is no such migration.
    NoSuch,
    /// It won't do it.
    Refused {
        /// Why, for the operator.
        reason: String,
    },
    /// It was not understood.
    #[serde(other)]
    Unknown,
}

/// A host, as far as VMs can leave it or come to it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Census {
    /// What it can give to VMs that come; none if the kernel does not say.
    pub free_bytes: Option<u64>,
    /// Its VMs, those that are arriving among them.
    pub vms: Vec<Counted>,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Counted {
    /// Its name.
    pub name: String,
    /// What it is doing.
    pub status: VmStatus,
    /// The migration that moves it now.
    pub migration: Option<String>,
    /// Its RAM.
    pub ram_bytes: u64,
    /// Of it, what it has touched.
    pub used_bytes: u64,
    /// What it takes of ordinary memory.
    pub needed_bytes: u64,
    /// Its virtual CPUs.
    pub vcpus: u32,
    /// What it takes besides.
    pub want: Want,
    /// With which VMs it shares content.
    #[serde(default)]
    pub share_domain: String,
}

impl Counted {
    /// Whether it is this host's, and nothing happens to it.
    pub fn is_settled(&self) -> bool {
        matches!(self.status, VmStatus::Running | VmStatus::Paused) && self.migration.is_none()
    }
}

/// As it is said: the sample of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampled {
    /// How many times all of its memory was looked at.
    pub rounds: u64,
    /// How many pages have a name.
    pub pages: u64,
    /// One in so many contents is in it; perhaps more than it was asked for.
    pub one_in: u32,
    /// Eight hex digits for each.
    pub hints: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_is_answered_and_what_is_known_reads_as_it_is_written() {
        let order: Order = serde_json::from_str(r#"{"order":"dance","with":"host-b"}"#).unwrap();
        assert!(matches!(order, Order::Unknown));
        let watch = r#"{"order":"watch","migration":"0a0b0c0d","seen":"first-pass","wait_ms":500}"#;
        let order: Order = serde_json::from_str(watch).unwrap();
        assert_eq!(serde_json::to_string(&order).unwrap(), watch);
        let sample = r#"{"order":"sample","vm":"web1","one_in":4}"#;
        let order: Order = serde_json::from_str(sample).unwrap();
        assert_eq!(serde_json::to_string(&order).unwrap(), sample);
        let want = Want { huge_bytes: vec![(2 << 20, 4 << 20)], ..Want::default() };
        let json = serde_json::to_value(Order::Able { wants: vec![want.clone()] }).unwrap();
        let Ok(Order::Able { wants }) = serde_json::from_value(json) else { panic!() };
        assert_eq!(wants, [want]);
    }
}
