//! Hosts join a cluster and leave it while its agents run.

use std::fs;
use std::path::PathBuf;

use api::Outcome;
use end_to_end::commander::{carrying, port};
use end_to_end::{Side, World, bare, until};
use lab::hosts::Link;
use rustix::process::{Pid, Signal, kill_process};

fn file(world: &World, side: Side) -> PathBuf {
    world.host(side).run_dir.join("peers.toml")
}

fn reload(world: &World, side: Side) {
    let pid = Pid::from_raw(world.agent(side).pid().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
}

/// The file without that host.
fn without(text: &str, host: &str) -> String {
    let name = format!("name = \"{host}\"");
    let entries = text.split("[[host]]").filter(|entry| !entry.trim().is_empty());
    let others = entries.filter(|entry| !entry.contains(&name));
    others.map(|entry| format!("[[host]]{entry}")).collect()
}

#[test]
fn a_host_joins_and_leaves_and_a_mistake_in_the_file_is_not_followed() {
    let mut world = World::new(Link::one(1000));
    carrying(&mut world);
    let guest = world.boot(&bare("64M", 1_000_000));
    let path = file(&world, Side::A);
    let all = fs::read_to_string(&path).unwrap();
    let migrate = ["migrate", "web1", "host-b"];
    let knows_b = || {
        let mut asked = world.agent(Side::A).command(world.host(Side::A), &["doctor", "host-b"]);
        !String::from_utf8_lossy(&asked.output().unwrap().stderr).contains("there is no host")
    };
    // Whether the agent listens for it here, on loopback.
    let stands_for_b = || {
        let connect = format!("exec 3<>/dev/tcp/127.7.0.2/{}", port(Side::B));
        let mut command = world.host(Side::A).command("bash");
        command.args(["-c", &connect]).output().unwrap().status.success()
    };
    assert!(knows_b() && stands_for_b());

    fs::write(&path, without(&all, "host-b")).unwrap();
    reload(&world, Side::A);
    until("host-b has left", || !knows_b());
    until("nothing stands for it", || !stands_for_b());
    let why = world.refuses(Side::A, &migrate);
    assert!(why.contains("there is no host `host-b`"), "{why}");

    fs::write(&path, format!("{all}[[host]]\nname = \"host-c\"\n")).unwrap();
    reload(&world, Side::A);
    until("the mistake is told", || {
        world.agent(Side::A).log_text().contains("the peers file was not applied")
    });
    assert!(!knows_b());

    fs::write(&path, &all).unwrap();
    reload(&world, Side::A);
    until("host-b has joined", knows_b);
    until("something stands for it", stands_for_b);
    let ended = world.begin(&guest, Side::A, &[]).wait();
    assert_eq!(ended.report.outcome, Outcome::Done, "{}", ended.said);
    world.assert_intact(&guest);
}

/// Its certificate still is of the cluster's CA.
#[test]
fn a_host_that_has_left_sends_no_vm() {
    let (world, _certificates) = World::secured(Link::one(1000));
    let guest = world.boot(&bare("64M", 1_000_000));
    let path = file(&world, Side::B);
    let all = fs::read_to_string(&path).unwrap();
    let asked = || {
        let mut doctor = world.agent(Side::A).command(world.host(Side::A), &["doctor", "host-b"]);
        let output = doctor.output().unwrap();
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        // `doctor` breaks its lines.
        said.concat().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let refuses = "host-a is not in the peers file of host-b";
    assert!(!asked().contains(refuses));

    fs::write(&path, without(&all, "host-a")).unwrap();
    reload(&world, Side::B);
    until("host-a has left", || asked().contains(refuses));
    let why = world.refuses(Side::A, &["migrate", "web1", "host-b"]);
    assert!(why.contains(refuses), "{why}");

    fs::write(&path, &all).unwrap();
    reload(&world, Side::B);
    until("host-a has joined", || !asked().contains(refuses));
    drop(world.migrate(&guest, Side::A, &[]));
}
