//! libvirt's migrations, carried by the agents of both hosts: classic and parallel, by
//! `virsh` and from libvirtd to libvirtd, over loopback and by sockets.

use std::fs;

use api::{Audited, Outcome, Progress, Report};
use end_to_end::commander::port;
use end_to_end::libvirt::LibvirtWorld;
use end_to_end::{MIB, Side, guest, until};
use lab::agent::Agent;
use lab::guest::Guest;
use lab::hosts::{Link, RUN_DIR};
use lab::libvirt::{Domain, Migration, QemuUser};

const RATE: u64 = 5_000_000;

/// Two hosts with libvirt, led to agents that carry.
struct Carried {
    agents: [Agent; 2],
    world: LibvirtWorld,
}

/// What `droveway libvirt setup` writes.
fn qemu_conf(side: Side) -> String {
    let number = if side == Side::A { 1 } else { 2 };
    let first = port(side);
    format!(
        "migration_host = \"127.7.0.{number}\"\nmigration_address = \"10.77.0.{number}\"\n\
         migration_port_min = {first}\nmigration_port_max = {}\n",
        first + 63
    )
}

impl Carried {
    fn new() -> Self {
        let world = LibvirtWorld::with(Link::one(1000), qemu_conf);
        let user = QemuUser::usual().name();
        let agents = [Side::A, Side::B].map(|side| {
            let host = world.host(side);
            let file = format!("[carry]\nqemu-user = \"{user}\"\n");
            fs::write(host.run_dir.join("agent.toml"), file).unwrap();
            let config = format!("{RUN_DIR}/agent.toml");
            Agent::start_with(&world.hosts, host, &[], &["--config", &config]).unwrap()
        });
        Self { agents, world }
    }

    fn tells(&self, side: Side, args: &[&str]) -> String {
        let output = self.agents[side as usize].command(self.world.host(side), args).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    }

    /// What the source's agent says of the last one that it carried.
    fn report(&self, from: Side) -> Report {
        let mut ended = None;
        until("its report is there", || {
            let text = self.tells(from, &["list", "--migrations", "--json"]);
            let listed: Vec<Progress> = serde_json::from_str(&text).unwrap_or_default();
            ended = listed.into_iter().next().filter(|last| last.outcome.is_some());
            ended.is_some()
        });
        let id = ended.unwrap().id;
        serde_json::from_str(&self.tells(from, &["report", &id, "--json"])).unwrap()
    }

    /// Moves it, looks at it, and at what the agent says of that.
    fn migrate(&self, guest: &Guest, from: Side, how: &Migration) {
        self.world.migrate(guest, from, how);
        let report = self.report(from);
        let tap = if how.parallel.is_some() { "multifd" } else { "classic" };
        assert_eq!(report.outcome, Outcome::Done, "{how:?}");
        assert_eq!((report.tap.as_str(), report.placement.as_str()), (tap, "mapped"), "{report:?}");
        assert_eq!(report.vm, "web1");
        assert!(matches!(report.audit, Audited::Same { .. }), "{:?}", report.audit);
        assert!(report.body_bytes >= 8 * MIB, "{}", report.body_bytes);
    }
}

/// By an address of loopback, or a socket; so many channels.
const WAYS: [(bool, Option<u8>); 4] =
    [(false, None), (false, Some(4)), (true, None), (true, Some(4))];

/// To and fro by these ways, with a QEMU: the first is the distribution's, the last the
/// lab's usual one.
fn by(ways: &[(bool, Option<u8>)], p2p: bool, is_oldest: bool) {
    let carried = Carried::new();
    let mut qemus = carried.world.qemus();
    let qemu = if is_oldest { qemus.swap_remove(0) } else { qemus.pop().unwrap() };
    let guest = carried.world.start(&Domain::new(guest("256M", RATE)), &qemu);
    let sides = [Side::A, Side::B].into_iter().cycle();
    for (from, (by_path, parallel)) in sides.zip(ways) {
        let path = format!("unix:///run/droveway/migrate/{}.sock", from.other().name());
        let uri = by_path.then_some(path);
        let parallel = *parallel;
        carried.migrate(&guest, from, &Migration { p2p, parallel, uri, ..Migration::default() });
    }
}

/// There by loopback with four channels, back by a socket with one connection.
#[test]
fn there_and_back() {
    by(&[WAYS[1], WAYS[2]], false, false);
}

#[test]
fn by_virsh() {
    by(&WAYS, false, false);
}

#[test]
fn by_virsh_with_the_distributions_qemu() {
    by(&WAYS, false, true);
}

#[test]
fn from_libvirtd_to_libvirtd() {
    by(&WAYS, true, false);
}

#[test]
fn from_libvirtd_to_libvirtd_with_the_distributions_qemu() {
    by(&WAYS, true, true);
}
