//! A rack that VMs leave, and one to which they move, with an agent on each host.

use std::os::unix::net::UnixStream;

use api::{Outcome, Report};
use lab::agent::{Agent, agents_with};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Layout, RackHost, Racks};
use lab::setup::{self, Kit};

use crate::browser::ask;
use crate::moving::{Moving, complete};
use crate::world::{assert_arrived, know_qemu};

/// Two hosts that VMs leave, and any number of hosts to which they move.
pub struct RackWorld {
    agents: Vec<Agent>,
    kit: Kit,
    /// The hosts.
    pub racks: Racks,
}

impl RackWorld {
    /// Makes the hosts and their agents.
    ///
    /// # Panics
    /// If that fails; all functions of this file panic on failure.
    #[must_use]
    pub fn new(target_hosts: usize) -> Self {
        Self::with(target_hosts, |_| (String::new(), Vec::new()))
    }

    /// The same with more entries in the peers file, and more arguments for agents in the target
    /// rack.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn with(target_hosts: usize, more: impl FnOnce(&Racks) -> (String, Vec<String>)) -> Self {
        let kit = setup::ensure().unwrap();
        let layout = Layout {
            source_racks: 1,
            source_hosts: 2,
            target_hosts,
            edge_mbit_per_s: 400,
            core_mbit_per_s: 800,
            bystanders: false,
        };
        let racks = Racks::new(layout).unwrap();
        racks.hosts().iter().for_each(|host| know_qemu(&host.host));
        let (others, told) = more(&racks);
        let told: Vec<&str> = told.iter().map(String::as_str).collect();
        let agents = agents_with(&racks, &others, &told).unwrap();
        Self { agents, kit, racks }
    }

    /// A host that VMs leave.
    #[must_use]
    pub fn source(&self, nth: usize) -> &RackHost {
        self.racks.sources()[nth]
    }

    /// A host to which VMs move.
    #[must_use]
    pub fn target(&self, nth: usize) -> &RackHost {
        self.racks.targets()[nth]
    }

    fn agent(&self, host: &RackHost) -> &Agent {
        self.agents.iter().find(|agent| agent.host_name() == host.name).unwrap()
    }

    /// Kills a host's agent, as a crash would.
    ///
    /// # Panics
    /// If there is none.
    pub fn kill_agent(&mut self, name: &str) {
        self.agents.iter_mut().find(|agent| agent.host_name() == name).unwrap().kill();
    }

    /// Boots a guest.
    ///
    /// # Panics
    /// If it stays silent.
    #[must_use]
    pub fn boot(&self, host: &RackHost, spec: GuestSpec) -> Guest {
        let argv = spec.argv(&self.kit, &self.kit.qemu);
        let mut run = vec!["run", spec.name.as_str(), "--"];
        run.extend(argv.iter().map(String::as_str));
        drop(self.tells(host, &run));
        Guest::meet(spec, &host.host).unwrap()
    }

    /// The output of a command to a host's agent, which must succeed.
    ///
    /// # Panics
    /// If it fails.
    #[must_use]
    pub fn tells(&self, host: &RackHost, args: &[&str]) -> String {
        let output = self.agent(host).command(&host.host, args).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {error}\n{}", self.logs());
        String::from_utf8(output.stdout).unwrap()
    }

    /// Waits until a host's agent has scanned all that a VM holds now.
    ///
    /// # Panics
    /// If it doesn't scan it.
    pub fn wait_looked_at(&self, host: &RackHost, name: &str) {
        crate::world::wait_looked_at(name, || {
            let stream = UnixStream::connect(host.host.inside("api.sock")).unwrap();
            let (status, body) = ask(&stream, "GET", &format!("/v1/vms/{name}"), "", "");
            assert_eq!(status, 200, "{body}\n{}", self.logs());
            serde_json::from_str(&body).unwrap()
        });
    }

    /// Begins to move a guest.
    ///
    /// # Panics
    /// If the command can't be started.
    #[must_use]
    pub fn begin(&self, guest: &Guest, from: &RackHost, to: &RackHost, args: &[&str]) -> Moving {
        guest.expect_on(&to.host).unwrap();
        let mut migrate = vec!["migrate", guest.spec.name.as_str(), to.name.as_str(), "--json"];
        migrate.extend(args);
        complete(&mut migrate);
        Moving::new(self.agent(from).command(&from.host, &migrate))
    }

    /// Waits for the end of a migration, which must succeed.
    ///
    /// # Panics
    /// If it fails.
    #[must_use]
    pub fn arrive(&self, guest: &Guest, moving: Moving) -> Report {
        let ended = moving.wait();
        assert_eq!(ended.report.outcome, Outcome::Done, "{}\n{}", ended.said, self.logs());
        ended.assert_audited();
        assert_arrived(guest, &self.kit, &ended.report.audit);
        ended.report
    }

    fn logs(&self) -> String {
        let log = |agent: &Agent| format!("{}: {}\n", agent.host_name(), agent.log_text());
        self.agents.iter().map(log).collect()
    }
}
