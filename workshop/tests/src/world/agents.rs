//! The agents of both hosts, which a test starts, kills and restarts.

use std::fs::{self, DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use lab::agent::{Agent, peers};
use lab::hosts::{Host, RUN_DIR};
use lab::setup;

use super::{Side, World};

/// The agent's file, as the package has it.
const PACKAGES_FILE: &str = "/etc/droveway/agent.toml";

/// These arguments, and a slower scan of VMs at rest than the usual one, unless they or a file
/// choose it: few tests need what it finds, and it takes up to a twentieth of a core for each agent.
pub(super) fn scanning_slowly<'a>(args: &[&'a str]) -> Vec<&'a str> {
    let is_chosen = ["--scan-cpu", "--config"].iter().any(|option| args.contains(option));
    let scan: &[&'a str] = if is_chosen { &[] } else { &["--scan-cpu", "1%"] };
    [args, scan].concat()
}

/// Makes a host's state directory with what the kit's QEMU can do, which its agent would query
/// otherwise.
pub(crate) fn know_qemu(host: &Host) {
    let state = host.run_dir.join("state");
    DirBuilder::new().mode(0o700).create(&state).unwrap();
    let answers = setup::qemu_answers();
    if let Some(name) = answers.file_name() {
        // There are none if no suite runs this test.
        let _ = fs::copy(&answers, state.join(name));
    }
}

impl World {
    /// Restarts both agents, with these arguments instead of their usual ones.
    ///
    /// # Panics
    /// If an agent doesn't start.
    pub fn restart_agents_with(&mut self, more: &[&str]) {
        for side in [Side::A, Side::B] {
            self.restart_agent_with(side, more);
        }
    }

    /// Restarts an agent, with these arguments instead of its usual ones.
    ///
    /// # Panics
    /// If it doesn't start.
    pub fn restart_agent_with(&mut self, side: Side, more: &[&str]) {
        self.kill_agent(side);
        let more = scanning_slowly(more);
        let agent = Agent::start_with(&self.hosts, self.host(side), &[], &more).unwrap();
        self.agents[side as usize] = agent;
    }

    /// Replaces a host's agent by this `droveway`, until it is restarted otherwise.
    ///
    /// # Panics
    /// If it doesn't start.
    pub fn replace_agent(&mut self, side: Side, binary: &Path) {
        self.kill_agent(side);
        let peers = peers(&self.hosts);
        let host = (side.name(), self.host(side), peers.as_str());
        let agent = Agent::start_program(binary.to_owned(), host, &[], &[]).unwrap();
        self.agents[side as usize] = agent;
    }

    /// From now on, agents are started by a program that executes them, such as `env`.
    pub fn start_agents_by(&mut self, by: &[&str]) {
        self.by = by.iter().map(|word| (*word).to_owned()).collect();
    }

    /// Sets the usual arguments of agents. If these differ from the former ones, both agents
    /// restart.
    pub fn tell_agents(&mut self, usual: Vec<String>) {
        if self.usual == usual {
            return;
        }
        self.usual = usual;
        for side in [Side::A, Side::B] {
            self.kill_agent(side);
            self.start_agent(side);
        }
    }

    /// Adds to the usual arguments of agents.
    pub fn tell_agents_also(&mut self, more: &[&str]) {
        let more = more.iter().map(|word| (*word).to_owned());
        self.tell_agents(self.usual.iter().cloned().chain(more).collect());
    }

    /// Adds lines to the files of agents that their package's unit runs, and restarts them.
    ///
    /// # Panics
    /// If an agent doesn't start.
    pub(crate) fn add_to_files(&mut self, lines: &str) {
        for side in [Side::A, Side::B] {
            let host = side.of(&self.hosts);
            let file = File::options().append(true).open(host.path(PACKAGES_FILE));
            file.unwrap().write_all(lines.as_bytes()).unwrap();
            self.agents[side as usize].restart(host).unwrap();
        }
    }

    /// Puts both hosts into one rack from now on.
    ///
    /// # Panics
    /// If an agent doesn't start.
    pub fn share_a_rack(&mut self) {
        let peers = peers(&self.hosts).replace("nics =", "rack = \"r1\"\nnics =");
        for side in [Side::A, Side::B] {
            fs::write(self.host(side).run_dir.join("rack.toml"), &peers).unwrap();
        }
        let peers = format!("{RUN_DIR}/rack.toml");
        self.tell_agents_also(&["--peers", &peers, "--rack", "r1"]);
    }

    /// Whether an agent has ended by itself.
    pub fn has_ended(&mut self, side: Side) -> bool {
        self.agents[side as usize].has_ended()
    }

    /// A host.
    #[must_use]
    pub fn host(&self, side: Side) -> &Host {
        side.of(&self.hosts)
    }

    /// A host's agent.
    #[must_use]
    pub fn agent(&self, side: Side) -> &Agent {
        &self.agents[side as usize]
    }

    /// Kills an agent, as a crash would.
    pub fn kill_agent(&mut self, side: Side) {
        self.agents[side as usize].kill();
    }

    /// Restarts a killed agent.
    ///
    /// # Panics
    /// If it doesn't start.
    pub fn start_agent(&mut self, side: Side) {
        let by = self.by.clone();
        self.start_agent_by(side, &by.iter().map(String::as_str).collect::<Vec<_>>());
    }

    /// The same, by a program that executes it, such as `setpriv`.
    ///
    /// # Panics
    /// If it doesn't start.
    pub fn start_agent_by(&mut self, side: Side, by: &[&str]) {
        let usual: Vec<&str> = self.usual.iter().map(String::as_str).collect();
        let usual = scanning_slowly(&usual);
        let agent = Agent::start_with(&self.hosts, self.host(side), by, &usual).unwrap();
        self.agents[side as usize] = agent;
    }
}
