//! What can be typed.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use agent::config::{CpuShare, DirectoryChoice, Flags, NicSpeed};
use clap::{Args as ClapArgs, Parser, Subcommand};

use crate::ca::CaArgs;
use crate::commands::cancel::CancelArgs;
use crate::commands::migrate::MigrateArgs;
use crate::commands::report::ReportArgs;
use crate::commands::set::SetArgs;
use crate::gang::{EvacuateArgs, GangArgs};
use crate::predict::PredictArgs;
use crate::resolve::ResolveArgs;

/// Moves running virtual machines between hosts.
#[derive(Debug, Parser)]
#[command(name = "droveway", version, about, max_term_width = 100)]
pub(crate) struct Args {
    /// The agent's socket [default: /run/droveway/api.sock], or the API of a host
    /// over TCP: https://HOST:PORT, with --tls
    #[arg(long, value_name = "SOCKET", env = "DROVEWAY_API", global = true)]
    pub(crate) api: Option<PathBuf>,
    /// The directory of a certificate and its key, as `droveway ca issue` wrote it:
    /// for `agent` the host's [default: /etc/droveway/tls, if it exists], for other
    /// commands yours, to use an agent over https
    #[arg(long, value_name = "DIR", env = "DROVEWAY_TLS", global = true)]
    pub(crate) tls: Option<PathBuf>,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run this host's agent
    Agent(AgentArgs),
    /// Start a VM under this host's agent
    Run(RunArgs),
    /// List this host's VMs
    List(ListArgs),
    /// Show one VM
    Show(ShowArgs),
    /// Shut a VM down
    Stop(StopArgs),
    /// Adopt a VM that was started outside of the agent
    Attach(AttachArgs),
    /// Move a VM to another host while it runs
    Migrate(MigrateArgs),
    /// Move several VMs as one operation, or list such operations
    Gang(GangArgs),
    /// Move all VMs of a host to others, by free memory
    Evacuate(EvacuateArgs),
    /// Watch a VM for a few seconds, and predict what moving it would take
    Predict(PredictArgs),
    /// Change a migration's limits while it runs
    Set(SetArgs),
    /// Cancel a migration, or a gang; VMs that have not moved stay where they are
    Cancel(CancelArgs),
    /// Decide which host a VM in doubt belongs to
    Resolve(ResolveArgs),
    /// Show how a migration, or a gang, went
    Report(ReportArgs),
    /// Check this host, or whether its VMs can move to another host
    Doctor(DoctorArgs),
    /// Issue certificates for hosts, and for people who use the API
    Ca(CaArgs),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct AgentArgs {
    /// A TOML file with any of these settings; flags win over it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// This host's name, as in the peers file
    #[arg(long)]
    name: Option<String>,
    /// The rack that this host is in
    #[arg(long)]
    rack: Option<String>,
    /// Where other agents reach this one
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
    /// The address of a network card that carries data; may be repeated
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
    /// Buffers for all migrations in one direction, in MiB [default: 128]
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
    /// Serve the API over TCP too, to people with certificates
    #[arg(long, value_name = "ADDR:PORT")]
    api_listen: Option<SocketAddr>,
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
    pub(crate) fn into_flags(self, api: Option<PathBuf>, tls: Option<PathBuf>) -> Flags {
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
            api_listen: self.api_listen,
            pool_mib: self.pool_mib,
            qemu_user: self.qemu_user,
            qemu_programs: self.qemu_programs,
            tls,
            insecure_plaintext: self.insecure_plaintext,
            scan_cpu: self.scan_cpu,
        }
    }
}

