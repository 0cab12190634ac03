//! `report`: show how a migration, or a gang, went.

use std::path::PathBuf;
use std::process::ExitCode;

use api::{GangReport, Report};
use clap::Args as ClapArgs;

use crate::client::Client;
use crate::operation::Operation;
use crate::output::{print, print_json, print_line};
use crate::problem::Problem;
use crate::report::{details, gang, html};

#[derive(Debug, ClapArgs)]
pub(crate) struct ReportArgs {
    /// The migration, the gang, or a file that `--json` wrote (with a `/` or `.json` in
    /// its name)
    id: String,
    /// Print JSON
    #[arg(long, conflicts_with = "html")]
    json: bool,
    /// Write one self-contained HTML page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

pub(crate) async fn run(client: &Client, args: &ReportArgs) -> Result<ExitCode, Problem> {
    // Ids have neither. A saved report can be shown without an agent.
    if args.id.contains('/') || args.id.ends_with(".json") {
        return show(&saved(&args.id)?, args);
    }
    let operation = Operation::named(&args.id);
    if let Operation::Gang(_) = operation
        && args.html.is_some()
    {
        return Err(Problem::Typed(
            "a gang has no page of its own: each of its migrations has, at the host that its VM \
             left"
                .to_owned(),
        ));
    }
    let path = format!("{}/report", operation.path());
    match operation {
        Operation::Migration(_) => show(&client.get(&path).await?, args),
        Operation::Gang(_) => show_gang(&client.get(&path).await?, args.json),
    }
}

fn show(report: &Report, args: &ReportArgs) -> Result<ExitCode, Problem> {
    if let Some(file) = &args.html {
        std::fs::write(file, html::page(report)).map_err(|source| Problem::Local {
            what: format!("writing {}", file.display()),
            source,
        })?;
        print_line(format_args!("Wrote {}.", file.display()))?;
    } else if args.json {
        print_json(report)?;
    } else {
        print(format_args!("{}", details::text(report)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn show_gang(report: &GangReport, json: bool) -> Result<ExitCode, Problem> {
    if json {
        print_json(report)?;
    } else {
        print(format_args!("{}", gang::text(report)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn saved(file: &str) -> Result<Report, Problem> {
    let text = std::fs::read_to_string(file)
        .map_err(|source| Problem::Local { what: format!("reading {file}"), source })?;
    serde_json::from_str(&text)
        .map_err(|error| Problem::Typed(format!("{file} is not a report: {error}")))
}
