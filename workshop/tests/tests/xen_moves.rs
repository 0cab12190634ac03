//! Agents carry migrations of xl, with a stand-in for xl: a domain arrives as its source sent it,
//! over all links, and can be cancelled.

use api::{Outcome, Report};
use end_to_end::domains::{Domains, PAGES};
use end_to_end::fake_xl::{Act, Memory};
use end_to_end::{MIB, Side, bare, until};
use lab::hosts::Link;
use marks::runs;
use xen::DomainKind;

const XL: &str = env!("CARGO_BIN_EXE_fake-xl");
const LINKS: Link = Link { nics: 2, mbit_per_s: Some(200) };

/// The points at which a migration is cancelled.
const CANCELLED_AT: [(Side, &str); 3] =
    [(Side::A, "pass-1"), (Side::A, "suspended"), (Side::B, "loaded")];

/// The receiver compares everything but pages byte by byte, and with `--debug` all pages with those
/// that the source sends once more.
#[runs(promised)]
#[test]
fn there_and_back_over_all_links() {
    let domains = Domains::new(LINKS, XL);
    domains.start("web1", DomainKind::Pv);
    for (from, options) in [(Side::A, &["--debug"][..]), (Side::B, &[])] {
        let report = domains.migrate(from, "web1", options);
        assert_eq!(report.outcome, Outcome::Done);
        assert_eq!((report.from.as_str(), report.to.as_str()), (from.name(), from.other().name()));
        let used = report.lanes.iter().filter(|lane| lane.batches > 0).count();
        assert!(used >= 2, "{:?}", report.lanes);
        assert!(report.passes > 1 && report.downtime_ms.is_some(), "{report:?}");
        assert!(report.fill_bytes > 0 && report.wire_bytes < report.body_bytes, "{report:?}");
        let is_noted = report.notes.iter().any(|note| note.contains("xl's comparison of all"));
        assert_eq!(is_noted, !options.is_empty(), "{:?}", report.notes);
    }
    for nic in 0..2 {
        let sent = domains.world.hosts.a.sent_by(nic).unwrap();
        assert!(sent.bytes > 1 << 20, "link {nic}: {sent:?}");
    }
}

/// Of PVH and HVM: other records around the pages, and pages without a body.
#[test]
fn a_domain_with_virtual_hardware() {
    let domains = Domains::new(LINKS, XL);
    domains.start("web1", DomainKind::Hvm);
    for (from, options) in [(Side::A, &[] as &[&str]), (Side::B, &["--debug"])] {
        drop(domains.migrate(from, "web1", options));
    }
}

/// Moves a domain, whose second pass xl begins once the first one has arrived: otherwise it could
/// be in its last pass, in which nothing goes by name, before lanes have read the first.
fn pass_by_pass(domains: &Domains, name: &str, options: &str) -> Report {
    domains.plant((Side::A, "pass-0"), Act::Hold);
    let xl = domains.begin_with(Side::A, name, options);
    domains.wait_at((Side::A, "pass-0"));
    until("its first pass has arrived", || {
        let progress = domains.progress(Side::A, name);
        progress.is_some_and(|it| it.pass == 1 && it.ram_bytes > 0 && it.left_bytes == 0)
    });
    domains.release((Side::A, "pass-0"));
    let ended = xl.wait(domains);
    assert!(ended.success, "{}\n{}", ended.text, domains.logs());
    domains.assert_runs_at(Side::B, name);
    domains.report(Side::A, name)
}

