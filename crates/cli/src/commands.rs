//! The command line and its commands, each with its arguments next to the code that runs it.

pub(crate) mod agent;
pub(crate) mod agents;
pub(crate) mod attach;
pub(crate) mod ca;
pub(crate) mod cancel;
pub(crate) mod completions;
pub(crate) mod dashboard;
pub(crate) mod doctor;
pub(crate) mod evacuate;
pub(crate) mod events;
pub(crate) mod gang;
pub(crate) mod init;
pub(crate) mod libvirt;
pub(crate) mod list;
pub(crate) mod migrate;
pub(crate) mod predict;
pub(crate) mod report;
pub(crate) mod resolve;
pub(crate) mod run;
pub(crate) mod set;
pub(crate) mod show;
pub(crate) mod stop;
pub(crate) mod support_bundle;
pub(crate) mod top;
pub(crate) mod upgrade;
pub(crate) mod xen;
pub(crate) mod xen_send;

use std::path::PathBuf;
use std::process::ExitCode;

use ::agent::config::Settings;
use clap::{Parser, Subcommand};
use client::{Client, Problem};

use self::attach::AttachArgs;
use self::ca::CaArgs;
use self::cancel::CancelArgs;
use self::completions::{CompletionsArgs, ManArgs};
use self::dashboard::DashboardArgs;
use self::doctor::DoctorArgs;
use self::evacuate::EvacuateArgs;
use self::events::EventsArgs;
use self::gang::GangArgs;
use self::init::InitArgs;
use self::libvirt::LibvirtArgs;
use self::list::ListArgs;
use self::migrate::MigrateArgs;
use self::predict::PredictArgs;
use self::report::ReportArgs;
use self::resolve::ResolveArgs;
use self::run::RunArgs;
use self::set::SetArgs;
use self::show::ShowArgs;
use self::stop::StopArgs;
use self::support_bundle::SupportBundleArgs;
use self::top::TopArgs;
use self::upgrade::UpgradeArgs;
use self::xen::XenArgs;
use self::xen_send::XenSendArgs;

/// Exit codes, in the help and on man pages.
const CODES: &str = "Exit codes:
  0    done
  1    not done: the reason is on standard error
  2    the command line is wrong
  130  ended by a second Ctrl-C
See also the help of migrate, gang, evacuate, upgrade, stop and doctor.";
const CODES_OF_MIGRATE: &str = "Exit codes:
  0    the VM is at the destination
  1    it is not known to be there, and the output shows why: check `droveway list`
       on both hosts before you start it anywhere
  2    the command line is wrong
  130  ended by a second Ctrl-C: the output shows what becomes of the move";
const CODES_OF_GANG: &str = "Exit codes:
  0    all VMs of the plan have moved, or a plan or list was shown; VMs that were left
       out, each with a note, don't count
  1    some are not known to have moved: the output shows which, and why
  2    the command line is wrong
  130  ended by a second Ctrl-C: the output shows what becomes of the moves";
const CODES_OF_UPGRADE: &str = "Exit codes:
  0    all VMs have it, or had it before; or plans were shown
  1    some are not known to have it: the output shows which, and why
  2    the command line is wrong
  130  ended by a second Ctrl-C: VMs whose move has started may still get it";
const CODES_OF_STOP: &str = "Exit codes:
  0    the VM is off
  1    it is not known to be off: the reason is on standard error
  2    the command line is wrong
  130  ended by a second Ctrl-C or by SIGTERM: the VM is stopped anyway";
const CODES_OF_DOCTOR: &str = "Exit codes:
  0    no error was found
  1    an error was found, or the agent can't be queried
  2    the command line is wrong";

/// Moves running virtual machines between hosts.
#[derive(Debug, Parser)]
#[command(name = "droveway", version, max_term_width = 100, after_help = CODES)]
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

#[allow(clippy::large_enum_variant, reason = "there is one")]
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run this host's agent
    Agent(Settings),
    /// Set up a cluster of two or more hosts, or add hosts to it
    Init(InitArgs),
    #[command(flatten)]
    Request(Request),
    /// Serve pages for a browser on this machine: hosts, VMs, migrations, evacuations
    Dashboard(DashboardArgs),
    /// Show hosts, VMs and migrations in this terminal, as they change
    Top(TopArgs),
    /// Issue certificates for hosts, and for people who use the API
    Ca(CaArgs),
    /// Send libvirt's migrations to this host through its agent
    Libvirt(LibvirtArgs),
    /// Show how domains of Xen migrate through the agents
    Xen(XenArgs),
    /// Send the domain that `xl migrate` writes to standard input: its transport
    XenSend(XenSendArgs),
    /// Print a shell's completion script
    Completions(CompletionsArgs),
    /// Write man pages into a directory
    #[command(hide = true)]
    Man(ManArgs),
}

