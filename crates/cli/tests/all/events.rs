//! `droveway events`: the events of a move, of a gang, and of a restart of the agent.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Stdio};

use api::{Event, GangOutcome, GapReason, Happening, MigrationResult, Phase};

use crate::host::{Host, Hosts};

/// A running `droveway events`.
struct Follower {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Follower {
    /// Follows events from now on.
    fn new(host: &Host) -> Self {
        let mut command = host.command(&["events", "--json"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert!(line.contains("following"), "{line}");
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    fn next(&mut self) -> Happening {
        let line = self.lines.next().expect("it goes on").unwrap();
        serde_json::from_str::<Event>(&line).unwrap_or_else(|error| panic!("{error}: {line}")).what
    }

    /// The phases of the next migration, and its end.
    fn migration(&mut self) -> (Vec<Phase>, Happening) {
        assert!(matches!(self.next(), Happening::MigrationBegan { vm, .. } if vm == "web1"));
        let mut phases = Vec::new();
        loop {
            match self.next() {
                Happening::MigrationPhase { phase, .. } => phases.push(phase),
                end => return (phases, end),
            }
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn assert_moved((phases, end): (Vec<Phase>, Happening)) {
    assert_eq!(phases.first(), Some(&Phase::FirstPass));
    assert!(phases.is_sorted(), "{phases:?}");
    // Even phases that end at once are published.
    let last = [Phase::Stopped, Phase::Loaded, Phase::Committed, Phase::Running];
    assert!(phases.ends_with(&last), "{phases:?}");
    let Happening::MigrationEnded { result, downtime_ms, total_s, reason, .. } = end else {
        panic!("{end:?}")
    };
    assert_eq!((result, reason), (MigrationResult::Done, None));
    assert!(downtime_ms.is_some() && total_s > 0.0);
}

#[test]
fn both_hosts_publish_a_move_and_the_coordinator_its_gang() {
    let hosts = Hosts::new(["a", "b"]);
    let [a, b] = &hosts.hosts[..] else { unreachable!() };
    a.run("web1", "-m 64");
    let (mut at_a, mut at_b) = (Follower::new(a), Follower::new(b));
    a.says(&["migrate", "web1", "b"]);
    assert_moved(at_a.migration());
    let began = at_b.next();
    assert!(
        matches!(&began, Happening::ArrivalBegan { vm, from, .. } if vm == "web1" && from == "a"),
        "{began:?}"
    );
    let ended = at_b.next();
    assert!(matches!(&ended, Happening::ArrivalEnded { arrived: true, .. }), "{ended:?}");

    b.says(&["gang", "web1=a"]);
    let began = at_b.next();
    assert!(matches!(&began, Happening::GangBegan { vms: 1, .. }), "{began:?}");
    assert_moved(at_b.migration());
    let ended = at_b.next();
    let Happening::GangEnded { result, done, failed, .. } = ended else { panic!("{ended:?}") };
    assert_eq!((result, done, failed), (GangOutcome::Done, 1, 0));
}

#[test]
fn a_move_that_fails_is_told_with_its_reason() {
    let hosts = Hosts::new(["a", "b"]);
    let [a, b] = &hosts.hosts[..] else { unreachable!() };
    a.run("web1", "-m 64");
    b.run("web1", "-m 64 -S");
    let mut follower = Follower::new(a);
    a.command(&["migrate", "web1", "b"]).output().unwrap();
    let (_, end) = follower.migration();
    let Happening::MigrationEnded { result, reason, downtime_ms, .. } = end else {
        panic!("{end:?}")
    };
    assert_eq!((result, downtime_ms), (MigrationResult::Failed, None));
    assert!(reason.unwrap().contains("there is already a VM `web1` there"));
}

#[test]
fn after_a_restart_of_the_agent_it_goes_on_and_says_so() {
    let mut hosts = Hosts::new(["a", "b"]);
    let mut follower = Follower::new(&hosts.hosts[0]);
    hosts.hosts[0].end("KILL");
    hosts.hosts[0].start();
    hosts.hosts[0].run("web1", "-m 64");
    assert_eq!(follower.next(), Happening::Gap { why: GapReason::Restarted });
    hosts.hosts[0].says(&["migrate", "web1", "b"]);
    assert_moved(follower.migration());
    // A graceful stop publishes all remaining events, and does not end the follower.
    hosts.hosts[0].end("TERM");
    hosts.hosts[0].start();
    assert_eq!(follower.next(), Happening::Gap { why: GapReason::Restarted });
}
