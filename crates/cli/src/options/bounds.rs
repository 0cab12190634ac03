//! The resources that a migration may use, as typed.

use api::{BitRate, Bounds, Cpus, Priority};
use clap::{Args as ClapArgs, ValueEnum};
use serde::Deserialize;

#[derive(Debug, ClapArgs)]
pub(crate) struct BoundsArgs {
    /// The most that it sends, headers included, in bits per second, such as 200M
    /// or 1.5G [default: what others leave of the network cards]
    #[arg(long, value_name = "RATE")]
    pub(crate) limit: Option<BitRate>,
    /// What it gets even if others want everything, in bits per second
    #[arg(long, value_name = "RATE")]
    pub(crate) reserve: Option<BitRate>,
    /// What other traffic keeps of each network card, in bits per second, if the VM would
    /// have to be throttled, or would miss --deadline, with what others leave [default:
    /// all that it uses]
    #[arg(long, value_name = "RATE")]
    pub(crate) reserve_min: Option<BitRate>,
    /// The scheduling priority of its data threads
    #[arg(long, value_enum, default_value_t = PriorityArg::Low)]
    pub(crate) priority: PriorityArg,
    /// The CPUs that its data threads run on, at both hosts, such as 0-3,8
    #[arg(long, value_name = "LIST")]
    pub(crate) cpus: Option<Cpus>,
}

impl From<BoundsArgs> for Bounds {
    fn from(args: BoundsArgs) -> Self {
        Self {
            limit_bits_per_s: args.limit,
            reserve_bits_per_s: args.reserve,
            reserve_min_bits_per_s: args.reserve_min,
            priority: args.priority.into(),
            cpus: args.cpus,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PriorityArg {
    /// Lower than VMs and other programs
    Low,
    /// The same as other programs
    Normal,
    /// Higher than other programs; the agents must be allowed to raise it
    High,
}

impl From<PriorityArg> for Priority {
    fn from(arg: PriorityArg) -> Self {
        match arg {
            PriorityArg::Low => Self::Low,
            PriorityArg::Normal => Self::Normal,
            PriorityArg::High => Self::High,
        }
    }
}
