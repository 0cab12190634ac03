//! The lab's command.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use lab::error::LabError;

/// Hosts, guests and races on one machine.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Install and make what the lab needs.
    Setup,
    /// Print where the lab's QEMU, kernel and initramfs are.
    Env,
}

fn main() -> ExitCode {
    match run(&Options::parse().action) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(action: &Action) -> Result<(), LabError> {
    match action {
        Action::Setup => {
            lab::setup::ensure()?;
        }
        Action::Env => println!("{}", lab::setup::ensure()?),
    }
    Ok(())
}
