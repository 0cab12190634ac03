//! How VMs of a gang are moved: as it is typed.

use api::{BitRate, Cpus, HelperBudget, Throttle};
use clap::Args as ClapArgs;

use crate::options::{
    AuditArg, CompressArg, OnStallArg, PriorityArg, ShareArg, StorageArg, TapArg,
};

/// How each VM is moved.
#[derive(Debug, Default, ClapArgs)]
pub(crate) struct HowArgs {
    /// Connections to carry each VM [default: one per core up to 8, at least one
    /// per network card]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) lanes: Option<u16>,
    /// How long each VM may be gone, in milliseconds [default: 300]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub(crate) downtime_ms: Option<u64>,
    /// How long each VM may stand still before its move is taken back, in seconds
    /// [default: ten times --downtime-ms, and 3 at least]
    #[arg(long, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) blackout_max: Option<u64>,
    /// Whether VMs that write too fast to be followed are slowed: auto, off, or
    /// so that they dirty this share of what can be delivered [default: auto]
    #[arg(long, value_name = "auto|off|C")]
    pub(crate) throttle: Option<Throttle>,
    /// The percentage of its CPU time that a slowed VM keeps in any case
    /// [default: 20]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub(crate) throttle_floor: Option<u8>,
    /// When each VM shall be there, in seconds from its own begin
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) deadline: Option<u64>,
    /// What to do with a VM that can't be followed even at its floor
    #[arg(long, value_enum)]
    pub(crate) on_stall: Option<OnStallArg>,
    /// How memory is compressed [default: auto]
    #[arg(long, value_enum)]
    pub(crate) compress: Option<CompressArg>,
    /// Which of QEMU's streams is read [default: auto]
    #[arg(long, value_enum)]
    pub(crate) tap: Option<TapArg>,
    /// All hosts see the same storage: don't check
    #[arg(long)]
    pub(crate) shared_disks: bool,
    /// Disks to move with each VM: all of its host's, or some by name
    #[arg(long, value_name = "all|NAME,...")]
    pub(crate) disks: Option<String>,
    /// Make the images of disks that move at the destinations, where there are
    /// none
    #[arg(long)]
    pub(crate) create_disks: bool,
    /// How long each VM may take, in seconds [default: as long as it takes]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: Option<u64>,
    /// The most that each migration ever sends: bits per second, such as 200M
    #[arg(long, value_name = "RATE")]
    pub(crate) limit: Option<BitRate>,
    /// What each migration gets even if others want everything: bits per second
    #[arg(long, value_name = "RATE")]
    pub(crate) reserve: Option<BitRate>,
    /// Whether data threads go before others that want the same CPUs [default:
    /// low]
    #[arg(long, value_enum)]
    pub(crate) priority: Option<PriorityArg>,
    /// The CPUs that data threads run on, at all hosts: such as 0-3,8
    #[arg(long, value_name = "LIST")]
    pub(crate) cpus: Option<Cpus>,
    /// Where pages may come from that need not be sent, because a VM of the same
    /// sharing domain has the same content [default: auto]
    #[arg(long, value_enum)]
    pub(crate) share: Option<ShareArg>,
    /// The VMs' sharing domain from now on: only VMs of the same one have content in
    /// common [default: each VM's own]
    #[arg(long, value_name = "LABEL")]
    pub(crate) share_domain: Option<String>,
    /// Whether the destinations read pages from the VMs' disks that have the same
    /// content, by what helpers in the guests say [default: auto]
    #[arg(long, value_enum)]
    pub(crate) storage: Option<StorageArg>,
    /// The most that is read from storage for each VM, in bits per second
    #[arg(long, value_name = "RATE")]
    pub(crate) storage_limit: Option<BitRate>,
    /// What the helper may use up in each guest: a share of one CPU, time, memory
    /// [default: cpu=50%,time=10s,memory=32M]
    #[arg(long, value_name = "cpu=N%,time=Ns,memory=NM")]
    pub(crate) helper_budget: Option<HelperBudget>,
    /// Move VMs to hosts that have less memory free than their RAM
    #[arg(long)]
    pub(crate) overcommit_memory: bool,
    /// What is compared before each VM is given up [default: on]
    #[arg(long, value_enum)]
    pub(crate) audit: Option<AuditArg>,
}
