//! An agent that systemd runs, with the packages' unit: actions on the unit don't concern its VMs.
//! Hosts of the lab that boot a systemd.

use std::fs;
use std::process::Stdio;

use end_to_end::{Systemd, boot_host, note, until};
use lab::agent::binary;
use lab::hosts::{Hosts, Link};
use lab::systemd::systemctl;
use lab::{program, setup};
use marks::runs;

const PEERS: &str = "[[host]]\nname = \"host-a\"\naddress = \"127.0.0.1:7800\"\n";
const CONFIG: &str = "name = \"host-a\"\npeers = \"peers.toml\"\n";
const CARRIES: &str = "name = \"host-a\"\npeers = \"peers.toml\"\n[carry]\n";
const HELPER: &str = "/usr/local/sbin/droveway-guest";
/// Without the port, and so for one survey.
const ONCE: &str = "[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nRestart=no\n\
     StandardOutput=file:/tmp/survey\nStandardError=inherit\nExecStart=\n\
     ExecStart=/usr/local/sbin/droveway-guest --once\n";
/// Without the units that precede a service on a machine that boots.
const DROP_IN: &str = "[Unit]\nDefaultDependencies=no\n";

fn unit(path: &str) -> String {
    fs::read_to_string(setup::repository().join(path)).unwrap()
}

fn boot(files: &[(&str, String)]) -> Option<Systemd> {
    let (agent, helper) = (binary(), binary().with_file_name("droveway-guest"));
    let programs = [(agent.as_path(), "/usr/bin/droveway"), (helper.as_path(), HELPER)];
    Systemd::start(files, &programs)
        .inspect_err(|why| note(&format!("units were not tried under systemd: {why}")))
        .ok()
}

/// An agent by this unit.
fn start_by(text: String, config: &str) -> Option<Systemd> {
    let systemd = boot(&[
        ("etc/systemd/system/droveway.service", text),
        ("etc/systemd/system/droveway.service.d/lab.conf", DROP_IN.to_owned()),
        ("etc/droveway/agent.toml", config.to_owned()),
        ("etc/droveway/peers.toml", PEERS.to_owned()),
    ])?;
    // With `Type=notify` it returns when the agent is ready.
    systemd.says(&["systemctl", "start", "droveway"]);
    Some(systemd)
}

fn start() -> Option<Systemd> {
    start_by(unit("dist/systemd/droveway.service"), CONFIG)
}

/// Starts a VM; the process ID of its QEMU, as systemd numbers it.
fn run(systemd: &Systemd) -> String {
    let qemu = setup::ensure().unwrap().qemu_system.display().to_string();
    let argv = [qemu.as_str(), "-machine", "q35", "-nodefaults", "-display", "none", "-m", "64"];
    systemd.says(&[&["droveway", "run", "web1", "--"][..], &argv].concat());
    pid(systemd)
}

fn pid(systemd: &Systemd) -> String {
    let shown = systemd.says(&["droveway", "show", "web1", "--json"]);
    let shown: api::VmSummary = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown.status, api::VmStatus::Running, "{shown:?}");
    shown.pid.to_string()
}

fn group(systemd: &Systemd, pid: &str) -> String {
    let groups = systemd.says(&["cat", &format!("/proc/{pid}/cgroup")]);
    // The others are hierarchies of this machine.
    groups.lines().find(|line| line.starts_with("0::")).unwrap().to_owned()
}

const SCOPE: &str = "0::/droveway.slice/droveway-vm-web1.scope";

#[runs(promised)]
#[test]
fn vms_have_scopes_of_their_own_and_outlive_all_that_is_done_with_the_agents_unit() {
    let Some(systemd) = start() else { return };
    let pid_before = run(&systemd);
    until("it has a scope", || group(&systemd, &pid_before) == SCOPE);
    until("the status says so", || {
        systemd
            .says(&["systemctl", "status", "droveway"])
            .contains("VMs: 1, migrations from here: 0")
    });
    let logged = || systemd.says(&["journalctl", "--output=cat", "DROVEWAY_VM=web1"]);
    until("the journal finds it by its name", || logged().contains("started vm=\"web1\""));
    let about = systemd.says(&["systemctl", "show", "droveway-vm-web1.scope"]);
    assert!(about.contains("Description=Virtual machine web1\n"), "{about}");
    // So the scope is stopped after the agent.
    let before = about.lines().find_map(|line| line.strip_prefix("Before=")).unwrap();
    assert!(before.split(' ').any(|unit| unit == "droveway.service"), "{before}");

    systemd.says(&["systemctl", "restart", "droveway"]);
    assert_eq!(pid(&systemd), pid_before);
    // Without a scope, this would kill all VMs.
    systemd.says(&["systemctl", "kill", "--kill-who=all", "--signal=KILL", "droveway"]);
    until("it is started again", || systemd.tries(&["droveway", "list"]).0);
    assert_eq!(pid(&systemd), pid_before);
    let _ = systemd.tries(&["systemctl", "reset-failed", "droveway"]);

    // A VM that an older agent has left in the unit.
    let to = "/sys/fs/cgroup/system.slice/droveway.service/cgroup.procs";
    systemd.says(&["sh", "-c", &format!("echo {pid_before} >{to}")]);
    assert_eq!(group(&systemd, &pid_before), "0::/system.slice/droveway.service");
    systemd.says(&["systemctl", "restart", "droveway"]);
    until("it has a scope again", || group(&systemd, &pid_before) == SCOPE);

    systemd.says(&["droveway", "stop", "web1", "--force"]);
    let is_there = || systemd.says(&["systemctl", "list-units", "--all"]).contains("web1.scope");
    until("the scope is gone", || !is_there());
    // And the VM may start again.
    let again = run(&systemd);
    assert_ne!(again, pid_before);
    until("it has one too", || group(&systemd, &again) == SCOPE);
    systemd.says(&["systemctl", "stop", "droveway"]);
    assert_eq!(group(&systemd, &again), SCOPE);
}

