//! `init`: the first set-up of two or more hosts, without any agent.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args as ClapArgs;
use client::Problem;

use crate::init::cluster::Cluster;
use crate::init::hosts::TypedHost;
use crate::init::{archive, ask, peers_file, place, steps};
use crate::output::print;

#[derive(Debug, ClapArgs)]
pub(crate) struct InitArgs {
    /// A host: its name, and the IP address at which the other hosts reach it, with a port
    /// if it is not 7800; then, each after a comma, addresses of network cards that carry
    /// data. Hosts that were named before need not be named again [at a terminal: a prompt]
    #[arg(value_name = "NAME=ADDRESS", conflicts_with = "from")]
    hosts: Vec<TypedHost>,
    /// Where the CA, the peers file and the hosts' archives are kept: if you can choose, not
    /// on a host that runs VMs
    #[arg(long, value_name = "DIR", default_value = "droveway-ca", conflicts_with = "from")]
    dir: PathBuf,
    /// The operator, who gets a certificate for the API with the role `admin`
    #[arg(long, value_name = "NAME", default_value = "operator", conflicts_with = "from")]
    operator: String,
    /// The user that QEMU runs as on all of these hosts, who has to exist there [at a
    /// terminal: a prompt, with that for the hosts; else the agent's own user, usually root]
    #[arg(long, value_name = "NAME", conflicts_with = "from")]
    qemu_user: Option<String>,
    /// Put the files of a host's archive in place, on that host
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// With --from: the root directory of the host, such as that of an image
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/",
        requires = "from",
        conflicts_with = "hosts"
    )]
    root: PathBuf,
}

pub(crate) fn run(args: InitArgs) -> Result<ExitCode, Problem> {
    let said = match &args.from {
        Some(archive) => place_files(archive, &args.root)?,
        None => make(args)?,
    };
    print(format_args!("{said}"))?;
    Ok(ExitCode::SUCCESS)
}

fn make(args: InitArgs) -> Result<String, Problem> {
    let peers = peers_file::read(&args.dir)?;
    let (hosts, qemu_user) = if args.hosts.is_empty() && peers.is_empty() {
        asked(args.qemu_user)?
    } else {
        (args.hosts, args.qemu_user)
    };
    let cluster = Cluster::understood(args.dir, &args.operator, qemu_user, &peers, &hosts)?;
    let done = cluster.make()?;
    Ok(format!("{}\n{}", done.lines(), steps::after_make(&cluster)))
}

fn asked(qemu_user: Option<String>) -> Result<(Vec<TypedHost>, Option<String>), Problem> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        return Err(Problem::Typed(
            "name the hosts, each with the IP address at which the others reach it: droveway init \
             host-a=10.0.0.1 host-b=10.0.0.2"
                .to_owned(),
        ));
    }
    let (mut input, mut output) = (stdin.lock(), std::io::stdout());
    let asking =
        |source| Problem::Local { what: "reading the hosts from the terminal".to_owned(), source };
    let hosts = ask::hosts(&mut input, &mut output).map_err(asking)?;
    let qemu_user = match qemu_user {
        None => ask::qemu_user(&mut input, &mut output).map_err(asking)?,
        typed => typed,
    };
    Ok((hosts, qemu_user))
}

fn place_files(file: &Path, root: &Path) -> Result<String, Problem> {
    let archive = archive::read(file)?;
    let placed = place::place(&archive, file, root)?;
    Ok(format!("{}\n{}", placed.lines(), steps::after_place(&placed)))
}
