//! Agents that carry libvirt's migrations, and the configuration that leads libvirt to them.

use std::fs;

use super::QemuUser;
use crate::agent::Agent;
use crate::error::{FileContext, Result};
use crate::hosts::{Host, Hosts, RUN_DIR};

/// Number of ports for the VMs that move to each host.
const PORTS: u16 = 64;
/// The address at which QEMUs wait for VMs: of loopback, and the same on all hosts.
pub const WAITS_AT: &str = "127.6.0.1";
/// The first port that libvirt and agents use by default.
const FIRST_PORT: u16 = 49152;

/// A host's place in the peers file, from 1.
fn place(hosts: &Hosts, host: &Host) -> u16 {
    if host.name == hosts.a.name { 1 } else { 2 }
}

/// The lines of a host's `qemu.conf` that lead other hosts' libvirt to the agents on their own
/// hosts, as `droveway libvirt setup` writes them.
#[must_use]
pub fn leading_to_agents(hosts: &Hosts, host: &Host) -> String {
    let place = place(hosts, host);
    let first = FIRST_PORT + PORTS * (place - 1);
    format!(
        "migration_host = \"127.7.0.{place}\"\nmigration_address = \"{WAITS_AT}\"\n\
         migration_port_min = {first}\nmigration_port_max = {}\n",
        first + PORTS - 1
    )
}

/// Starts an agent that carries, with these additional arguments.
///
/// # Errors
/// As [`Agent::start`].
pub fn carrying_agent(hosts: &Hosts, host: &Host, more: &[&str]) -> Result<Agent> {
    start(hosts, host, &format!("qemu-user = \"{}\"", QemuUser::usual().name()), &[], more)
}

/// Capabilities that an agent next to virt-handler needs; `dist/kubevirt` gives it no others.
pub const KUBEVIRT_RIGHTS: [&str; 4] = ["SYS_PTRACE", "DAC_OVERRIDE", "CHOWN", "FOWNER"];

/// Starts an agent that carries VMs out of KubeVirt's pods, with no more rights than it has in a
/// cluster.
///
/// # Errors
/// As [`Agent::start`].
pub fn carrying_for_kubevirt(hosts: &Hosts, host: &Host) -> Result<Agent> {
    let rights = KUBEVIRT_RIGHTS.map(|right| format!(",+{}", right.to_lowercase())).concat();
    let bounding = format!("--bounding-set=-all{rights}");
    start(hosts, host, "manager = \"kubevirt\"", &["setpriv", &bounding, "--no-new-privs"], &[])
}

fn start(hosts: &Hosts, host: &Host, carry: &str, by: &[&str], more: &[&str]) -> Result<Agent> {
    let file = host.run_dir.join("agent.toml");
    fs::write(&file, format!("[carry]\n{carry}\n")).at("write", &file)?;
    let config = format!("{RUN_DIR}/agent.toml");
    let more = [&["--config", &config], more].concat();
    Agent::start_with(hosts, host, by, &more)
}
