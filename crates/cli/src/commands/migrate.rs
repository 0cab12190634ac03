//! `migrate`: move a VM to another host while it runs.

use std::process::ExitCode;

use api::{MigrationStarted, Outcome, Report};
use clap::Args as ClapArgs;
use client::{Client, Operation, Problem};
use hyper::Method;
use report::summary;

use crate::options::{
    AuditArg, BoundsArgs, CompressArg, SharingArgs, SlowingArgs, StorageArgs, TapArg,
};
use crate::output::{eprint_line, print_json, print_line};
use crate::watch::migration::Display;
use crate::watch::{Followed, Shown, Signals, begin, follow, leave, leave_unanswered, report};

#[derive(Debug, ClapArgs)]
pub(crate) struct MigrateArgs {
    /// The VM
    name: String,
    /// The host to move it to
    host: String,
    /// Data connections [default: one per core up to 8, at least one per network
    /// card]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    lanes: Option<u16>,
    /// The downtime goal, in milliseconds
    #[arg(long, value_name = "N", default_value_t = 300,
          value_parser = clap::value_parser!(u64).range(1..=60_000))]
    downtime_ms: u64,
    /// How long the VM may stand still before its move is taken back, in seconds
    /// [default: ten times --downtime-ms, at least 3]
    #[arg(long, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    blackout_max: Option<u64>,
    #[command(flatten)]
    slowing: SlowingArgs,
    #[command(flatten)]
    sharing: SharingArgs,
    #[command(flatten)]
    storage: StorageArgs,
    /// How memory is compressed
    #[arg(long, value_enum, default_value_t = CompressArg::Auto)]
    compress: CompressArg,
    /// Which kind of migration stream QEMU is to send
    #[arg(long, value_enum, default_value_t = TapArg::Auto)]
    tap: TapArg,
    /// Don't check that both hosts see the same storage. If they don't, the VM's
    /// data is destroyed
    #[arg(long)]
    shared_disks: bool,
    /// Replace OLD by NEW in the VM's command line at the destination: a path, a
    /// tap, an address; may be repeated
    #[arg(long, value_name = "OLD=NEW", value_parser = parse_set)]
    set: Vec<String>,
    /// Disks to move with the VM: all that are local to this host, or some by name.
    /// The others must be on storage that both hosts see
    #[arg(long, value_name = "all|NAME,...")]
    disks: Option<String>,
    /// Create the images of moved disks at the destination where there are none
    #[arg(long, requires = "disks")]
    create_disks: bool,
    /// Overwrite images at the destination that hold data
    #[arg(long, requires = "disks")]
    overwrite_disks: bool,
    /// How long the move may take until its commit, in seconds; after that it ends,
    /// and the VM stays [default: no limit]
    #[arg(long, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
    #[command(flatten)]
    bounds: BoundsArgs,
    /// QMP socket, at the destination, of a QEMU that you started there with
    /// `-incoming defer -S`
    #[arg(long, value_name = "SOCKET")]
    incoming_qmp: Option<String>,
    /// Move it even to a host with less free memory than its RAM
    #[arg(long)]
    overcommit_memory: bool,
    /// Move it even if its QEMU loses writes of the guest meanwhile: one older than
    /// 9.0, under TCG
    #[arg(long)]
    accept_lost_writes: bool,
    /// Move it even to a host where a tap of its network cards is missing, or down
    #[arg(long)]
    accept_missing_taps: bool,
    /// What is compared before the source releases the VM
    #[arg(long, value_enum, default_value_t = AuditArg::On)]
    audit: AuditArg,
    /// Print the report as JSON on standard output, and nothing else there
    #[arg(long)]
    json: bool,
}

impl MigrateArgs {
    pub(crate) fn into_request(self) -> api::MigrateRequest {
        api::MigrateRequest {
            vm: self.name,
            to: self.host,
            lanes: self.lanes,
            downtime_ms: self.downtime_ms,
            blackout_max_s: self.blackout_max,
            slowing: self.slowing.into(),
            sharing: self.sharing.into(),
            storage: self.storage.into(),
            compress: self.compress.into(),
            tap: self.tap.into(),
            shared_disks: self.shared_disks,
            set: self.set,
            disks: self.disks,
            create_disks: self.create_disks,
            overwrite_disks: self.overwrite_disks,
            timeout_s: self.timeout,
            bounds: self.bounds.into(),
            incoming_qmp: self.incoming_qmp,
            overcommit_memory: self.overcommit_memory,
            accept_lost_writes: self.accept_lost_writes,
            accept_missing_taps: self.accept_missing_taps,
            audit: self.audit.into(),
        }
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
    let request = args.into_request();
    let asking = client.ask::<MigrationStarted>(Method::POST, "/v1/migrations", Some(&request));
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
