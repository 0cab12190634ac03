//! `xen`: how domains of Xen go through the agents. It connects to no agent.

use std::path::PathBuf;
use std::process::ExitCode;

use agent::config::{Config, Settings};
use clap::{Args as ClapArgs, Subcommand};
use client::Problem;

use crate::output::print;

#[derive(Debug, ClapArgs)]
pub(crate) struct XenArgs {
    #[command(subcommand)]
    command: XenCommand,
}

#[derive(Debug, Subcommand)]
enum XenCommand {
    /// Print the lines of the agent's file, and the commands that migrate domains
    Setup(SetupArgs),
}

#[derive(Debug, ClapArgs)]
struct SetupArgs {
    /// The agent's file
    #[arg(long, value_name = "FILE", default_value = "/etc/droveway/agent.toml")]
    config: PathBuf,
}

pub(crate) fn run(args: XenArgs) -> Result<ExitCode, Problem> {
    let XenCommand::Setup(SetupArgs { config: file }) = args.command;
    let mut settings = Settings::default();
    settings.config = Some(file.clone());
    let config = Config::new(settings)?;
    let hosts: Vec<&str> = config.peers.iter().map(|peer| peer.name.as_str()).collect();
    let is_set_up = config.xen.is_some();
    print(format_args!("{}", lines(&file.display().to_string(), &hosts, is_set_up)))?;
    Ok(ExitCode::SUCCESS)
}

fn lines(file: &str, hosts: &[&str], is_set_up: bool) -> String {
    let quoted: Vec<String> = hosts.iter().map(|host| format!("\"{host}\"")).collect();
    let there = hosts.first().copied().unwrap_or("HOST");
    let first = if is_set_up {
        format!("{file} has [xen] already.\n")
    } else {
        format!(
            "In {file}, with the hosts whose domains may arrive here. Each is trusted as\nroot, \
             because a domain's configuration names disks, kernels and scripts of this host:\n\n  \
             [xen]\n  accept-from = [{}]\n\nThen restart the agent, and do the same on the other \
             hosts.\n",
            quoted.join(", ")
        )
    };
    format!(
        "{first}\nTo migrate a domain:\n\n  xl migrate -s '' DOMAIN 'exec droveway xen-send \
         {there}'\n\nOr with this function in root's shell, as `xl-migrate DOMAIN {there}`:\n\n  \
         xl-migrate() {{ xl migrate -s '' \"$1\" \"exec droveway xen-send $2\"; }}\n\nTo watch it, \
         or to cancel it: droveway list --migrations, droveway cancel ID\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_name_the_other_hosts() {
        let text = lines("/etc/droveway/agent.toml", &["host-b", "host-c"], false);
        assert!(text.contains("\n  accept-from = [\"host-b\", \"host-c\"]\n"), "{text}");
        let command = "\n  xl migrate -s '' DOMAIN 'exec droveway xen-send host-b'\n";
        assert!(text.contains(command), "{text}");
        assert!(text.contains("\n  xl-migrate() { xl migrate -s '' \"$1\" "), "{text}");
        let again = lines("agent.toml", &[], true);
        assert!(!again.contains("accept-from") && again.contains("xen-send HOST'"), "{again}");
    }
}
