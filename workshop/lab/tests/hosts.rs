//! Hosts: connected, isolated, and removed afterwards. Needs root.

use std::process::Stdio;

use lab::hosts::{Hosts, Link, RUN_DIR};

#[test]
fn hosts_reach_each_other_have_their_own_run_directory_and_leave_nothing() {
    let hosts = Hosts::new(Link { nics: 2, mbit_per_s: Some(100) }).unwrap();
    let names = [hosts.a.name.clone(), hosts.b.name.clone()];

    for (host, word) in [(&hosts.a, "left"), (&hosts.b, "right")] {
        let script = format!("echo {word} > {RUN_DIR}/word");
        assert!(host.command("sh").args(["-c", &script]).status().unwrap().success());
        let word_there = std::fs::read_to_string(host.run_dir.join("word")).unwrap();
        assert_eq!(word_there.trim(), word);
    }

    let before = hosts.traffic().unwrap();
    let to = hosts.b.addresses[1];
    let refused = hosts
        .a
        .command("bash")
        .args(["-c", &format!("echo > /dev/tcp/{to}/9")])
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(!refused.success(), "nobody listens there");
    assert!((hosts.traffic().unwrap() - before).bytes >= 100, "a SYN and its answer crossed");

    let mut sleeper = hosts.b.command("sleep").arg("1000").spawn().unwrap();
    while !hosts.b.processes().unwrap().contains(&sleeper.id()) {
        std::thread::yield_now();
    }
    drop(hosts);
    assert!(!sleeper.wait().unwrap().success(), "what ran on a host ends with it");
    let list = std::process::Command::new("ip").args(["netns", "list"]).output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    assert!(names.iter().all(|name| !list.contains(name)), "{list}");
}
