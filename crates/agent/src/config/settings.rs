//! Settings as they are given: by flags, or by the file of `--config` with the flags' names as
//! keys.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use api::CpuFloor;
use serde::Deserialize;

use super::error::ConfigError;
use super::{CpuShare, DirectoryChoice, NicSpeed, carry, file, webhook, xen};

/// The settings of an agent; each may be missing.
#[derive(Debug, Default, clap::Args, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Settings {
    /// A TOML file with any of these settings; flags override it
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// This host's name, as in the peers file
    #[arg(long)]
    pub name: Option<String>,
    /// The rack that this host is in
    #[arg(long)]
    pub rack: Option<String>,
    /// The address at which other agents reach this one [default: this host's in the
    /// peers file]
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: Option<SocketAddr>,
    /// The address of a network card that carries data; may be repeated [default: this
    /// host's in the peers file; if it names none, routing decides]
    #[arg(long, value_name = "ADDR")]
    pub nic: Option<Vec<IpAddr>>,
    /// The speed of a network card that doesn't report it: its address and bits per
    /// second; may be repeated
    #[arg(long, value_name = "ADDR=RATE")]
    pub nic_speed: Option<Vec<NicSpeed>>,
    /// The file that names the other hosts
    #[arg(long, value_name = "FILE")]
    pub peers: Option<PathBuf>,
    /// Where the rack's directory is, in which its hosts look up each other's
    /// content: `auto` (in the agent of the rack's first host), `off`, `host:NAME`,
    /// `redis://HOST[:PORT],...`, or `redis+unix://PATH` [default: auto]
    #[arg(long, value_name = "WHERE")]
    pub directory: Option<DirectoryChoice>,
    /// Where the agent keeps its VMs' records and logs, and reports
    /// [default: /var/lib/droveway]
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Buffers of all migrations that leave, in MiB, and as much again for all that arrive
    /// [default: 128]
    #[arg(long, value_name = "MIB")]
    pub pool_mib: Option<u32>,
    /// The user that QEMU runs as [default: the agent's own]
    #[arg(long, value_name = "NAME")]
    pub qemu_user: Option<String>,
    /// A program that other hosts may have started here: its path, where a * in the
    /// last part stands for any characters; may be repeated [default: where
    /// distributions install QEMU]
    #[arg(long, value_name = "PATH")]
    pub qemu_programs: Option<Vec<String>>,
    /// A group whose members may use the API's socket; they can do all that the agent can
    /// [default: only the agent's user may]
    #[arg(long, value_name = "NAME")]
    pub api_group: Option<String>,
    /// Serve the API over TCP too, to people with certificates
    #[arg(long, value_name = "ADDR:PORT")]
    pub api_listen: Option<SocketAddr>,
    /// Serve metrics at http://ADDR:PORT/metrics to anyone who reaches it; the API's
    /// socket has them too
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics_listen: Option<SocketAddr>,
    /// Neither encrypt nor authenticate: guest memory crosses the network as it is,
    /// and anyone who reaches the port can start programs here
    #[arg(long)]
    pub insecure_plaintext: bool,
    /// How much of one CPU the scan of VMs' memory for common content may use while
    /// nothing else needs it; 0: no scan [default: 5%, or 0.75 % of all CPUs if less]
    #[arg(long, value_name = "PERCENT")]
    pub scan_cpu: Option<CpuShare>,
    /// The percentage of the CPU time that data threads of VMs that leave need which they get
    /// among other threads, at both hosts; beyond it they run on idle CPUs only. 100: always
    /// among others [default: 100]
    #[arg(long, value_name = "PERCENT")]
    pub cpu_floor: Option<CpuFloor>,
    /// The API's socket: a flag of all commands.
    #[arg(skip)]
    pub api: Option<PathBuf>,
    /// The directory with this host's certificate and key: a flag of all commands.
    #[arg(skip)]
    pub tls: Option<PathBuf>,

    // These are only in the file.
    #[arg(skip)]
    pub(crate) cgroups: Option<bool>,
    #[arg(skip)]
    pub(crate) sharing: Option<bool>,
    #[arg(skip)]
    pub(crate) directory_file: Option<PathBuf>,
    #[arg(skip)]
    pub(crate) coordinators: Option<Vec<String>>,
    #[arg(skip)]
    pub(crate) waits: engine::Waits,
    #[arg(skip)]
    pub(crate) carry: Option<carry::Section>,
    #[arg(skip)]
    pub(crate) webhook: Option<webhook::Section>,
    #[arg(skip)]
    pub(crate) xen: Option<xen::Section>,
}

/// Reads the file; relative paths in it start from its directory.
pub(super) fn read(path: &Path) -> Result<Settings, ConfigError> {
    let mut file: Settings = file::parse(path, &file::read(path)?)?;
    let here = path.parent().unwrap_or(Path::new(""));
    let Settings { peers, state, api, tls, directory_file, .. } = &mut file;
    let paths = [peers, state, api, tls, directory_file];
    for named in paths.into_iter().flatten() {
        *named = here.join(&*named);
    }
    if let Some(webhook) = &mut file.webhook {
        webhook.paths_from(here);
    }
    Ok(file)
}
