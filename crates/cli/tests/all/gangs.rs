//! Gangs that a third host's agent coordinates.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use api::{GangOutcome, GangProgress, GangReport, MoveState, VmStatus};

use crate::host::{Host, Hosts, text};

const SETTLE_MAX: Duration = Duration::from_secs(30);

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + SETTLE_MAX;
    while !is_so() {
        assert!(Instant::now() < end, "not within {SETTLE_MAX:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The phases of a move in progress.
///
/// QEMU hands over a VM that is nearly all zero pages at once, so its first pass may be too short
/// to be shown.
const UNDER_WAY: [&str; 3] = ["first pass", "later passes", "stopped"];

/// Starts a gang, and waits until a move is in progress.
fn begin(host: &Host, args: &[&str]) -> Child {
    let mut child =
        host.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.as_mut().unwrap());
    let mut said = String::new();
    while !UNDER_WAY.iter().any(|phase| said.contains(phase)) {
        if lines.read_line(&mut said).unwrap() == 0 {
            let mut report = String::new();
            child.stdout.as_mut().unwrap().read_to_string(&mut report).unwrap();
            panic!("it ended: {said}{report}");
        }
    }
    child
}

/// Options that make a move slow enough to be interrupted, even while the VM is stopped.
const SLOWLY: [&str; 7] = ["--parallel", "1", "--limit", "1M", "--blackout-max", "60", "--json"];

fn slowly<'a>(moves: &[&'a str]) -> Vec<&'a str> {
    ["gang"].iter().chain(moves).chain(&SLOWLY).copied().collect()
}

fn gangs(host: &Host) -> Vec<GangProgress> {
    serde_json::from_str(&host.says(&["gang", "--json"])).unwrap()
}

#[test]
fn a_coordinator_that_dies_takes_no_migration_with_it() {
    let mut hosts = Hosts::new(["a", "b", "c"]);
    let [a, b, c] = &mut hosts.hosts[..] else { unreachable!() };
    for vm in ["web1", "web2"] {
        a.run(vm, "-m 64");
    }
    let mut watching = begin(c, &slowly(&["web1=b", "web2=b"]));
    let moving = a.vms().into_iter().find(|vm| vm.migration.is_some()).unwrap().name;
    c.end("KILL");
    assert!(!watching.wait().unwrap().success());
    until("it arrives by itself", || {
        b.vm(&moving).is_some_and(|vm| vm.status == VmStatus::Running)
    });
    c.start();
    let [kept] = &gangs(c)[..] else { panic!("one gang") };
    assert_eq!(kept.outcome, Some(GangOutcome::Interrupted));
    let report: GangReport =
        serde_json::from_str(&c.says(&["gang", "--resume", &kept.id, "--json"])).unwrap();
    assert_eq!(report.outcome, Some(GangOutcome::Done));
    // The source kept the report of the migration that was not watched.
    assert!(report.moves.iter().all(|one| one.figures.is_some()), "{report:#?}");
    a.assert_clean();
    assert_eq!(b.vms().len(), 2);
    assert!(c.refuses(&["gang", "--resume", &kept.id]).contains("moved all of its VMs"));
    assert!(c.refuses(&["cancel", &kept.id]).contains("does not run"));
}

#[test]
fn an_agent_that_is_started_anew_ends_its_vms_part() {
    let mut hosts = Hosts::new(["a", "b", "c"]);
    let [a, b, c] = &mut hosts.hosts[..] else { unreachable!() };
    a.run("web1", "-m 64");
    let mut watching = begin(c, &slowly(&["web1=b"]));
    // QEMU 7.2 can hang for good if its sockets break while its channels connect.
    std::thread::sleep(Duration::from_millis(500));
    a.end("KILL");
    a.start();
    let mut output = String::new();
    watching.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    assert!(!watching.wait().unwrap().success());
    let report: GangReport = serde_json::from_str(&output).unwrap();
    assert_eq!(report.moves[0].state, MoveState::Failed);
    let why = report.moves[0].reason.as_deref().unwrap();
    // As its history has it, since it has settled the migration that it was killed in.
    assert!(why.contains("the agent was restarted"), "{why}");
    until("it is settled", || a.vm("web1").is_some_and(|vm| vm.status == VmStatus::Running));
    until("nothing of it is at b", || b.vms().is_empty());
    assert_eq!(gangs(c)[0].outcome, Some(GangOutcome::Failed));
}