/// A command that is a request to an agent.
#[derive(Debug, Subcommand)]
pub(crate) enum Request {
    /// Start a VM under this host's agent
    Run(RunArgs),
    /// List this host's VMs
    List(ListArgs),
    /// Show one VM
    Show(ShowArgs),
    /// Shut a VM down
    #[command(after_help = CODES_OF_STOP)]
    Stop(StopArgs),
    /// Adopt a VM that was started outside of the agent
    Attach(AttachArgs),
    /// Move a VM to another host while it runs
    #[command(after_help = CODES_OF_MIGRATE)]
    Migrate(MigrateArgs),
    /// Move several VMs as one operation, or list such operations
    #[command(after_help = CODES_OF_GANG)]
    Gang(GangArgs),
    /// Move all VMs of a host to others, by their content and free memory
    #[command(after_help = CODES_OF_GANG)]
    Evacuate(EvacuateArgs),
    /// Watch a VM for a few seconds, and predict what moving it would take
    Predict(PredictArgs),
    /// Give VMs another QEMU on this host while they run, as after an upgrade of its package
    #[command(after_help = CODES_OF_UPGRADE)]
    Upgrade(UpgradeArgs),
    /// Change a migration's limits while it runs
    Set(SetArgs),
    /// Cancel a migration, or a gang; VMs that have not moved stay where they are
    Cancel(CancelArgs),
    /// Decide which host a VM in doubt belongs to
    Resolve(ResolveArgs),
    /// Follow what happens at this host: migrations, arrivals, gangs, VMs in doubt
    Events(EventsArgs),
    /// Show how a migration, or a gang, went
    Report(ReportArgs),
    /// Check this host, or whether its VMs can move to another host
    #[command(after_help = CODES_OF_DOCTOR)]
    Doctor(DoctorArgs),
    /// Write what a bug report about a migration needs into one file
    SupportBundle(SupportBundleArgs),
}

