//! How far a VM may be throttled, as typed.

use api::{OnStall, Slowing, Throttle};
use clap::{Args as ClapArgs, ValueEnum};
use serde::Deserialize;

#[derive(Debug, ClapArgs)]
pub(crate) struct SlowingArgs {
    /// Whether a VM that writes faster than its memory can be sent is throttled:
    /// auto, as far as needed; off; or so that it dirties this share of what can be
    /// delivered, such as 0.7
    #[arg(long, value_name = "auto|off|C", default_value_t = Throttle::Auto)]
    pub(crate) throttle: Throttle,
    /// The percentage of its CPU time that a throttled VM keeps in any case
    #[arg(long, value_name = "PERCENT", default_value_t = 20,
          value_parser = clap::value_parser!(u8).range(1..=100))]
    pub(crate) throttle_floor: u8,
    /// How many seconds from now the VM is to have arrived; it is throttled as far as
    /// that takes, but not below its floor
    #[arg(long, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) deadline: Option<u64>,
    /// What to do with a VM that does not converge even at its floor [default:
    /// cancel; with --throttle off, keep]
    #[arg(long, value_enum)]
    pub(crate) on_stall: Option<OnStallArg>,
}

impl From<SlowingArgs> for Slowing {
    fn from(args: SlowingArgs) -> Self {
        Self {
            throttle: args.throttle,
            floor: f64::from(args.throttle_floor) / 100.0,
            deadline_s: args.deadline,
            on_stall: args.on_stall.map(OnStall::from),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OnStallArg {
    /// Keep trying
    Keep,
    /// Stop it and move what is left, however long the downtime
    Stop,
    /// Cancel the move; the VM stays where it is
    Cancel,
}

impl From<OnStallArg> for OnStall {
    fn from(arg: OnStallArg) -> Self {
        match arg {
            OnStallArg::Keep => Self::Keep,
            OnStallArg::Stop => Self::Stop,
            OnStallArg::Cancel => Self::Cancel,
        }
    }
}
