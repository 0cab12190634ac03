//! Agents know each other by certificates, and reject all others. A rejected peer learns why, and
//! so does the operator at the other end.

use std::process::Stdio;
use std::time::SystemTime;

use api::Phase;
use end_to_end::{MIB, Side, World, bare, until};
use lab::certificates::Certificates;
use lab::guest::Guest;
use lab::hosts::Link;
use marks::runs;

const RATE: u64 = 2_000_000;

/// Two hosts with certificates of one CA, whose agents use them.
struct Secured {
    world: World,
    certificates: Certificates,
}

impl Secured {
    fn new(link: Link) -> Self {
        let (world, certificates) = World::secured(link);
        for side in [Side::A, Side::B] {
            let log = world.agent(side).log_text();
            assert!(log.contains("connections are encrypted; certificate valid"), "{log}");
        }
        Self { world, certificates }
    }

    /// Restarts the agent with the certificate that its host has now.
    fn restart(&mut self, side: Side) {
        self.world.kill_agent(side);
        self.world.start_agent(side);
    }
}

#[runs(promised)]
#[test]
fn there_and_back() {
    let Secured { world, .. } = Secured::new(Link { nics: 2, mbit_per_s: Some(500) });
    let guest = world.boot(&bare("256M", 5_000_000));
    for (from, lanes) in [(Side::A, "8"), (Side::B, "1")] {
        let report = world.migrate(&guest, from, &["--lanes", lanes]);
        assert_eq!(report.lanes.len().to_string(), lanes);
        assert!(report.lanes.iter().all(|lane| lane.deaths == 0), "{:?}", report.lanes);
    }
}

/// A firewall drops a connection, in the middle of a record.
#[test]
fn a_lane_is_cut() {
    let Secured { world, .. } = Secured::new(Link { nics: 2, mbit_per_s: Some(100) });
    let mut spec = bare("384M", 200_000);
    spec.orders.random_bytes = 128 * MIB;
    let guest = world.boot(&spec);
    let mut moving = world.begin(&guest, Side::A, &["--lanes", "2"]);
    moving.wait_for(Phase::FirstPass);
    let before = world.hosts.traffic().unwrap().bytes;
    until("pages fly", || world.hosts.traffic().unwrap().bytes > before + 2 * MIB);
    let mut cut = world.hosts.a.command("ss");
    let cut = cut.args(["-Kt", "state", "established", "src", "10.77.1.1"]);
    assert!(cut.stdout(Stdio::null()).status().unwrap().success());
    let report = world.arrive(&guest, Side::A, moving);
    let deaths = |nic: &str| {
        let lanes = report.lanes.iter().filter(|lane| lane.name.starts_with(nic));
        lanes.map(|lane| lane.deaths).sum::<u32>()
    };
    assert!(deaths("10.77.0.") == 0 && deaths("10.77.1.") > 0, "{:?}", report.lanes);
}

/// A guest at A that is to move to B, where one of the two can't be trusted.
struct Refusing {
    secured: Secured,
    guest: Guest,
    pid: u32,
}

impl Refusing {
    fn new() -> Self {
        let secured = Secured::new(Link::one(1000));
        let guest = secured.world.boot(&bare("256M", RATE));
        let pid = secured.world.vm(Side::A, "web1").unwrap().pid;
        Self { secured, guest, pid }
    }

    /// Asserts that it is refused: what `migrate` says, and what the agent at B logs.
    fn refuses(&self, says: &str, logs: &str) {
        let world = &self.secured.world;
        let why = world.refuses(Side::A, &["migrate", "web1", "host-b"]);
        assert!(why.contains(says), "{says:?} is not in: {why}");
        assert!(!why.contains("lost the connection"), "there was no connection: {why}");
        until(&format!("host-b logs {logs:?}"), || world.agent(Side::B).log_text().contains(logs));
        world.assert_stayed(&self.guest, Side::A, self.pid);
    }

    /// Restores both certificates; the VM moves, and comes back.
    fn works(mut self) {
        for side in [Side::A, Side::B] {
            let (host, name) = (self.secured.world.host(side), side.name());
            self.secured.certificates.give(host, name).unwrap();
            self.secured.restart(side);
        }
        drop(self.secured.world.migrate(&self.guest, Side::A, &[]));
        drop(self.secured.world.migrate(&self.guest, Side::B, &[]));
    }
}

#[test]
fn a_destination_that_is_not_who_it_should_be() {
    let mut refusing = Refusing::new();

    let strangers = Certificates::new().unwrap();
    strangers.give(refusing.secured.world.host(Side::B), "host-b").unwrap();
    refusing.secured.restart(Side::B);
    refusing.refuses(
        "the peer's certificate is not from a CA that this host knows",
        "the peer doesn't know the CA of this host's certificate",
    );

    let Secured { world, certificates } = &mut refusing.secured;
    certificates.give(world.host(Side::B), "host-c").unwrap();
    world.restart_agent_with(Side::B, &["--tls", &Certificates::place(), "--name", "host-c"]);
    refusing.refuses(
        "the peer there is host host-c, not host host-b: the peers file names another address",
        "compare this host's name with the peers file there",
    );

    let Secured { world, certificates } = &refusing.secured;
    let end = certificates.give_ending(world.host(Side::B), "host-b").unwrap();
    until("the certificate has expired", || end.has_expired(SystemTime::now()));
    refusing.secured.restart(Side::B);
    let log = refusing.secured.world.agent(Side::B).log_text();
    assert!(log.contains("the certificate of host host-b has expired on"), "{log}");
    let found = refusing.secured.world.refuses(Side::B, &["doctor", "--json"]);
    assert!(found.contains("Other agents refuse this one: "), "{found}");
    refusing.refuses(
        "the peer's certificate has expired on",
        "the peer reports that this host's certificate has expired",
    );

    refusing.secured.world.restart_agent_with(Side::B, &[]);
    refusing.refuses(
        "the peer uses plaintext (--insecure-plaintext)",
        "the peer uses TLS, and this agent has --insecure-plaintext",
    );

    refusing.works();
}

#[runs(promised)]
#[test]
fn a_source_that_is_not_who_it_should_be() {
    let mut refusing = Refusing::new();

    let Secured { world, certificates } = &refusing.secured;
    let end = certificates.give_ending(world.host(Side::A), "host-a").unwrap();
    until("the certificate has expired", || end.has_expired(SystemTime::now()));
    refusing.secured.restart(Side::A);
    refusing.refuses(
        "the peer reports that this host's certificate has expired",
        "the peer's certificate has expired on",
    );

    refusing.secured.world.restart_agent_with(Side::A, &[]);
    refusing.refuses(
        "the peer uses TLS, and this agent has --insecure-plaintext: remove it here",
        "the peer uses plaintext and this agent TLS",
    );

    // Not an agent at all.
    let port = refusing.secured.world.hosts.b.addresses[0];
    let request = format!("exec 3<>/dev/tcp/{port}/7800; printf 'GET / HTTP/1.1\\r\\n\\r\\n' >&3");
    let mut bash = refusing.secured.world.hosts.a.command("bash");
    assert!(bash.args(["-c", &format!("{request}; cat <&3")]).output().unwrap().status.success());
    let log = || refusing.secured.world.agent(Side::B).log_text();
    until("both were told apart", || log().matches("(or is it not an agent?)").count() == 2);

    refusing.works();
}