#[derive(Debug, ClapArgs)]
pub(crate) struct RunArgs {
    /// The VM's name
    pub(crate) name: String,
    /// Its sharing domain. VMs of one domain share content when they move, so how
    /// long a move takes can tell that another VM has the same; VMs of different
    /// domains share nothing [default: the cluster's own domain]
    #[arg(long, value_name = "LABEL", default_value = "", hide_default_value = true)]
    pub(crate) share_domain: String,
    /// Don't add the port for the guest helper
    #[arg(long)]
    pub(crate) no_guest_port: bool,
    /// QEMU and its arguments
    #[arg(last = true, required = true, value_name = "QEMU ARGS")]
    pub(crate) argv: Vec<OsString>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ListArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ShowArgs {
    /// The VM
    pub(crate) name: String,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct StopArgs {
    /// The VM
    pub(crate) name: String,
    /// Pull the plug at once instead of pressing the power button
    #[arg(long)]
    pub(crate) force: bool,
    /// How long the guest may take to shut down before the plug is pulled, in
    /// seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(crate) timeout: u64,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct AttachArgs {
    /// The name it gets here
    pub(crate) name: String,
    /// Its QMP socket
    #[arg(long, value_name = "SOCKET")]
    pub(crate) qmp: PathBuf,
    /// Its sharing domain. VMs of one domain share content when they move, so how
    /// long a move takes can tell that another VM has the same; VMs of different
    /// domains share nothing [default: the cluster's own domain]
    #[arg(long, value_name = "LABEL", default_value = "", hide_default_value = true)]
    pub(crate) share_domain: String,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct DoctorArgs {
    /// The other host
    pub(crate) host: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    fn parse(line: &str) -> Result<Args, ErrorKind> {
        let words = std::iter::once("droveway").chain(line.split_whitespace());
        Args::try_parse_from(words).map_err(|error| error.kind())
    }

    #[test]
    fn the_command_is_well_formed() {
        Args::command().debug_assert();
    }

    #[test]
    fn what_is_wrong_is_refused() {
        for (line, kind) in [
            ("", ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand),
            ("fly web1", ErrorKind::InvalidSubcommand),
            ("run web1", ErrorKind::MissingRequiredArgument),
            ("run web1 qemu-system-x86_64", ErrorKind::UnknownArgument),
            ("attach web1", ErrorKind::MissingRequiredArgument),
            ("migrate web1", ErrorKind::MissingRequiredArgument),
            ("migrate web1 b --lanes 0", ErrorKind::ValueValidation),
            ("migrate web1 b --lanes 65", ErrorKind::ValueValidation),
            ("migrate web1 b --downtime-ms 0", ErrorKind::ValueValidation),
            ("migrate web1 b --compress brotli", ErrorKind::InvalidValue),
            ("migrate web1 b --set /dev/sdb", ErrorKind::ValueValidation),
            ("migrate web1 b --set =x", ErrorKind::ValueValidation),
            ("migrate web1 b --limit fast", ErrorKind::ValueValidation),
            ("migrate web1 b --cpus 3-1", ErrorKind::ValueValidation),
            ("migrate web1 b --timeout 0", ErrorKind::ValueValidation),
            ("gang web1", ErrorKind::ValueValidation),
            ("gang web1=", ErrorKind::ValueValidation),
            ("gang /web1=host-b", ErrorKind::ValueValidation),
            ("gang a=b --parallel 0", ErrorKind::ValueValidation),
            ("gang a=b --file plan.toml", ErrorKind::ArgumentConflict),
            ("gang --resume g1 --file plan.toml", ErrorKind::ArgumentConflict),
            ("evacuate", ErrorKind::MissingRequiredArgument),
            ("evacuate a --set x=y", ErrorKind::UnknownArgument),
            ("set 1", ErrorKind::MissingRequiredArgument),
            ("set 1 --limit 0", ErrorKind::ValueValidation),
            ("agent --nic-speed 10.0.0.1", ErrorKind::ValueValidation),
            ("agent --scan-cpu 5", ErrorKind::ValueValidation),
            ("report 1 --json --html f", ErrorKind::ArgumentConflict),
            ("resolve web1", ErrorKind::MissingRequiredArgument),
            ("resolve web1 --here --there", ErrorKind::ArgumentConflict),
            ("agent --listen here", ErrorKind::ValueValidation),
            ("ca", ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand),
            ("ca issue", ErrorKind::MissingRequiredArgument),
            ("ca issue a --role root", ErrorKind::ValueValidation),
            ("ca init --days 0", ErrorKind::ValueValidation),
        ] {
            assert_eq!(parse(line).err(), Some(kind), "{line}");
        }
    }

    #[test]
    fn qemus_own_arguments_are_kept() {
        let args = parse("run web1 -- qemu-system-x86_64 -m 512 --help -name x").unwrap();
        let Command::Run(run) = args.command else { panic!("not run") };
        assert_eq!(run.name, "web1");
        assert_eq!(run.argv, ["qemu-system-x86_64", "-m", "512", "--help", "-name", "x"]);
    }

    #[test]
    fn a_migration_is_asked_for_as_typed() {
        let args = parse(
            "migrate web1 host-b --lanes 4 --downtime-ms 50 --compress zstd --tap classic \
             --set /a=/b --set c=d=e --shared-disks --limit 200M --priority high --cpus 0,1 \
             --api /s",
        )
        .unwrap();
        assert_eq!(args.api, Some("/s".into()));
        let Command::Migrate(migrate) = args.command else { panic!("not migrate") };
        let request = migrate.into_request();
        assert_eq!((request.vm.as_str(), request.to.as_str()), ("web1", "host-b"));
        assert_eq!((request.lanes, request.downtime_ms), (Some(4), 50));
        assert_eq!(request.compress, api::Compress::Zstd);
        assert_eq!(request.tap, api::TapChoice::Classic);
        assert_eq!(request.set, ["/a=/b", "c=d=e"]);
        assert!(request.shared_disks);
        let bounds = api::Bounds {
            limit_bits_per_s: Some("200M".parse().unwrap()),
            reserve_bits_per_s: None,
            priority: api::Priority::High,
            cpus: Some("0-1".parse().unwrap()),
        };
        assert_eq!(request.bounds, bounds);
    }

    #[test]
    fn the_defaults_are_the_apis() {
        let Command::Migrate(migrate) = parse("migrate v b").unwrap().command else {
            panic!("not migrate")
        };
        let ours = serde_json::to_value(migrate.into_request()).unwrap();
        let theirs: api::MigrateRequest = serde_json::from_str(r#"{"vm":"v","to":"b"}"#).unwrap();
        assert_eq!(ours, serde_json::to_value(theirs).unwrap());
    }
}
