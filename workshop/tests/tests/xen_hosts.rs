//! Real Xen and stock xl, on two emulated hosts: domains arrive through the agents as Xen itself
//! and their guests find right, and what ends meanwhile leaves them running once. `make xen-test`
//! runs these.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use lab::agent::binary;
use lab::fatal::{Kind, fatal};
use lab::setup;
use lab::xen::{DomainSpec, Migrated, Virtualization, XenHost, XenHosts};
use marks::runs;
use seeds::recording::Recording;

/// Checks of all memory after a move: the first one may have started before it.
const CHECKS: u64 = 2;
/// Longest time until something shows.
const SHOWS_MAX: Duration = Duration::from_secs(180);
const PAUSE: Duration = Duration::from_millis(500);

fn boot() -> XenHosts {
    let kit = setup::ensure().unwrap();
    let xen = setup::xen().unwrap();
    XenHosts::boot(&kit, &xen, &binary()).unwrap()
}

fn spec(name: &str, virtualization: Virtualization) -> DomainSpec {
    let name = name.to_owned();
    DomainSpec { name, virtualization, memory_mib: 112, load_mib: 24, pages_per_s: 200 }
}

fn logs(hosts: &XenHosts) -> String {
    let log = |host: &XenHost| format!("{}: {}", host.name(), host.agent_log());
    format!("{}\n{}", log(&hosts.a), log(&hosts.b))
}

/// Asserts that a domain is at a host and nowhere else, without a copy, and that its guest finds
/// its memory as it wrote it.
fn assert_runs_at(hosts: &XenHosts, host: &XenHost, name: &str) {
    let until = Instant::now() + SHOWS_MAX;
    let other = hosts.other(host);
    while host.domains().unwrap() != [name] || !other.domains().unwrap().is_empty() {
        let of = |host: &XenHost| host.domains().unwrap();
        let found = format!("{:?} and {:?}", of(&hosts.a), of(&hosts.b));
        assert!(Instant::now() < until, "{name} is not only at {}: {found}", host.name());
        thread::sleep(PAUSE);
    }
    if let Err(error) = host.wait_checked(name, CHECKS) {
        fatal(Kind::WrongPage, format_args!("{error}\n{}", logs(hosts)));
    }
}

fn assert_moved(hosts: &XenHosts, from: &XenHost, name: &str, moved: &Migrated) {
    assert_eq!(moved.said.status, 0, "{}\n{}", moved.said.text, logs(hosts));
    assert_runs_at(hosts, hosts.other(from), name);
}

/// Moves a domain there and back. On the way there Xen compares all pages with those that the
/// source sends once more.
fn there_and_back(hosts: &XenHosts, spec: &DomainSpec) {
    let name = spec.name.as_str();
    hosts.a.create(spec).unwrap();
    for (from, options) in [(&hosts.a, "--debug"), (&hosts.b, "")] {
        let to = hosts.other(from);
        to.forget(name).unwrap();
        let moved = from.migrate(name, to, options).unwrap();
        assert_moved(hosts, from, name, &moved);
        let log = to.output("cat /var/log/agent.log").unwrap();
        for line in log.lines().filter(|line| line.contains("verify")) {
            assert!(!line.contains("failed"), "{line}");
        }
        let listed = from.output("droveway list --migrations").unwrap();
        assert!(listed.contains(name), "{listed}");
    }
    hosts.a.destroy_all().unwrap();
}

#[runs(alone, requested)]
#[test]
fn domains_of_both_kinds_go_there_and_back() {
    let hosts = boot();
    there_and_back(&hosts, &spec("pv1", Virtualization::Pv));
    there_and_back(&hosts, &spec("pvh1", Virtualization::Pvh));
}

/// Streams of xl itself, without the contents of pages: crate xen understands them. They are kept
/// in target/xen-streams, from where `make xen-record` takes them for its own tests and fuzzing.
#[runs(alone, requested)]
#[test]
fn what_xl_writes_is_understood_and_kept() {
    let hosts = boot();
    let kept = setup::repository().join("target/xen-streams");
    fs::create_dir_all(&kept).unwrap();
    let domains = [("pv1", Virtualization::Pv, "--debug"), ("pvh1", Virtualization::Pvh, "")];
    for (name, virtualization, options) in domains {
        hosts.a.create(&spec(name, virtualization)).unwrap();
        let (moved, recorded) = hosts.a.migrate_recorded(name, &hosts.b, options).unwrap();
        fs::write(kept.join(format!("{name}.xl")), &recorded).unwrap();
        assert_moved(&hosts, &hosts.a, name, &moved);
        Recording::parse(&recorded).unwrap().check();
        hosts.b.destroy_all().unwrap();
    }
}

/// Runs `act` once the live passes of a migration have started.
fn in_flight<T>(host: &XenHost, name: &str, act: impl FnOnce() -> T) -> T {
    let until = Instant::now() + SHOWS_MAX;
    let sent = host.sent_bytes().unwrap();
    // So much that it is no handshake.
    while host.sent_bytes().unwrap() < sent + (3 << 20) {
        assert!(Instant::now() < until, "{name} does not move");
        thread::sleep(PAUSE);
    }
    act()
}

/// Of four links one fails and comes back. Then an agent is killed while pages are in flight, at
/// each end: the domain stays, and moves once the agent is there again. Last, xl alone still
/// migrates it.
#[runs(alone, requested)]
#[test]
fn a_domain_survives_what_ends_meanwhile() {
    let hosts = boot();
    let XenHosts { a, b, .. } = &hosts;
    let name = "pv1";
    a.create(&spec(name, Virtualization::Pv)).unwrap();
    for host in [a, b] {
        // Slow enough for something to happen meanwhile.
        host.limit(Some(12)).unwrap();
    }
    let moved = thread::scope(|scope| {
        let moving = scope.spawn(|| a.migrate(name, b, ""));
        in_flight(a, name, || a.set_link(2, false).unwrap());
        thread::sleep(PAUSE);
        a.set_link(2, true).unwrap();
        moving.join().unwrap().unwrap()
    });
    assert_moved(&hosts, a, name, &moved);
    for killed in [b, a] {
        let failed = thread::scope(|scope| {
            let moving = scope.spawn(|| b.migrate(name, a, ""));
            in_flight(b, name, || killed.kill_agent().unwrap());
            killed.start_agent(lab::xen::LINKS).unwrap();
            moving.join().unwrap().unwrap()
        });
        assert_ne!(failed.said.status, 0, "{}\n{}", failed.said.text, logs(&hosts));
        assert_runs_at(&hosts, b, name);
    }
    for host in [a, b] {
        host.limit(None).unwrap();
    }
    a.forget(name).unwrap();
    let moved = b.migrate(name, a, "").unwrap();
    assert_moved(&hosts, b, name, &moved);
    b.forget(name).unwrap();
    let moved = a.migrate_plainly(name, b).unwrap();
    assert_moved(&hosts, a, name, &moved);
}
