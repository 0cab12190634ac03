//! `cancel`: cancel a migration or a gang.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use client::{Client, Operation, Problem};

use crate::output::print_line;

#[derive(Debug, ClapArgs)]
pub(crate) struct CancelArgs {
    /// The migration, or the gang
    id: String,
}

pub(crate) async fn run(client: &Client, args: &CancelArgs) -> Result<ExitCode, Problem> {
    let operation = Operation::named(&args.id);
    client.cancel(&operation.path()).await?;
    match operation {
        Operation::Migration(id) => {
            print_line(format_args!(
                "Migration {id} is being cancelled. Unless it commits before that, its VM stays \
                 where it is: `droveway report {id}` shows how it ended."
            ))?;
        }
        Operation::Gang(id) => {
            print_line(format_args!(
                "Gang {id} is being cancelled; VMs that have not moved stay where they are."
            ))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