#[test]
fn an_agent_next_to_all_slices_has_scopes_for_its_vms() {
    let Some(systemd) = start() else { return };
    drop_in(&systemd, "droveway", "weight", "Slice=-.slice\nCPUWeight=20");
    systemd.says(&["systemctl", "restart", "droveway"]);
    let agent = systemd.says(&["systemctl", "show", "--property=MainPID", "--value", "droveway"]);
    assert_eq!(group(&systemd, agent.trim()), "0::/droveway.service");
    let qemu = run(&systemd);
    until("it has a scope", || group(&systemd, &qemu) == SCOPE);
}

/// As in a unit whose owner has tightened it; systemd then has `openat2` fail.
fn restrict(systemd: &Systemd, unit: &str) {
    drop_in(systemd, unit, "restrict", "RestrictSUIDSGID=yes");
}

fn drop_in(systemd: &Systemd, unit: &str, name: &str, lines: &str) {
    let path = format!("/etc/systemd/system/{unit}.service.d/{name}.conf");
    systemd.says(&["sh", "-c", &format!("printf '[Service]\n{lines}\n' >{path}")]);
    systemd.says(&["systemctl", "daemon-reload"]);
}

/// A unit without what mounts: the root that systemd has here can't be mounted once more.
fn without_mounts(text: &str) -> String {
    let mounts = |line: &&str| {
        ["Protect", "Private", "ReadWritePaths"].iter().any(|it| line.starts_with(it))
    };
    text.lines().filter(|line| !mounts(line)).map(|line| format!("{line}\n")).collect()
}

#[test]
fn an_agents_unit_lets_it_open_other_programs_sockets() {
    for path in ["dist/systemd/droveway.service", "dist/systemd/droveway-carry.service"] {
        let Some(systemd) = start_by(without_mounts(&unit(path)), CARRIES) else { return };
        let doctor = || systemd.tries(&["droveway", "doctor", "--json"]).1;
        let told = doctor();
        assert!(told.contains("\"carry\"") && !told.contains("openat2"), "{path}: {told}");
        restrict(&systemd, "droveway");
        systemd.says(&["systemctl", "restart", "droveway"]);
        let told = doctor();
        assert!(told.contains("the system refuses `openat2`"), "{path}: {told}");
    }
}

#[test]
fn the_helpers_unit_lets_it_find_files() {
    let text = unit("crates/guest/dist/droveway-guest.service");
    // This machine has no such port, and is not a guest of an agent.
    let text = text.lines().filter(|line| !line.contains("virtio\\x2dports"));
    let text = text.collect::<Vec<_>>().join("\n");
    let Some(systemd) = boot(&[
        ("etc/systemd/system/droveway-guest.service", text),
        ("etc/systemd/system/droveway-guest.service.d/lab.conf", ONCE.to_owned()),
    ]) else {
        return;
    };
    let survey = || {
        let done = systemd.tries(&["systemctl", "start", "droveway-guest"]).0;
        (done, systemd.says(&["cat", "/tmp/survey"]))
    };
    let (done, told) = survey();
    if told.contains("this needs root") {
        note("the helper's unit was not tried: page numbers need root, not a user namespace");
        return;
    }
    assert!(done, "{told}");
    restrict(&systemd, "droveway-guest");
    let (done, told) = survey();
    assert!(!done && told.contains("the system refuses openat2"), "{told}");
}

#[test]
fn a_host_with_a_system_of_its_own_runs_what_its_owner_starts() {
    let mut hosts = Hosts::new(Link::unshaped()).unwrap();
    if let Err(why) = boot_host(&mut hosts.a) {
        return note(&format!("no host has booted a system of its own: {why}"));
    }
    let host = &hosts.a;
    program::output(host.command("touch").arg("/run/here")).unwrap();
    assert!(host.path("/run/here").is_file());
    assert_eq!(host.processes().unwrap(), Vec::<u32>::new());

    let mut started = host.service("owners", "sleep");
    let mut started = started.arg("1000").stdin(Stdio::null()).spawn().unwrap();
    // By its number on that host.
    let name = |pid: u32| program::output(host.command("cat").arg(format!("/proc/{pid}/comm")));
    let is_sleep = |pid: &u32| name(*pid).is_ok_and(|name| name.trim() == "sleep");
    let mut pids = Vec::new();
    until("it runs", || {
        pids = host.processes().unwrap();
        !pids.is_empty() && pids.iter().all(is_sleep)
    });
    started.kill().unwrap();
    started.wait().unwrap();
    assert_eq!(host.processes().unwrap(), pids);
    let systemd = host.systemd().unwrap();
    assert!(systemctl(systemd, &["kill", "--signal=KILL", "owners"]));
    until("it has ended", || host.processes().unwrap().is_empty());
}
