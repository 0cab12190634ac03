//! `migrate`: move a VM to another host while it runs.

use std::process::ExitCode;

use api::{GangOptions, MigrateRequest, MigrationStarted, Outcome, Report};
use clap::Args as ClapArgs;
use client::{Client, Operation, Problem};
use hyper::Method;
use report::summary;

use crate::options::MoveOptions;
use crate::output::{eprint_line, print_json, print_line};
use crate::watch::migration::Display;
use crate::watch::{Followed, Shown, Signals, begin, follow, leave, leave_unanswered, report};

#[derive(Debug, ClapArgs)]
pub(crate) struct MigrateArgs {
    /// The VM
    name: String,
    /// The host to move it to
    host: String,
    #[command(flatten)]
    options: MoveOptions,
    /// Replace OLD by NEW in the VM's command line at the destination: a path, a
    /// tap, an address; may be repeated
    #[arg(long, value_name = "OLD=NEW", value_parser = parse_set)]
    set: Vec<String>,
    /// Overwrite images at the destination that hold data
    #[arg(long, requires = "disks")]
    overwrite_disks: bool,
    /// QMP socket, at the destination, of a QEMU that you started there with
    /// `-incoming defer -S`
    #[arg(long, value_name = "SOCKET")]
    incoming_qmp: Option<String>,
    /// The percentage of the pages on the VM's disks that is read from them, whatever is
    /// faster: for benchmarks
    #[arg(long, value_name = "PERCENT", hide = true, value_parser = clap::value_parser!(u8).range(..=100))]
    storage_share: Option<u8>,
    /// Print the report as JSON on standard output, and nothing else there
    #[arg(long)]
    json: bool,
}

impl MigrateArgs {
    pub(crate) fn into_request(self) -> Result<MigrateRequest, Problem> {
        let options = GangOptions::from(self.options.check()?);
        let mut request = options.request(&self.name, &self.host);
        request.storage.share = self.storage_share;
        request.set = self.set;
        request.overwrite_disks = self.overwrite_disks;
        request.incoming_qmp = self.incoming_qmp;
        Ok(request)
    }
}

fn parse_set(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some((old, _)) if !old.is_empty() => Ok(text.to_owned()),
        _ => Err("write OLD=NEW, such as /dev/sdb=/dev/sdc".to_owned()),
    }
}

pub(crate) async fn run(client: &Client, args: MigrateArgs) -> Result<ExitCode, Problem> {
    let json = args.json;
    // Handled from now on, so that no signal before the first line of progress ends the
    // command and leaves the migration running unwatched.
    let mut signals = Signals::new()?;
    let request = args.into_request()?;
    let asking = client.request::<MigrationStarted>(Method::POST, "/v1/migrations", Some(&request));
    let Some(MigrationStarted { id }) = begin(asking, &mut signals).await? else {
        return Ok(leave_unanswered("droveway list --migrations"));
    };
    let mut display = Display::new();
    // It can be cancelled elsewhere, whatever happens here.
    display.say(&format!("Migration {id}: {} to {}.", request.vm, request.to));
    let operation = Operation::Migration(id);
    let followed = follow(client, &operation, &mut signals, &mut display).await;
    display.clear();
    let last = match followed? {
        Followed::Ended(last) => last,
        Followed::Left { said } => return Ok(leave(&operation, said)),
    };
    let report: Result<Report, Problem> = report(client, &operation, &mut signals).await;
    match report.and_then(|report| tell(&report, json)) {
        Ok(()) => {}
        // An agent that is stopping cancels its migrations first, and may have ended by now.
        // The outcome is known anyway.
        Err(problem) => {
            eprint_line(format_args!("droveway: {}", summary::without_report(&last)));
            eprint_line(format_args!("droveway: no report: {problem}"));
        }
    }
    Ok(match last.outcome {
        Some(Outcome::Done) => ExitCode::SUCCESS,
        Some(Outcome::Failed(_) | Outcome::Cancelled) | None => ExitCode::FAILURE,
    })
}

fn tell(report: &Report, json: bool) -> Result<(), Problem> {
    if !json {
        return print_line(format_args!("{}", summary::sentences(report)));
    }
    print_json(report)?;
    if report.outcome != Outcome::Done {
        eprint_line(format_args!("droveway: {}", summary::sentences(report)));
    }
    Ok(())
}
