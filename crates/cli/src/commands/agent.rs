//! `agent`: run this host's agent.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use agent::config::{CpuShare, DirectoryChoice, Flags, NicSpeed};
use clap::Args as ClapArgs;
use client::Problem;

#[derive(Debug, ClapArgs)]
pub(crate) struct AgentArgs {
    /// A TOML file with any of these settings; flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// This host's name, as in the peers file
    #[arg(long)]
    name: Option<String>,
    /// The rack that this host is in
    #[arg(long)]
    rack: Option<String>,
    /// The address at which other agents reach this one [default: this host's in the
    /// peers file]
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
    /// The address of a network card that carries data; may be repeated [default: this
    /// host's in the peers file; if it names none, routing decides]
    #[arg(long = "nic", value_name = "ADDR")]
    nics: Vec<IpAddr>,
    /// The speed of a network card that doesn't report it: its address and bits per
    /// second; may be repeated
    #[arg(long = "nic-speed", value_name = "ADDR=RATE")]
    nic_speeds: Vec<NicSpeed>,
    /// The file that names the other hosts
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// Where the rack's directory is, in which its hosts look up each other's
    /// content: `auto` (in the agent of the rack's first host), `off`, `host:NAME`,
    /// `redis://HOST[:PORT],...`, or `redis+unix://PATH` [default: auto]
    #[arg(long, value_name = "WHERE")]
    directory: Option<DirectoryChoice>,
    /// Where the agent keeps its VMs' records and logs, and reports
    /// [default: /var/lib/droveway]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Buffers of all migrations that leave, in MiB, and as much again for all that arrive
    /// [default: 128]
    #[arg(long, value_name = "MIB")]
    pool_mib: Option<u32>,
    /// The user that QEMU runs as [default: the agent's own]
    #[arg(long, value_name = "NAME")]
    qemu_user: Option<String>,
    /// A program that other hosts may have started here: its path, where a * in the
    /// last part stands for any characters; may be repeated [default: where
    /// distributions install QEMU]
    #[arg(long, value_name = "PATH")]
    qemu_programs: Vec<String>,
    /// A group whose members may use the API's socket; they can do all that the agent can
    /// [default: only the agent's user may]
    #[arg(long, value_name = "NAME")]
    api_group: Option<String>,
    /// Serve the API over TCP too, to people with certificates
    #[arg(long, value_name = "ADDR:PORT")]
    api_listen: Option<SocketAddr>,
    /// Serve metrics at http://ADDR:PORT/metrics to anyone who reaches it; the API's
    /// socket has them too
    #[arg(long, value_name = "ADDR:PORT")]
    metrics_listen: Option<SocketAddr>,
    /// Neither encrypt nor authenticate: guest memory crosses the network as it is,
    /// and anyone who reaches the port can start programs here
    #[arg(long)]
    insecure_plaintext: bool,
    /// How much of one CPU the scan of VMs' memory for common content may use while
    /// nothing else wants it; 0: no scan [default: 5%]
    #[arg(long, value_name = "PERCENT")]
    scan_cpu: Option<CpuShare>,
}

impl AgentArgs {
    fn into_flags(self, api: Option<PathBuf>, tls: Option<PathBuf>) -> Flags {
        Flags {
            config: self.config,
            name: self.name,
            rack: self.rack,
            listen: self.listen,
            nics: self.nics,
            nic_speeds: self.nic_speeds,
            peers: self.peers,
            directory: self.directory,
            state: self.state,
            api,
            api_group: self.api_group,
            api_listen: self.api_listen,
            metrics_listen: self.metrics_listen,
            pool_mib: self.pool_mib,
            qemu_user: self.qemu_user,
            qemu_programs: self.qemu_programs,
            tls,
            insecure_plaintext: self.insecure_plaintext,
            scan_cpu: self.scan_cpu,
        }
    }
}

/// Runs the agent until it is stopped.
pub(crate) fn run(
    args: AgentArgs,
    api: Option<PathBuf>,
    tls: Option<PathBuf>,
) -> Result<ExitCode, Problem> {
    agent::run(&args.into_flags(api, tls))?;
    Ok(ExitCode::SUCCESS)
}
