//! Two hosts with libvirt, whose migrations lead to agents that carry them.

use api::{Audited, Outcome, Progress, Report};
use lab::agent::Agent;
use lab::guest::Guest;
use lab::hosts::Link;
use lab::libvirt::{Migration, carrying_agent, carrying_for_kubevirt, leading_to_agents};

use super::LibvirtWorld;
use crate::{MIB, Side, until};

/// Two hosts with a libvirtd and an agent each.
pub struct Carried {
    agents: [Agent; 2],
    /// The hosts, and their libvirtds.
    pub world: LibvirtWorld,
}

fn start_agent(world: &LibvirtWorld, side: Side) -> Agent {
    let host = world.host(side);
    match world.daemon(side).pod() {
        Some(_) => carrying_for_kubevirt(&world.hosts, host).unwrap(),
        None => carrying_agent(&world.hosts, host, &[]).unwrap(),
    }
}

impl Carried {
    /// Makes them, with this link between the hosts.
    ///
    /// # Panics
    /// If that fails; all functions of this file panic on failure.
    #[must_use]
    pub fn new(link: Link) -> Self {
        Self::of(LibvirtWorld::with(link, leading_to_agents))
    }

    /// The same, with the newest libvirt available.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn newest(link: Link) -> Self {
        Self::of(LibvirtWorld::newest(link, leading_to_agents))
    }

    /// The same, with libvirt of another release on each host, as during the upgrade of a cluster.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn of_two_releases(link: Link) -> Self {
        Self::of(LibvirtWorld::of_two_releases(link, leading_to_agents))
    }

    /// The same, with a pod on both hosts for a KubeVirt VM with this UID.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn in_pods(link: Link, uid: &str) -> Self {
        Self::of(LibvirtWorld::in_pods(link, uid))
    }

    fn of(world: LibvirtWorld) -> Self {
        let agents = [Side::A, Side::B].map(|side| start_agent(&world, side));
        Self { agents, world }
    }

    /// Kills a host's agent, as a crash would.
    pub fn kill_agent(&mut self, side: Side) {
        self.agents[side as usize].kill();
    }

    /// Starts a killed agent again.
    pub fn start_agent(&mut self, side: Side) {
        self.agents[side as usize] = start_agent(&self.world, side);
    }

    fn tells(&self, side: Side, args: &[&str]) -> String {
        let output = self.agents[side as usize].command(self.world.host(side), args).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    }

    /// Waits until the socket by which a VM leaves its pod leads to the agent of its host.
    ///
    /// # Panics
    /// If it doesn't.
    pub fn wait_until_it_leads_here(&self, from: Side, port: u16) {
        let pod = self.world.daemon(from).pod().expect("it is in a pod");
        let kept = format!("{}.kept", pod.socket(Some(port)));
        until("the agent stands in virt-handler's place", || {
            self.world.host(from).path(&kept).exists()
                && self.agents[from as usize]
                    .log_text()
                    .contains("carrying migrations that leave by this socket")
        });
    }

    /// The last migration that a host's agent carries, or has carried, from there.
    #[must_use]
    pub fn last(&self, from: Side) -> Option<Progress> {
        let text = self.tells(from, &["list", "--migrations", "--json"]);
        serde_json::from_str::<Vec<Progress>>(&text).unwrap_or_default().into_iter().next()
    }

    /// The source agent's report of the last migration, once it has ended.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn report(&self, from: Side) -> Report {
        let mut ended = None;
        until("its report is there", || {
            ended = self.last(from).filter(|last| last.outcome.is_some());
            ended.is_some()
        });
        let id = ended.expect("just seen").id;
        serde_json::from_str(&self.tells(from, &["report", &id, "--json"])).unwrap()
    }

    /// Moves a guest, and checks the guest and the agent's report.
    ///
    /// # Panics
    /// If anything is wrong.
    pub fn migrate(&self, guest: &Guest, from: Side, how: &Migration) {
        self.world.migrate(guest, from, how);
        let report = self.report(from);
        let tap = if how.parallel.is_some() { "multifd" } else { "classic" };
        assert_eq!(report.outcome, Outcome::Done, "{how:?}");
        assert_eq!((report.tap.as_str(), report.placement.as_str()), (tap, "mapped"), "{report:?}");
        assert_eq!(report.vm, guest.spec.name);
        assert!(matches!(report.audit, Audited::Same { .. }), "{:?}", report.audit);
        assert!(report.body_bytes >= 8 * MIB, "{}", report.body_bytes);
    }
}
