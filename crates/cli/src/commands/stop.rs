//! `stop`: shut a VM down.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use hyper::Method;

use crate::client::{Client, NOTHING, segment};
use crate::problem::Problem;

#[derive(Debug, ClapArgs)]
pub(crate) struct StopArgs {
    /// The VM
    name: String,
    /// Pull the plug at once instead of pressing the power button
    #[arg(long)]
    force: bool,
    /// How long the guest may take to shut down before the plug is pulled, in
    /// seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
}

pub(crate) async fn run(client: &Client, args: &StopArgs) -> Result<ExitCode, Problem> {
    let path =
        format!("/v1/vms/{}?force={}&timeout_s={}", segment(&args.name), args.force, args.timeout);
    let stopped: api::Stopped = client.ask(Method::DELETE, &path, NOTHING).await?;
    match stopped.end {
        api::StopEnd::ShutDown => println!("{} has shut down.", args.name),
        api::StopEnd::PlugPulled if args.force => println!("{} is off.", args.name),
        api::StopEnd::PlugPulled => println!(
            "{} did not shut down within {} s, so its plug was pulled.",
            args.name, args.timeout
        ),
        api::StopEnd::WasDead => println!("{} was dead and is removed.", args.name),
    }
    Ok(ExitCode::SUCCESS)
}
