//! `report`: show how a migration, or a gang, went.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use api::{GangReport, Report};
use clap::Args as ClapArgs;
use client::{Client, Operation, Problem};
use report::{details, gang, html};
use serde_json::Value;

use crate::output::{print, print_json, print_line};

#[derive(Debug, ClapArgs)]
pub(crate) struct ReportArgs {
    /// The migration, the gang, or a file that `--json` wrote, of either (with a `/` or
    /// `.json` in its name)
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
        return match saved(&args.id)? {
            Saved::Migration(report) => show(&report, args),
            Saved::Gang(report) => show_gang(&report, args),
        };
    }
    let operation = Operation::named(&args.id);
    let path = format!("{}/report", operation.path());
    match operation {
        Operation::Migration(_) => show(&client.get(&path).await?, args),
        Operation::Gang(_) => show_gang(&client.get(&path).await?, args),
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

fn show_gang(report: &GangReport, args: &ReportArgs) -> Result<ExitCode, Problem> {
    if args.html.is_some() {
        return Err(Problem::Typed(
            "a gang has no page of its own: each of its migrations has, at the host that its VM \
             left"
                .to_owned(),
        ));
    }
    if args.json {
        print_json(report)?;
    } else {
        print(format_args!("{}", gang::text(report)))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A report that `--json` wrote.
#[derive(Debug)]
enum Saved {
    Migration(Box<Report>),
    Gang(Box<GangReport>),
}

fn saved(file: &str) -> Result<Saved, Problem> {
    let text = agent::config::file::read(Path::new(file))?;
    parse(&text).map_err(|error| Problem::Typed(format!("{file} is not a report: {error}")))
}

fn parse(text: &str) -> Result<Saved, serde_json::Error> {
    let value: Value = serde_json::from_str(text)?;
    // Only a gang's report has its VMs.
    if value.get("moves").is_some() {
        serde_json::from_value(value).map(Saved::Gang)
    } else {
        serde_json::from_value(value).map(Saved::Migration)
    }
}

#[cfg(test)]
mod tests {
    use report::example::example;
    use serde_json::json;

    use super::*;

    #[test]
    fn reports_of_migrations_and_of_gangs_are_read_from_files() {
        let migration = serde_json::to_string(&example()).unwrap();
        assert!(matches!(parse(&migration), Ok(Saved::Migration(report)) if report.vm == "web1"));
        let gang = json!({
            "id": "g1", "started_unix_s": 1, "total_s": 2.5, "parallel": 2, "atomic": false,
            "options": api::GangOptions::default(), "outcome": "done", "notes": [], "moves": [],
        });
        assert!(matches!(parse(&gang.to_string()), Ok(Saved::Gang(report)) if report.id == "g1"));
        for (wrong, says) in [("{}", "missing field"), ("[1]", "invalid"), ("{", "EOF")] {
            let error = parse(wrong).unwrap_err().to_string();
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }
}
