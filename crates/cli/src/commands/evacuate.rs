//! `evacuate`: move all VMs of a host to others, by their content and free memory.

use std::process::ExitCode;

use api::{Evacuation, GangRequest, PARALLEL_DEFAULT};
use clap::Args as ClapArgs;
use client::{Client, Problem};

use crate::gang::start::{StartArgs, start};
use crate::options::MoveOptions;

#[derive(Debug, ClapArgs)]
pub(crate) struct EvacuateArgs {
    /// The host to move all VMs from
    host: String,
    /// The hosts that they may move to [default: all others of the peers file]
    #[arg(long, value_name = "HOST,...", value_delimiter = ',')]
    to: Vec<String>,
    #[command(flatten)]
    options: MoveOptions,
    #[command(flatten)]
    start: StartArgs,
}

pub(crate) async fn run(client: &Client, args: EvacuateArgs) -> Result<ExitCode, Problem> {
    let EvacuateArgs { host, to, mut options, start: args } = args;
    options.limit_total = args.limit_total;
    let request = GangRequest {
        moves: Vec::new(),
        evacuate: Some(Evacuation { host, to }),
        options: options.check()?.into(),
        parallel: args.parallel.unwrap_or(PARALLEL_DEFAULT),
        atomic: args.atomic,
        dry_run: args.dry_run,
    };
    start(client, &request, &args).await
}
