//! What a migration may use: as it is typed, and as it is shown.

use std::process::ExitCode;
use std::str::FromStr;

use api::{BitRate, Bounds, BoundsChange, Cpus, Priority};
use clap::{ArgGroup, Args as ClapArgs, ValueEnum};
use hyper::Method;

use crate::client::{Client, segment};
use crate::problem::Problem;

#[derive(Debug, ClapArgs)]
pub(crate) struct BoundsArgs {
    /// The most that it sends, headers included, in bits per second, such as 200M
    /// or 1.5G [default: what others leave of the network cards]
    #[arg(long, value_name = "RATE")]
    pub(crate) limit: Option<BitRate>,
    /// What it gets even if others want everything, in bits per second
    #[arg(long, value_name = "RATE")]
    pub(crate) reserve: Option<BitRate>,
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
            priority: args.priority.into(),
            cpus: args.cpus,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
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

#[derive(Debug, ClapArgs)]
#[command(group(ArgGroup::new("change").required(true).multiple(true).args(
    ["limit", "reserve", "priority", "cpus"])))]
pub(crate) struct SetArgs {
    /// The migration
    pub(crate) id: String,
    /// The most that it sends from now on, in bits per second, such as 200M
    #[arg(long, value_name = "RATE|none")]
    limit: Option<Or<BitRate>>,
    /// What it gets even if others want everything, in bits per second
    #[arg(long, value_name = "RATE|none")]
    reserve: Option<Or<BitRate>>,
    /// The scheduling priority of its data threads
    #[arg(long, value_enum)]
    priority: Option<PriorityArg>,
    /// The CPUs that its data threads run on, at both hosts
    #[arg(long, value_name = "LIST|all")]
    cpus: Option<Or<Cpus>>,
}

impl SetArgs {
    fn change(self) -> BoundsChange {
        BoundsChange {
            limit_bits_per_s: self.limit.map(|limit| limit.0),
            reserve_bits_per_s: self.reserve.map(|reserve| reserve.0),
            priority: self.priority.map(Priority::from),
            cpus: self.cpus.map(|cpus| cpus.0),
        }
    }
}

/// Something, or the word that takes it away.
#[derive(Clone, Debug)]
struct Or<T>(Option<T>);

impl<T: FromStr> FromStr for Or<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        if matches!(text, "none" | "all") {
            Ok(Self(None))
        } else {
            text.parse().map(Some).map(Self)
        }
    }
}

pub(crate) async fn set(client: &Client, args: SetArgs) -> Result<ExitCode, Problem> {
    let (id, path) = (args.id.clone(), format!("/v1/migrations/{}", segment(&args.id)));
    let bounds: Bounds = client.ask(Method::PATCH, &path, Some(&args.change())).await?;
    println!("Migration {id}: {}.", crate::output::described(&bounds));
    Ok(ExitCode::SUCCESS)
}
