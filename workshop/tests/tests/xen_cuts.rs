//! Whatever ends during a migration of xl, and at each step of its handshake: the domain runs once.
//! Decision 070 has what each process does then; `crates/xen/tests/cuts` visits all orders of
//! events without programs.

use std::thread;

use end_to_end::domains::{Domains, MigrateEnded};
use end_to_end::fake_xl::Act;
use end_to_end::{Side, until};
use lab::hosts::Link;
use marks::runs;
use xen::DomainKind;

const XL: &str = env!("CARGO_BIN_EXE_fake-xl");

/// A point of a program on a host.
type Point = (Side, &'static str);

fn domains() -> Domains {
    Domains::new(Link { nics: 2, mbit_per_s: Some(500) }, XL)
}

/// Asserts where a domain runs now. `None` is either host, but only one.
fn assert_runs(
    domains: &Domains,
    point: Point,
    name: &str,
    at: Option<Side>,
    ended: &MigrateEnded,
) {
    let runs = domains.wait_until_it_runs(name);
    let expected = at.unwrap_or(runs);
    assert_eq!(runs, expected, "{point:?}: {}\n{}", ended.text, domains.logs());
    if runs == Side::A {
        assert!(!ended.success, "{point:?}: xl reports success\n{}", ended.text);
    }
}

/// Starts a domain for each row, and has an agent die while a program waits at its point.
fn killed(side: Side, rows: &[(Point, Option<Side>)]) {
    let mut domains = domains();
    for (number, &(point, at)) in rows.iter().enumerate() {
        let name = format!("web{number}");
        domains.start(&name, DomainKind::Pv);
        domains.plant(point, Act::Hold);
        let xl = domains.begin(Side::A, &name, &[]);
        domains.wait_at(point);
        domains.restart(side);
        domains.release(point);
        let ended = xl.wait(&domains);
        assert_runs(&domains, point, &name, at, &ended);
    }
}

#[test]
fn the_sources_agent_is_killed() {
    killed(
        Side::A,
        &[
            ((Side::A, "pass-1"), Some(Side::A)),
            ((Side::A, "suspended"), Some(Side::A)),
            ((Side::B, "loaded"), Some(Side::A)),
            ((Side::A, "offered"), Some(Side::A)),
            ((Side::B, "starting"), Some(Side::B)),
            ((Side::B, "started"), Some(Side::B)),
        ],
    );
}

/// A receiver outlives its agent, and goes on as soon as the point is released. Once it has the
/// whole domain, the next agent finds the copy, which it runs or destroys, as the source decides.
#[test]
fn the_destinations_agent_is_killed() {
    killed(
        Side::B,
        &[
            ((Side::B, "banner"), Some(Side::A)),
            ((Side::B, "receiving"), Some(Side::A)),
            ((Side::A, "suspended"), Some(Side::A)),
            ((Side::B, "loaded"), Some(Side::A)),
            ((Side::A, "offered"), None),
            ((Side::B, "starting"), None),
            ((Side::B, "started"), Some(Side::B)),
        ],
    );
}

/// Both at once, as in a power failure that the programs survive.
#[test]
fn both_agents_are_killed() {
    let mut domains = domains();
    for (number, point) in [(Side::A, "offered"), (Side::B, "started")].into_iter().enumerate() {
        let name = format!("web{number}");
        domains.start(&name, DomainKind::Hvm);
        domains.plant(point, Act::Hold);
        let xl = domains.begin(Side::A, &name, &[]);
        domains.wait_at(point);
        for side in [Side::A, Side::B] {
            domains.world.kill_agent(side);
        }
        domains.release(point);
        for side in [Side::B, Side::A] {
            domains.world.start_agent(side);
        }
        let ended = xl.wait(&domains);
        assert_runs(&domains, point, &name, Some(point.0), &ended);
    }
}

/// While the destination's agent is down, the source's shows that it does not know.
#[test]
fn a_domain_is_in_doubt_until_the_destination_answers() {
    let mut domains = domains();
    domains.start("web1", DomainKind::Pv);
    domains.plant((Side::B, "started"), Act::Hold);
    let xl = domains.begin(Side::A, "web1", &[]);
    domains.wait_at((Side::B, "started"));
    domains.world.kill_agent(Side::B);
    domains.release((Side::B, "started"));
    until("the migration is listed as in doubt", || {
        domains.progress(Side::A, "web1").is_some_and(|one| one.in_doubt)
    });
    domains.world.start_agent(Side::B);
    let ended = xl.wait(&domains);
    assert_runs(&domains, (Side::B, "started"), "web1", Some(Side::B), &ended);
}

/// It fails, and does what xl does then; or it ends at once, and its agent finds what is left.
#[runs(promised)]
#[test]
fn the_receiver_fails() {
    let domains = domains();
    let rows = [
        ("banner", Act::Crash, Side::A),
        ("receiving", Act::Fail, Side::A),
        ("receiving", Act::Crash, Side::A),
        ("loaded", Act::Fail, Side::A),
        ("loaded", Act::Crash, Side::A),
        ("starting", Act::Fail, Side::A),
        // It has the permission: its agent does the rest.
        ("starting", Act::Crash, Side::B),
        ("started", Act::Crash, Side::B),
    ];
    for (number, (point, act, at)) in rows.into_iter().enumerate() {
        let (name, point) = (format!("web{number}"), (Side::B, point));
        domains.start(&name, DomainKind::Pv);
        domains.plant(point, act);
        let ended = domains.begin(Side::A, &name, &[]).wait(&domains);
        assert_runs(&domains, point, &name, Some(at), &ended);
    }
}

/// A domain that xl has suspended can only be resumed by the same xl, so the copy runs if it may.
#[test]
fn xl_is_killed() {
    let domains = domains();
    for (number, (point, at)) in
        [("pass-1", Side::A), ("permitted", Side::B)].into_iter().enumerate()
    {
        let (name, point) = (format!("web{number}"), (Side::A, point));
        domains.start(&name, DomainKind::Pv);
        domains.plant(point, Act::Crash);
        let ended = domains.begin(Side::A, &name, &[]).wait(&domains);
        assert!(!ended.success, "{}", ended.text);
        assert_eq!(domains.wait_until_it_runs(&name), at, "{}", domains.logs());
    }
}

/// All links fail. Before xl has released its domain it stays; afterwards the agents settle it once
/// they reach each other.
#[test]
fn the_network_is_cut() {
    let domains = domains();
    let rows = [
        ((Side::A, "pass-1"), Some(Side::A)),
        ((Side::A, "offered"), None),
        ((Side::B, "starting"), Some(Side::B)),
    ];
    for (number, (point, at)) in rows.into_iter().enumerate() {
        let name = format!("web{number}");
        domains.start(&name, DomainKind::Pv);
        domains.plant(point, Act::Hold);
        let xl = domains.begin(Side::A, &name, &[]);
        domains.wait_at(point);
        set_links(&domains, false);
        domains.release(point);
        let ended = thread::scope(|scope| {
            let ended = scope.spawn(|| xl.wait(&domains));
            if at.is_some() {
                until("it runs while the network is cut", || domains.runs_at(&name) == at);
            }
            if at == Some(Side::A) {
                until("xl has ended", || ended.is_finished());
            }
            set_links(&domains, true);
            ended.join().unwrap()
        });
        assert_runs(&domains, point, &name, at, &ended);
    }
}

fn set_links(domains: &Domains, up: bool) {
    for nic in 0..2 {
        domains.world.hosts.a.set_nic(nic, up).unwrap();
    }
}
