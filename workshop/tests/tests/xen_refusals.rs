//! What a host does not take of xl's migrations, and programs that are not xl. The domain runs on.

use api::Outcome;
use end_to_end::domains::Domains;
use end_to_end::fake_xl::Act;
use end_to_end::{Side, World};
use lab::hosts::Link;
use marks::runs;
use xen::DomainKind;

const XL: &str = env!("CARGO_BIN_EXE_fake-xl");

fn domains() -> Domains {
    let domains = Domains::new(Link::one(500), XL);
    domains.start("web1", DomainKind::Pv);
    domains
}

/// Asserts that a domain does not get away, and returns all that xl and its transport print.
fn stays(domains: &Domains, to: &str) -> String {
    let by = format!("exec {}", domains.transport(Side::A, to));
    let ended = domains.begin_by(Side::A, "web1", &[], &by).wait(domains);
    assert!(!ended.success, "{}", ended.text);
    domains.assert_runs_at(Side::A, "web1");
    ended.text
}

/// A domain brings the paths of its disks and its kernel with it, so each host names those from
/// which it accepts any.
#[runs(promised)]
#[test]
fn a_host_that_is_not_listed() {
    let mut domains = domains();
    for hosts in [&[] as &[&str], &["host-b"]] {
        domains.accept_from(Side::B, hosts);
        let text = stays(&domains, "host-b");
        assert!(text.contains("accept-from"), "{text}");
    }
    domains.accept_from(Side::B, &["host-a"]);
    drop(domains.migrate(Side::A, "web1", &[]));
}

#[test]
fn a_host_without_an_agent_or_without_xen() {
    let mut domains = domains();
    let text = stays(&domains, "host-c");
    assert!(text.contains("host-c"), "{text}");
    let text = stays(&domains, "host-a");
    assert!(text.contains("this host"), "{text}");
    let config = domains.world.host(Side::B).run_dir.join("agent.toml");
    let xen = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, "").unwrap();
    domains.restart(Side::B);
    let text = stays(&domains, "host-b");
    assert!(text.contains("[xen]"), "{text}");
    domains.world.kill_agent(Side::B);
    let text = stays(&domains, "host-b");
    assert!(text.contains("host-b"), "{text}");
    std::fs::write(&config, xen).unwrap();
    domains.world.start_agent(Side::B);
    drop(domains.migrate(Side::A, "web1", &[]));
}

/// Both could release it, each to another host.
#[test]
fn a_domain_that_is_being_moved_already() {
    let domains = domains();
    domains.plant((Side::A, "pass-1"), Act::Hold);
    let first = domains.begin(Side::A, "web1", &[]);
    domains.wait_at((Side::A, "pass-1"));
    let second = domains.begin(Side::A, "web1", &[]).wait(&domains);
    assert!(!second.success && second.text.contains("already"), "{}", second.text);
    domains.release((Side::A, "pass-1"));
    let first = first.wait(&domains);
    assert!(first.success, "{}\n{}", first.text, domains.logs());
    domains.assert_runs_at(Side::B, "web1");
}

/// What stands where xl's stream must be.
#[test]
fn other_bytes_than_a_stream() {
    let domains = domains();
    let send = domains.transport(Side::A, "host-b");
    for input in ["printf 'Xen saved domain, xl format\\n'", "head -c 3000000 /dev/zero", "true"] {
        let mut command = domains.world.host(Side::A).command("sh");
        let output = command.args(["-c", &format!("{input} | {send}")]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && !text.trim().is_empty(), "{input}: {output:?}");
        assert_others_are_well(&domains.world);
        domains.assert_runs_at(Side::A, "web1");
    }
    drop(domains.migrate(Side::A, "web1", &[]));
}

/// What stands where the receiver must be.
#[test]
fn a_receiver_that_is_not_xls() {
    let mut domains = domains();
    let banner = "printf 'xl migration receiver ready, send binary domain data.\\n'";
    let ready = "printf 'domain received, ready to unpause\\0'";
    for script in [
        "echo Password:; cat >/dev/null".to_owned(),
        "exit 7".to_owned(),
        format!("{banner}; exit 7"),
        // It is ready before it has read anything.
        format!("{banner}; {ready}; sleep 1"),
        format!("{banner}; {banner}; cat >/dev/null"),
    ] {
        domains.receive_by(Side::B, &script);
        drop(stays(&domains, "host-b"));
        let Some(Outcome::Failed(why)) = domains.ended(Side::A, "web1").outcome else {
            panic!("{script}: {}", domains.logs())
        };
        assert!(!why.is_empty());
        assert_others_are_well(&domains.world);
    }
    domains.accept_from(Side::B, &["host-a"]);
    drop(domains.migrate(Side::A, "web1", &[]));
}

/// Both agents answer.
fn assert_others_are_well(world: &World) {
    for side in [Side::A, Side::B] {
        drop(world.tells(side, &["list"]));
    }
}
