//! `stop`: shut a VM down.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use hyper::Method;

use crate::client::{Client, NOTHING, segment};
use crate::output::print_line;
use crate::problem::Problem;

#[derive(Debug, ClapArgs)]
pub(crate) struct StopArgs {
    /// The VM
    name: String,
    /// End QEMU at once instead of having the guest shut down
    #[arg(long)]
    force: bool,
    /// How long the guest may take to shut down before QEMU is ended, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
}

pub(crate) async fn run(client: &Client, args: &StopArgs) -> Result<ExitCode, Problem> {
    let path =
        format!("/v1/vms/{}?force={}&timeout_s={}", segment(&args.name), args.force, args.timeout);
    let stopped: api::Stopped = client.ask(Method::DELETE, &path, NOTHING).await?;
    let name = &args.name;
    let said = match stopped.end {
        api::StopEnd::ShutDown => format!("{name} has shut down."),
        api::StopEnd::PlugPulled if args.force => format!("{name} is off."),
        api::StopEnd::PlugPulled => {
            format!("{name} did not shut down within {} s, so its plug was pulled.", args.timeout)
        }
        api::StopEnd::WasDead => format!("{name} was dead and is removed."),
    };
    print_line(format_args!("{said}"))?;
    Ok(ExitCode::SUCCESS)
}
