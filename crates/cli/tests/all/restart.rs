//! VMs keep running without their agent, and the next agent finds them.

use std::fs;
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use api::VmStatus;

use crate::host::{self, Hosts, is_alive};

#[test]
fn vms_survive_the_agent_however_it_ends() {
    let mut hosts = Hosts::new(["a", "b"]);
    let pid = hosts.hosts[0].run("web1", "-m 64");
    for signal in ["TERM", "KILL"] {
        let a = &mut hosts.hosts[0];
        a.end(signal);
        assert!(is_alive(pid), "after SIG{signal}");
        assert_eq!(a.socket().exists(), signal == "KILL", "a graceful end removes the socket");
        let error = a.refuses(&["list"]);
        assert!(error.contains("no agent answers"), "{error}");
        a.start();
        let vm = a.vm("web1").unwrap();
        assert_eq!((vm.pid, vm.status), (pid, VmStatus::Running));
    }
    let [a, b] = &hosts.hosts[..] else { unreachable!() };
    a.says(&["migrate", "web1", "b"]);
    assert_eq!(b.vm("web1").unwrap().status, VmStatus::Running);
    a.assert_clean();
}

#[test]
fn migrations_are_listed_after_a_restart() {
    let mut hosts = Hosts::new(["a", "b"]);
    let [a, b] = &mut hosts.hosts[..] else { unreachable!() };
    a.run("web1", "-m 64");
    a.says(&["migrate", "web1", "b"]);
    b.says(&["migrate", "web1", "a"]);
    a.says(&["migrate", "web1", "b"]);
    let before = a.says(&["list", "--migrations"]);
    assert_eq!(before.lines().count(), 3, "{before}");
    a.end("KILL");
    a.start();
    assert_eq!(a.says(&["list", "--migrations"]), before);
}

#[test]
fn a_vm_that_died_without_its_agent_is_shown_dead() {
    let mut hosts = Hosts::new(["a"]);
    let a = &mut hosts.hosts[0];
    let pid = a.run("web1", "-m 64");
    a.end("KILL");
    host::kill("KILL", pid);
    a.start();
    assert_eq!(a.vm("web1").unwrap().status, VmStatus::Dead);
    assert!(a.says(&["stop", "web1"]).contains("was dead"));
    a.assert_clean();
}

/// It is written to by QEMU, not by the agent.
#[test]
fn a_log_that_grew_without_an_agent_is_emptied_by_the_next_one() {
    let mut hosts = Hosts::new(["a"]);
    let a = &mut hosts.hosts[0];
    a.run_halted("web1", "-m 64");
    a.end("KILL");
    let log = a.state().join("vms/web1/qemu.log");
    let kept = log.with_file_name("qemu.log.1");
    let mut file = fs::File::options().append(true).open(&log).unwrap();
    file.write_all(&vec![b'x'; 3 << 20]).unwrap();
    file.write_all(b"the newest").unwrap();
    a.start();
    let until = Instant::now() + Duration::from_secs(60);
    while !fs::read(&kept).is_ok_and(|kept| kept.ends_with(b"the newest")) {
        assert!(Instant::now() < until, "{}", fs::metadata(&log).unwrap().len());
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(fs::metadata(&log).unwrap().len(), 0);
    assert_eq!(fs::metadata(&kept).unwrap().len(), 1 << 20);
    a.says(&["stop", "--force", "web1"]);
    a.assert_clean();
}

/// Wherever it runs out of open files, no VM ends and nothing of a VM is removed.
#[test]
fn an_agent_with_too_few_open_files_ends_no_vm() {
    let names = ["web1", "web2", "web3", "web4"];
    let mut hosts = Hosts::new(["a"]);
    let a = &mut hosts.hosts[0];
    let pids = names.map(|name| a.run_halted(name, "-m 64"));
    a.end("KILL");
    let (mut answered, mut lacked) = (0, 0);
    for files in (8..80).step_by(3) {
        match a.start_with_files(&files.to_string()) {
            true => {
                answered += 1;
                let vms = fs::read_to_string(a.log()).unwrap();
                lacked += usize::from(vms.contains("not touching a VM"));
                a.end("KILL");
            }
            false => lacked += 1,
        }
        for (name, pid) in names.iter().zip(pids) {
            assert!(is_alive(pid), "{name} with {files} open files");
            let record = a.state().join("vms").join(name).join("record.json");
            assert!(record.exists(), "{name} with {files} open files");
        }
    }
    assert!(answered > 0 && lacked > 0, "{answered} agents came up, {lacked} lacked files");
    a.start();
    for (name, pid) in names.iter().zip(pids) {
        let vm = a.vm(name).unwrap();
        assert_eq!((vm.pid, vm.status), (pid, VmStatus::Running), "{name}");
    }
}

#[test]
fn an_agent_raises_its_limit_of_open_files_for_itself_only() {
    let mut hosts = Hosts::new(["a"]);
    let a = &mut hosts.hosts[0];
    a.end("TERM");
    assert!(a.start_with_files("512:2048"));
    let soft_limit = |pid: u32| {
        let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
        files.split_whitespace().next().unwrap().to_owned()
    };
    assert_eq!(soft_limit(a.pid()), "2048");
    // Programs that QEMU starts may try all descriptors below the limit.
    assert_eq!(soft_limit(a.run_halted("web1", "-m 64")), "512");
}

#[test]
fn two_agents_do_not_share_a_host_by_mistake() {
    let hosts = Hosts::new(["a"]);
    let [a] = &hosts.hosts[..] else { unreachable!() };
    let state = a.state();
    let other = hosts.dir.path().join("other");
    fs::create_dir(&other).unwrap();
    let agent = ["agent", "--name", "z", "--listen", "127.0.0.1:9", "--state"];
    let mut same_state = agent.to_vec();
    same_state.push(state.to_str().unwrap());
    let error = a.refuses(&same_state);
    assert!(error.contains("another agent uses the state directory"), "{error}");
    a.vms();
}

#[test]
fn a_running_agent_keeps_its_socket() {
    let hosts = Hosts::new(["a"]);
    let [a] = &hosts.hosts[..] else { unreachable!() };
    let state = hosts.dir.path().join("other");
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = a.refuses(&[
        "agent",
        "--name",
        "z",
        "--listen",
        &port.to_string(),
        "--state",
        state.to_str().unwrap(),
    ]);
    assert!(error.contains("another agent answers"), "{error}");
    a.vms();
}
