//! What can be typed after `gang` and `evacuate`.

use std::path::PathBuf;

use api::{BitRate, Cpus, HelperBudget, Throttle, WantedMove};
use clap::{ArgGroup, Args as ClapArgs};

use crate::options::{
    AuditArg, CompressArg, OnStallArg, PriorityArg, ShareArg, StorageArg, TapArg,
};

/// The API's own.
pub(super) const PARALLEL_DEFAULT: u16 = 2;

#[derive(Debug, ClapArgs)]
#[command(group(ArgGroup::new("what").args(["moves", "file", "resume"])))]
pub(crate) struct GangArgs {
    /// VMs, and the hosts to move them to; where two hosts have a VM of that name,
    /// write HOST/VM=HOST. Without any, gangs are listed
    #[arg(value_name = "VM=HOST", value_parser = parse_move)]
    pub(super) moves: Vec<WantedMove>,
    /// A TOML file with the moves and any of these options; what is typed here
    /// wins
    #[arg(long, value_name = "PLAN")]
    pub(super) file: Option<PathBuf>,
    /// Take a gang up again that has not moved all of its VMs
    #[arg(long, value_name = "ID")]
    pub(super) resume: Option<String>,
    #[command(flatten)]
    pub(super) how: HowArgs,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct EvacuateArgs {
    /// The host that all VMs are to leave
    pub(super) host: String,
    /// The hosts that they may go to [default: all others of the peers file]
    #[arg(long, value_name = "HOST,...", value_delimiter = ',')]
    pub(super) to: Vec<String>,
    #[command(flatten)]
    pub(super) how: HowArgs,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct RunArgs {
    /// How many VMs leave a host, and arrive at one, at a time [default: 2]
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u16).range(1..=i64::from(api::PARALLEL_MAX)))]
    pub(super) parallel: Option<u16>,
    /// The first VM that fails ends the gang: those that have not moved yet stay
    #[arg(long)]
    pub(super) atomic: bool,
    /// Only say where each VM goes, and what is expected to cross the network
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Print the report (or the plan, or the list) as JSON on standard output,
    /// and nothing else there
    #[arg(long)]
    pub(super) json: bool,
}

/// How each VM is moved.
#[derive(Debug, Default, ClapArgs)]
pub(crate) struct HowArgs {
    /// Connections to carry each VM [default: one per core up to 8, at least one
    /// per network card]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(super) lanes: Option<u16>,
    /// How long each VM may be gone, in milliseconds [default: 300]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub(super) downtime_ms: Option<u64>,
    /// How long each VM may stand still before its move is taken back, in seconds
    /// [default: ten times --downtime-ms, and 3 at least]
    #[arg(long, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) blackout_max: Option<u64>,
    /// Whether VMs that write too fast to be followed are slowed: auto, off, or
    /// so that they dirty this share of what can be delivered [default: auto]
    #[arg(long, value_name = "auto|off|C")]
    pub(super) throttle: Option<Throttle>,
    /// The percentage of its CPU time that a slowed VM keeps in any case
    /// [default: 20]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub(super) throttle_floor: Option<u8>,
    /// When each VM shall be there, in seconds from its own begin
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) deadline: Option<u64>,
    /// What to do with a VM that can't be followed even at its floor
    #[arg(long, value_enum)]
    pub(super) on_stall: Option<OnStallArg>,
    /// How memory is compressed [default: auto]
    #[arg(long, value_enum)]
    pub(super) compress: Option<CompressArg>,
    /// Which of QEMU's streams is read [default: auto]
    #[arg(long, value_enum)]
    pub(super) tap: Option<TapArg>,
    /// All hosts see the same storage: don't check
    #[arg(long)]
    pub(super) shared_disks: bool,
    /// Disks to move with each VM: all of its host's, or some by name
    #[arg(long, value_name = "all|NAME,...")]
    pub(super) disks: Option<String>,
    /// Make the images of disks that move at the destinations, where there are
    /// none
    #[arg(long)]
    pub(super) create_disks: bool,
    /// How long each VM may take, in seconds [default: as long as it takes]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) timeout: Option<u64>,
    /// The most that each migration ever sends: bits per second, such as 200M
    #[arg(long, value_name = "RATE")]
    pub(super) limit: Option<BitRate>,
    /// What each migration gets even if others want everything: bits per second
    #[arg(long, value_name = "RATE")]
    pub(super) reserve: Option<BitRate>,
    /// Whether data threads go before others that want the same CPUs [default:
    /// low]
    #[arg(long, value_enum)]
    pub(super) priority: Option<PriorityArg>,
    /// The CPUs that data threads run on, at all hosts: such as 0-3,8
    #[arg(long, value_name = "LIST")]
    pub(super) cpus: Option<Cpus>,
    /// Where pages may come from that need not be sent, because a VM of the same
    /// sharing domain has the same content [default: auto]
    #[arg(long, value_enum)]
    pub(super) share: Option<ShareArg>,
    /// The VMs' sharing domain from now on: only VMs of the same one have content in
    /// common [default: each VM's own]
    #[arg(long, value_name = "LABEL")]
    pub(super) share_domain: Option<String>,
    /// Whether the destinations read pages from the VMs' disks that have the same
    /// content, by what helpers in the guests say [default: auto]
    #[arg(long, value_enum)]
    pub(super) storage: Option<StorageArg>,
    /// The most that is read from storage for each VM, in bits per second
    #[arg(long, value_name = "RATE")]
    pub(super) storage_limit: Option<BitRate>,
    /// What the helper may use up in each guest: a share of one CPU, time, memory
    /// [default: cpu=50%,time=10s,memory=32M]
    #[arg(long, value_name = "cpu=N%,time=Ns,memory=NM")]
    pub(super) helper_budget: Option<HelperBudget>,
    /// Move VMs to hosts that have less memory free than their RAM
    #[arg(long)]
    pub(super) overcommit_memory: bool,
    /// What is compared before each VM is given up [default: on]
    #[arg(long, value_enum)]
    pub(super) audit: Option<AuditArg>,
}

fn parse_move(text: &str) -> Result<WantedMove, String> {
    let (vm, to) = text.split_once('=').unwrap_or_default();
    let (from, vm) = match vm.split_once('/') {
        Some((from, vm)) => (Some(from), vm),
        None => (None, vm),
    };
    if vm.is_empty() || to.is_empty() || from.is_some_and(str::is_empty) {
        return Err("write VM=HOST, such as web1=host-b, or host-a/web1=host-b".to_owned());
    }
    Ok(WantedMove { vm: vm.to_owned(), from: from.map(str::to_owned), to: to.to_owned() })
}