/// Half of its pages are those of a VM of QEMU that is there. Page tables are, too, and are sent.
#[runs(fills, promised)]
#[test]
fn what_a_vm_at_the_destination_has_is_not_sent() {
    let mut domains = Domains::new(Link::one(200), XL);
    let mut spec = bare("128M", 0);
    spec.name = "guest1".to_owned();
    spec.orders.seed = Memory::COMMON_SEED;
    spec.orders.random_bytes = u64::from(PAGES) * 4096;
    spec.orders.text_bytes = 48 * MIB;
    let guest = domains.world.boot(&spec);
    drop(domains.world.migrate(&guest, Side::A, &[]));
    domains.world.wait_looked_at(Side::B, "guest1");
    domains.qemus[Side::B as usize].push(domains.world.vm(Side::B, "guest1").unwrap().pid);
    for (kind, plain, twin) in [(DomainKind::Pv, "web1", "web2"), (DomainKind::Hvm, "web3", "web4")]
    {
        [plain, twin].iter().for_each(|name| domains.start(name, kind));
        let plain = pass_by_pass(&domains, plain, "--share off");
        let twin = pass_by_pass(&domains, twin, "--share host");
        let common_bytes = Memory::common_bytes(kind, PAGES);
        println!("{} of {common_bytes} by name", twin.named_bytes);
        assert_eq!(plain.named_bytes, 0, "{plain:?}");
        assert!(twin.named_bytes >= common_bytes * 9 / 10, "{twin:?}");
        assert!(twin.wire_bytes + common_bytes / 2 < plain.wire_bytes, "{plain:?} {twin:?}");
    }
    domains.world.assert_intact(&guest);
}

#[test]
fn two_at_a_time_and_one_of_them_back() {
    let domains = Domains::new(LINKS, XL);
    for (name, kind) in [("web1", DomainKind::Pv), ("web2", DomainKind::Hvm)] {
        domains.start(name, kind);
        domains.plant((Side::A, "pass-1"), Act::Hold);
    }
    let moving = ["web1", "web2"].map(|name| domains.begin(Side::A, name, &[]));
    until("both are listed", || domains.world.migrations(Side::A).len() == 2);
    domains.release((Side::A, "pass-1"));
    for (xl, name) in moving.into_iter().zip(["web1", "web2"]) {
        let ended = xl.wait(&domains);
        assert!(ended.success, "{}\n{}", ended.text, domains.logs());
        domains.assert_runs_at(Side::B, name);
    }
    drop(domains.migrate(Side::B, "web1", &[]));
    domains.assert_runs_at(Side::B, "web2");
}

/// What was in flight on a link that fails goes by the other one.
#[test]
fn a_link_fails_and_comes_back() {
    let domains = Domains::new(LINKS, XL);
    domains.start("web1", DomainKind::Pv);
    domains.plant((Side::A, "pass-1"), Act::Hold);
    let xl = domains.begin(Side::A, "web1", &["--debug"]);
    domains.wait_at((Side::A, "pass-1"));
    domains.world.hosts.a.set_nic(1, false).unwrap();
    domains.release((Side::A, "pass-1"));
    let ended = xl.wait(&domains);
    assert!(ended.success, "{}\n{}", ended.text, domains.logs());
    domains.assert_runs_at(Side::B, "web1");
    domains.world.hosts.a.set_nic(1, true).unwrap();
    drop(domains.migrate(Side::B, "web1", &[]));
}

/// Up to the moment when the receiver is permitted to unpause its copy. Afterwards it can't be
/// cancelled.
#[test]
fn a_migration_is_cancelled_until_the_commit() {
    let domains = Domains::new(LINKS, XL);
    domains.start("web1", DomainKind::Pv);
    let id = || domains.progress(Side::A, "web1").map(|one| one.id).unwrap();
    for point in CANCELLED_AT {
        domains.plant(point, Act::Hold);
        let xl = domains.begin(Side::A, "web1", &[]);
        domains.wait_at(point);
        domains.world.says(Side::A, &["cancel", &id()]);
        domains.release(point);
        let ended = xl.wait(&domains);
        assert!(!ended.success, "{point:?}: {}", ended.text);
        assert_eq!(domains.ended(Side::A, "web1").outcome, Some(Outcome::Cancelled), "{point:?}");
        domains.assert_runs_at(Side::A, "web1");
    }
    domains.plant((Side::B, "starting"), Act::Hold);
    let xl = domains.begin(Side::A, "web1", &[]);
    domains.wait_at((Side::B, "starting"));
    let agent = domains.world.agent(Side::A);
    drop(agent.command(domains.world.host(Side::A), &["cancel", &id()]).output().unwrap());
    domains.release((Side::B, "starting"));
    let ended = xl.wait(&domains);
    assert!(ended.success, "{}\n{}", ended.text, domains.logs());
    domains.assert_runs_at(Side::B, "web1");
}
