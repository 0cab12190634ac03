//! Ctrl-C, `droveway cancel` and a stop of the agent: the VM stays where it was.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};

use api::VmStatus;

use crate::host::{Host, Hosts, kill, text};

/// Enough RAM that QEMU takes seconds to scan its zero pages.
const LARGE: &str = "-m 2048";

/// Starts a migration and waits for its first pass.
fn begin(host: &Host) -> (Child, BufReader<std::process::ChildStderr>) {
    let mut child = host
        .command(&["migrate", "web1", "b"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("first pass") {
        line.clear();
        assert_ne!(lines.read_line(&mut line).unwrap(), 0, "it ended before its first pass");
    }
    (child, lines)
}

fn assert_stayed(hosts: &Hosts, pid: u32) {
    let [a, b] = &hosts.hosts[..] else { unreachable!() };
    let vm = a.vm("web1").unwrap();
    assert_eq!((vm.pid, vm.status, vm.migration), (pid, VmStatus::Running, None));
    b.assert_clean();
}

#[test]
fn ctrl_c_cancels_and_says_where_the_vm_is() {
    let hosts = Hosts::new(["a", "b"]);
    let pid = hosts.hosts[0].run_halted("web1", LARGE);
    let (child, _lines) = begin(&hosts.hosts[0]);
    kill("INT", child.id());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("Cancelled. web1 continues at a."), "{output:?}");
    assert_stayed(&hosts, pid);
}

#[test]
fn another_command_cancels() {
    let hosts = Hosts::new(["a", "b"]);
    let pid = hosts.hosts[0].run_halted("web1", LARGE);
    let (child, _lines) = begin(&hosts.hosts[0]);
    let id = hosts.hosts[0].vm("web1").unwrap().migration.unwrap();
    assert!(hosts.hosts[0].refuses(&["stop", "web1"]).contains(&format!("droveway cancel {id}")));
    hosts.hosts[0].says(&["cancel", &id]);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_stayed(&hosts, pid);
    assert!(hosts.hosts[0].says(&["report", &id]).contains("Cancelled"));
}

#[test]
fn an_agent_that_is_told_to_end_cancels_first() {
    let mut hosts = Hosts::new(["a", "b"]);
    let pid = hosts.hosts[0].run_halted("web1", LARGE);
    for ended in [0, 1] {
        let (child, mut lines) = begin(&hosts.hosts[0]);
        hosts.hosts[ended].end("TERM");
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let mut said = text(&output.stdout);
        lines.read_to_string(&mut said).unwrap();
        assert!(said.contains("continues at a") || said.contains("was not moved to b"), "{said}");
        hosts.hosts[ended].start();
        assert_stayed(&hosts, pid);
    }
}
