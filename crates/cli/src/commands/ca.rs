//! `ca`: the operator's own certificate authority.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};
use client::Problem;
use identity::{Authority, AuthorityError, CertificateRequest, Role, Subject};

use crate::output::print;

/// Often as long as a cluster lives.
pub(crate) const CA_DAYS: u32 = 3650;
/// A year: renewal becomes a habit, and a stolen key soon becomes useless.
pub(crate) const DAYS: u32 = 365;

#[derive(Debug, ClapArgs)]
pub(crate) struct CaArgs {
    #[command(subcommand)]
    command: CaCommand,
}

#[derive(Debug, Subcommand)]
enum CaCommand {
    /// Create a CA: its key and its certificate
    Init(InitArgs),
    /// Issue a key and a certificate for a host's agent, or for a person with a
    /// role
    Issue(IssueArgs),
}

#[derive(Debug, ClapArgs)]
struct InitArgs {
    /// Where the CA is kept: if you can choose, not on a host that runs VMs
    #[arg(long, value_name = "DIR", default_value = "droveway-ca")]
    dir: PathBuf,
    /// How long it is valid
    #[arg(long, value_name = "DAYS", default_value_t = CA_DAYS, value_parser = days())]
    days: u32,
}

#[derive(Debug, ClapArgs)]
struct IssueArgs {
    /// The host's name, as in the peers file; with --role, the person's
    name: String,
    /// Issue it to a person, for the API, with this role (observe, migrate, admin)
    #[arg(long)]
    role: Option<Role>,
    /// The directory of the CA
    #[arg(long, value_name = "DIR", default_value = "droveway-ca")]
    dir: PathBuf,
    /// Where the files go [default: hosts/NAME or clients/NAME next to the CA]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// How long it is valid; never longer than its CA
    #[arg(long, value_name = "DAYS", default_value_t = DAYS, value_parser = days())]
    days: u32,
    /// Replace existing files
    #[arg(long)]
    replace: bool,
}

fn days() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=36_500)
}

/// Runs the command, without any agent.
pub(crate) fn run(args: &CaArgs) -> Result<ExitCode, Problem> {
    let done = match &args.command {
        CaCommand::Init(args) => init(args),
        CaCommand::Issue(args) => issue(args),
    };
    print(format_args!("{}", done?))?;
    Ok(ExitCode::SUCCESS)
}

fn init(InitArgs { dir, days }: &InitArgs) -> Result<String, AuthorityError> {
    let validity = Authority::create(dir, *days)?;
    Ok(format!(
        "A CA is in {}, {validity}.\nAnyone with its ca.key can pose as any host: back it up, and \
         keep it secret.\nNext: droveway ca issue HOST --dir {0}\n",
        dir.display()
    ))
}

fn issue(args: &IssueArgs) -> Result<String, AuthorityError> {
    let subject = match args.role {
        None => Subject::host(&args.name)?,
        Some(role) => Subject::client(role, &args.name)?,
    };
    let authority = Authority::open(&args.dir)?;
    let out = args.out.clone().unwrap_or_else(|| authority.place_for(&subject));
    let request = CertificateRequest { subject, days: args.days, out, replace: args.replace };
    let issued = authority.issue(&request)?;
    let (subject, out) = (&request.subject, request.out.display());
    let mut said = format!("A certificate for {subject} is in {out}, {}.\n", issued.validity);
    if issued.is_shortened {
        said.push_str("It expires with its CA, earlier than requested.\n");
    }
    said.push_str(match subject {
        Subject::Host(_) => {
            "Copy ca.crt, droveway.crt, droveway.key and content.key to /etc/droveway/tls on that \
             host, readable by its agent alone. An agent that runs reads them within half a \
             minute; with its first certificate, or another content.key, restart it.\n"
        }
        Subject::Client { .. } => "Give ca.crt, droveway.crt and droveway.key to its holder.\n",
    });
    Ok(said)
}
