//! `stop`: shut a VM down.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use client::{Client, NOTHING, Problem, segment};
use hyper::Method;

use crate::output::print_line;
use crate::watch::{Signals, leave_stopping, terminated, wait};

#[derive(Debug, ClapArgs)]
pub(crate) struct StopArgs {
    /// The VM
    name: String,
    /// End QEMU at once instead of having the guest shut down
    #[arg(long)]
    force: bool,
    /// How long the guest may take to shut down before QEMU is ended, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(..=api::STOP_S_MAX))]
    timeout: u64,
}

pub(crate) async fn run(client: &Client, args: &StopArgs) -> Result<ExitCode, Problem> {
    let path =
        format!("/v1/vms/{}?force={}&timeout_s={}", segment(&args.name), args.force, args.timeout);
    let name = &args.name;
    // The agent can't be asked to leave off, so a user who presses Ctrl-C has to know that.
    let (mut signals, terminated) = (Signals::interrupts()?, terminated()?);
    let asking = client.request::<api::Stopped>(Method::DELETE, &path, NOTHING);
    let Some(stopped) = wait(asking, &mut signals, terminated, &goes_on(args)).await? else {
        return Ok(leave_stopping(name));
    };
    let said = match stopped.end {
        api::StopEnd::ShutDown => format!("{name} has shut down."),
        api::StopEnd::PlugPulled if args.force => format!("{name} is off."),
        api::StopEnd::PlugPulled => {
            format!("{name} did not shut down within {} s, so its QEMU was ended.", args.timeout)
        }
        api::StopEnd::WasDead => format!("{name} was dead and is removed."),
    };
    print_line(format_args!("{said}"))?;
    Ok(ExitCode::SUCCESS)
}

/// The message at the first Ctrl-C.
fn goes_on(StopArgs { name, force, timeout }: &StopArgs) -> String {
    let becomes = if *force {
        "is being ended".to_owned()
    } else {
        format!("keeps shutting down: its QEMU is ended after {timeout} s")
    };
    format!("{name} {becomes}. Ctrl-C again: don't wait.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctrl_c_does_not_seem_to_keep_the_plug_in() {
        let args = |force| StopArgs { name: "web1".to_owned(), force, timeout: 60 };
        assert_eq!(
            goes_on(&args(false)),
            "web1 keeps shutting down: its QEMU is ended after 60 s. Ctrl-C again: don't wait."
        );
        assert_eq!(goes_on(&args(true)), "web1 is being ended. Ctrl-C again: don't wait.");
    }
}
