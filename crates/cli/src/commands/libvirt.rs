//! `libvirt`: send libvirt's migrations to this host through its agent. It asks no agent.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};
use client::Problem;

use crate::libvirt::place::ClusterHost;
use crate::libvirt::qemu_conf::{self, Lines, Unchanged};
use crate::libvirt::{obstacles, write};
use crate::output::{eprint_line, print, print_line};

/// The socket of QEMU's daemon, if libvirt has one daemon per driver.
const MODULAR: &str = "/run/libvirt/virtqemud-sock";

#[derive(Debug, ClapArgs)]
pub(crate) struct LibvirtArgs {
    #[command(subcommand)]
    command: LibvirtCommand,
}

#[derive(Debug, Subcommand)]
enum LibvirtCommand {
    /// Write the lines of qemu.conf that send migrations to this host through its agent
    Setup(SetupArgs),
}

#[derive(Debug, ClapArgs)]
struct SetupArgs {
    /// Remove these lines again
    #[arg(long, conflicts_with_all = ["print", "fallback"])]
    undo: bool,
    /// Print the lines, and write nothing
    #[arg(long, conflicts_with = "fallback")]
    print: bool,
    /// Print how to migrate to this host without agents, in case one can't run
    #[arg(long)]
    fallback: bool,
    /// The agent's file, which names this host
    #[arg(long, value_name = "FILE", default_value = "/etc/droveway/agent.toml")]
    config: PathBuf,
    /// The file of libvirt's QEMU driver
    #[arg(long, value_name = "FILE", default_value = "/etc/libvirt/qemu.conf")]
    qemu_conf: PathBuf,
}

pub(crate) fn run(args: &LibvirtArgs) -> Result<ExitCode, Problem> {
    let LibvirtCommand::Setup(args) = &args.command;
    if args.undo {
        return undo(&args.qemu_conf);
    }
    let place = ClusterHost::read(&args.config)?;
    let lines = Lines { host: place.loopback, address: place.address, ports: place.ports.clone() };
    if args.print {
        print(format_args!("{}", lines.block()))?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.fallback {
        print(format_args!("{}", fallback(&place.name, place.network)))?;
        return Ok(ExitCode::SUCCESS);
    }
    setup(&args.qemu_conf, &place, &lines)
}

fn setup(path: &Path, place: &ClusterHost, lines: &Lines) -> Result<ExitCode, Problem> {
    let old = write::read(path)?;
    let new = lines.put_into(&old).map_err(|error| refused(path, &error))?;
    if new == old {
        let (path, name) = (path.display(), &place.name);
        print_line(format_args!("{path} sends migrations to {name} through its agent already."))?;
    } else {
        replace(path, &new)?;
        print_line(format_args!("Written to {}:\n\n{}", path.display(), indented(&lines.block())))?;
        print_line(format_args!("Next, on this host: {}", restart()))?;
        print_line(format_args!("On the other hosts the same command, then `droveway doctor`."))?;
    }
    let obstacles = obstacles::find(&new, lines, &place.peer_ports, place.carries);
    for obstacle in &obstacles {
        eprint_line(format_args!("droveway: {obstacle}"));
    }
    Ok(if obstacles.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn undo(path: &Path) -> Result<ExitCode, Problem> {
    let old = write::read(path)?;
    let new = qemu_conf::take_out(&old).map_err(|error| refused(path, &error))?;
    if new == old {
        print_line(format_args!("{} has no lines of Droveway.", path.display()))?;
    } else {
        replace(path, &new)?;
        print_line(format_args!("{} is as it was without Droveway.", path.display()))?;
        print_line(format_args!("Next, on this host: {}", restart()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The command to restart libvirt, which does not affect running VMs.
fn restart() -> &'static str {
    if Path::new(MODULAR).exists() {
        "systemctl restart virtqemud   (VMs run on)"
    } else {
        "systemctl restart libvirtd   (VMs run on)"
    }
}

fn fallback(name: &str, address: IpAddr) -> String {
    let at = match address {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    };
    format!(
        "If an agent at either end doesn't run, libvirt's migrations to {name} fail before \
         they\nstart, and the VM keeps running. To move one without agents, name this host's own \
         address:\n\n  virsh migrate --live DOMAIN --desturi DESTINATION \\\n      --migrateuri \
         tcp://{at} --listen-address {address}\n\nWith --copy-storage-all its disks follow. For \
         all migrations, remove the lines on this\nhost, and restore them later:\n\n  droveway \
         libvirt setup --undo && {restart}\n  droveway libvirt setup && {restart}\n",
        restart = restart().split("   ").next().unwrap_or_default(),
    )
}

fn replace(path: &Path, text: &str) -> Result<(), Problem> {
    let writing = |source| Problem::Local { what: format!("writing {}", path.display()), source };
    write::replace(path, text).map_err(writing)
}

fn refused(path: &Path, error: &Unchanged) -> Problem {
    Problem::Typed(format!("{} is left as it is: {error}", path.display()))
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fallback_names_the_hosts_own_address() {
        let said = fallback("host-b", [10, 0, 0, 2].into());
        let options = " --migrateuri tcp://10.0.0.2 --listen-address 10.0.0.2\n";
        assert!(said.contains(options), "{said}");
        let said = fallback("host-b", "fd00::2".parse().unwrap());
        let options = " --migrateuri tcp://[fd00::2] --listen-address fd00::2\n";
        assert!(said.contains(options), "{said}");
    }
}