/// A host shuts down while its agent coordinates: moves between other hosts continue.
#[test]
fn an_agent_that_is_stopped_leaves_its_gang_to_be_taken_up() {
    let mut hosts = Hosts::new(["a", "b", "c"]);
    let [a, b, c] = &mut hosts.hosts[..] else { unreachable!() };
    a.run("web1", "-m 64");
    let mut watching = begin(c, &slowly(&["web1=b"]));
    c.end("TERM");
    assert!(!watching.wait().unwrap().success());
    until("it arrives by itself", || b.vm("web1").is_some_and(|vm| vm.status == VmStatus::Running));
    c.start();
    assert_eq!(gangs(c)[0].outcome, Some(GangOutcome::Interrupted));
    let said = c.says(&["gang", "--resume", &gangs(c)[0].id]);
    assert!(said.contains("1 VM moved."), "{said}");
}

#[test]
fn who_may_coordinate_is_up_to_each_host() {
    let mut hosts = Hosts::new(["a", "b", "c"]);
    let dir = hosts.dir.path().to_owned();
    let [a, b, c] = &mut hosts.hosts[..] else { unreachable!() };
    a.run("web1", "-m 64");
    fs::write(dir.join("a.toml"), "coordinators = ['b']\n").unwrap();
    a.end("TERM");
    a.more = vec!["--config".to_owned(), dir.join("a.toml").display().to_string()];
    a.start();
    let why = c.refuses(&["evacuate", "a", "--to", "b"]);
    assert!(why.contains("c is not one of the coordinators that a accepts orders from"), "{why}");
    assert!(b.says(&["evacuate", "a", "--to", "b"]).contains("1 VM moved."));
    a.assert_clean();
}

#[test]
fn bad_plans_are_refused_with_what_is_wrong() {
    let hosts = Hosts::new(["a", "b"]);
    let [a, b] = &hosts.hosts[..] else { unreachable!() };
    a.run("web1", "-m 64 -S");
    let file = hosts.dir.path().join("plan.toml");
    let path = file.to_str().unwrap();
    fs::write(&file, "[[move]]\nvm = 'web1'\nto = 'b'\n\n[options]\nspeed = 1\n").unwrap();
    for (args, says) in [
        (vec!["gang", "web1=q"], "no host `q` in the peers file; there is: a, b"),
        (vec!["gang", "web2=b"], "no VM `web2` on any host"),
        (vec!["gang", "web1=a"], "web1 is on a already"),
        (vec!["gang", "web1=b", "web1=b"], "web1 is named twice"),
        (vec!["gang", "--file", path], "plan.toml:6: "),
        (vec!["gang", "--file", "/nowhere/plan.toml"], "reading /nowhere/plan.toml"),
        (vec!["gang", "--dry-run"], "nothing to plan"),
        (vec!["gang", "--resume", "gdeadbeef"], "no gang `gdeadbeef`"),
        (vec!["evacuate", "q"], "no host `q`"),
        (vec!["evacuate", "a", "--to", "a"], "can't be evacuated to itself"),
        (vec!["report", "gdeadbeef"], "no gang `gdeadbeef`"),
        (vec!["cancel", "gdeadbeef"], "no gang `gdeadbeef`"),
    ] {
        let why = a.refuses(&args);
        assert!(why.contains(says), "{says:?} is not in: {why}");
    }
    assert!(a.vm("web1").is_some_and(|vm| vm.migration.is_none()));
    b.assert_clean();
    // A host that can't be evacuated to is left out, unless it is named.
    let said = text(&a.command(&["evacuate", "b"]).output().unwrap().stdout);
    assert!(said.contains("no VM to move"), "{said}");
}
