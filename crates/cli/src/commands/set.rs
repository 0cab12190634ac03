//! `set`: change a migration's limits while it runs.

use std::process::ExitCode;
use std::str::FromStr;

use api::{BitRate, Bounds, BoundsChange, Cpus, Priority};
use clap::{ArgGroup, Args as ClapArgs};
use client::{Client, Problem, segment};
use hyper::Method;
use report::described;

use crate::options::words::{self, one_of};
use crate::output::print_line;

#[derive(Debug, ClapArgs)]
#[command(group(ArgGroup::new("change").required(true).multiple(true).args(
    ["limit", "reserve", "reserve_min", "priority", "cpus"])))]
pub(crate) struct SetArgs {
    /// The migration
    id: String,
    /// The most that it sends from now on, in bits per second, such as 200M
    #[arg(long, value_name = "RATE|none")]
    limit: Option<Or<BitRate>>,
    /// What it gets even if others want everything, in bits per second
    #[arg(long, value_name = "RATE|none")]
    reserve: Option<Or<BitRate>>,
    /// What other traffic keeps of each network card, in bits per second, if the VM needs
    /// more than others leave
    #[arg(long, value_name = "RATE|none")]
    reserve_min: Option<Or<BitRate>>,
    /// The scheduling priority of its data threads
    #[arg(long, value_parser = one_of::<Priority>(words::PRIORITY))]
    priority: Option<Priority>,
    /// The CPUs that its data threads run on, at both hosts
    #[arg(long, value_name = "LIST|all")]
    cpus: Option<Or<Cpus>>,
}

impl SetArgs {
    fn change(self) -> BoundsChange {
        BoundsChange {
            limit_bits_per_s: self.limit.map(|limit| limit.0),
            reserve_bits_per_s: self.reserve.map(|reserve| reserve.0),
            reserve_min_bits_per_s: self.reserve_min.map(|least| least.0),
            priority: self.priority,
            cpus: self.cpus.map(|cpus| cpus.0),
        }
    }
}

/// A value, or the word that removes the bound.
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

pub(crate) async fn run(client: &Client, args: SetArgs) -> Result<ExitCode, Problem> {
    let (id, path) = (args.id.clone(), format!("/v1/migrations/{}", segment(&args.id)));
    let bounds: Bounds = client.request(Method::PATCH, &path, Some(&args.change())).await?;
    print_line(format_args!("Migration {id}: {}.", described(&bounds)))?;
    Ok(ExitCode::SUCCESS)
}
