//! An agent that systemd runs, with the packages' unit: actions on the unit don't concern its VMs.

use std::fs;

use end_to_end::{Systemd, note, until};
use lab::agent::binary;
use lab::setup;
use marks::runs;

const PEERS: &str = "[[host]]\nname = \"host-a\"\naddress = \"127.0.0.1:7800\"\n";
const CONFIG: &str = "name = \"host-a\"\npeers = \"peers.toml\"\n";
/// Without the units that precede a service on a machine that boots.
const DROP_IN: &str = "[Unit]\nDefaultDependencies=no\n";

fn start() -> Option<Systemd> {
    let unit = setup::repository().join("dist/systemd/droveway.service");
    let files = [
        ("etc/systemd/system/droveway.service", fs::read_to_string(unit).unwrap()),
        ("etc/systemd/system/droveway.service.d/lab.conf", DROP_IN.to_owned()),
        ("etc/droveway/agent.toml", CONFIG.to_owned()),
        ("etc/droveway/peers.toml", PEERS.to_owned()),
    ];
    match Systemd::start(&files, &binary(), "/usr/bin/droveway") {
        Ok(systemd) => {
            // With `Type=notify` it returns when the agent is ready.
            systemd.says(&["systemctl", "start", "droveway"]);
            Some(systemd)
        }
        Err(why) => {
            note(&format!("an agent under systemd was not tried: {why}"));
            None
        }
    }
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
