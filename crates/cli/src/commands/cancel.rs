//! `cancel`: end a migration, or a gang, before its time.

use std::process::ExitCode;

use clap::Args as ClapArgs;

use crate::client::Client;
use crate::operation::Operation;
use crate::problem::Problem;

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
            println!("Migration {id} is being cancelled; its VM stays where it is.");
        }
        Operation::Gang(id) => {
            println!("Gang {id} is being cancelled; VMs that have not moved stay where they are.");
        }
    }
    Ok(ExitCode::SUCCESS)
}