impl Request {
    pub(crate) async fn run(self, client: &Client) -> Result<ExitCode, Problem> {
        match self {
            Self::Run(args) => run::run(client, args).await,
            Self::List(args) => list::run(client, &args).await,
            Self::Show(args) => show::run(client, &args).await,
            Self::Stop(args) => stop::run(client, &args).await,
            Self::Attach(args) => attach::run(client, args).await,
            Self::Migrate(args) => migrate::run(client, args).await,
            Self::Gang(args) => gang::run(client, args).await,
            Self::Evacuate(args) => evacuate::run(client, args).await,
            Self::Predict(args) => predict::run(client, args).await,
            Self::Upgrade(args) => upgrade::run(client, args).await,
            Self::Set(args) => set::run(client, args).await,
            Self::Cancel(args) => cancel::run(client, &args).await,
            Self::Resolve(args) => resolve::run(client, &args).await,
            Self::Report(args) => report::run(client, &args).await,
            Self::Events(args) => events::run(client, &args).await,
            Self::Doctor(args) => doctor::run(client, &args).await,
            Self::SupportBundle(args) => support_bundle::run(client, &args).await,
        }
    }
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
    fn invalid_commands_are_refused() {
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
            ("gang --resume g1 --dry-run", ErrorKind::ArgumentConflict),
            ("gang --resume g1 --parallel 3", ErrorKind::ArgumentConflict),
            ("gang --resume g1 --atomic", ErrorKind::ArgumentConflict),
            ("gang --resume g1 --limit 1G", ErrorKind::ArgumentConflict),
            ("gang --downtime-ms 100 --resume g1", ErrorKind::ArgumentConflict),
            ("upgrade", ErrorKind::MissingRequiredArgument),
            ("upgrade web1 --all", ErrorKind::ArgumentConflict),
            ("upgrade web1 --parallel 0", ErrorKind::ValueValidation),
            ("evacuate", ErrorKind::MissingRequiredArgument),
            ("evacuate a --set x=y", ErrorKind::UnknownArgument),
            ("set 1", ErrorKind::MissingRequiredArgument),
            ("set 1 --limit 0", ErrorKind::ValueValidation),
            ("agent --nic-speed 10.0.0.1", ErrorKind::ValueValidation),
            ("agent --scan-cpu 5", ErrorKind::ValueValidation),
            ("report 1 --json --html f", ErrorKind::ArgumentConflict),
            ("stop web1 --timeout 3601", ErrorKind::ValueValidation),
            ("resolve web1", ErrorKind::MissingRequiredArgument),
            ("resolve web1 --here --there", ErrorKind::ArgumentConflict),
            ("agent --listen here", ErrorKind::ValueValidation),
            ("ca", ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand),
            ("ca issue", ErrorKind::MissingRequiredArgument),
            ("ca issue a --role root", ErrorKind::ValueValidation),
            ("ca init --days 0", ErrorKind::ValueValidation),
            ("init host-a", ErrorKind::ValueValidation),
            ("init host-a=", ErrorKind::ValueValidation),
            ("init ../a=10.0.0.1", ErrorKind::ValueValidation),
            ("init a=b.example.org", ErrorKind::ValueValidation),
            ("init a=10.0.0.1 --from a.tar", ErrorKind::ArgumentConflict),
            ("init a=10.0.0.1 --root /mnt", ErrorKind::ArgumentConflict),
            ("init --root /mnt", ErrorKind::MissingRequiredArgument),
            ("libvirt", ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand),
            ("dashboard --listen 0.0.0.0:7880", ErrorKind::ValueValidation),
            ("dashboard --listen 7880", ErrorKind::ValueValidation),
            ("libvirt setup --undo --print", ErrorKind::ArgumentConflict),
            ("xen", ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand),
            ("xen-send", ErrorKind::MissingRequiredArgument),
            ("xen-send b --limit fast", ErrorKind::ValueValidation),
        ] {
            assert_eq!(parse(line).err(), Some(kind), "{line}");
        }
    }

    #[test]
    fn the_help_has_exit_codes() {
        let mut whole = Args::command();
        assert!(whole.render_long_help().to_string().contains("130  ended by a second Ctrl-C"));
        for (name, says) in [
            ("migrate", "0    the VM is at the destination"),
            ("gang", "left\n       out, each with a note"),
            ("evacuate", "0    all VMs of the plan have moved"),
            ("upgrade", "0    all VMs have it"),
            ("stop", "or by SIGTERM"),
            ("doctor", "1    an error was found"),
        ] {
            let command = whole.find_subcommand_mut(name).unwrap();
            for help in [command.render_help(), command.render_long_help()] {
                assert!(help.to_string().contains(says), "{help}");
            }
        }
    }

    #[test]
    fn qemus_own_arguments_are_kept() {
        let args = parse("run web1 -- qemu-system-x86_64 -m 512 --help -name x").unwrap();
        let Command::Request(Request::Run(run)) = args.command else { panic!("not run") };
        assert_eq!(run.name, "web1");
        assert_eq!(run.argv, ["qemu-system-x86_64", "-m", "512", "--help", "-name", "x"]);
    }

    #[test]
    fn a_migration_is_asked_for_as_typed() {
        let args = parse(
            "migrate web1 host-b --lanes 4 --downtime-ms 50 --compress zstd --tap classic \
             --set /a=/b --set c=d=e --shared-disks --limit 200M --reserve-min 50M --priority high \
             --cpu-floor 20 --cpus 0,1 --api /s",
        )
        .unwrap();
        assert_eq!(args.api, Some("/s".into()));
        let Command::Request(Request::Migrate(migrate)) = args.command else {
            panic!("not migrate")
        };
        let request = migrate.into_request().unwrap();
        assert_eq!((request.vm.as_str(), request.to.as_str()), ("web1", "host-b"));
        assert_eq!((request.lanes, request.downtime_ms), (Some(4), 50));
        assert_eq!(request.compress, api::Compress::Zstd);
        assert_eq!(request.tap, api::TapChoice::Classic);
        assert_eq!(request.set, ["/a=/b", "c=d=e"]);
        assert!(request.shared_disks);
        let bounds = api::Bounds {
            limit_bits_per_s: Some("200M".parse().unwrap()),
            reserve_bits_per_s: None,
            reserve_min_bits_per_s: Some("50M".parse().unwrap()),
            priority: api::Priority::High,
            cpu_floor: "20".parse().ok(),
            cpus: Some("0-1".parse().unwrap()),
        };
        assert_eq!(request.bounds, bounds);
    }

    #[test]
    fn the_defaults_are_the_apis() {
        let Command::Request(Request::Migrate(migrate)) = parse("migrate v b").unwrap().command
        else {
            panic!("not migrate")
        };
        let ours = serde_json::to_value(migrate.into_request().unwrap()).unwrap();
        let theirs: api::MigrateRequest = serde_json::from_str(r#"{"vm":"v","to":"b"}"#).unwrap();
        assert_eq!(ours, serde_json::to_value(theirs).unwrap());
    }
}
