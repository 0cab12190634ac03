//! Moving a VM with the command, and the command's output.

use std::fs;

use api::{Outcome, Report, VmStatus};

use crate::host::{self, Hosts, is_alive, qemu, text};

#[test]
fn a_vm_moves_there_and_back() {
    let hosts = Hosts::new(["a", "b"]);
    let [a, b] = &hosts.hosts[..] else { unreachable!() };
    let first = a.run("web1", "-m 64");
    let said = a.says(&["migrate", "web1", "b"]);
    assert!(said.starts_with("web1 runs on b. Downtime "), "{said}");
    assert!(said.contains("64.0 MiB") || said.contains("MiB of RAM moved in"), "{said}");
    assert!(!is_alive(first));
    a.assert_clean();
    assert_eq!(b.vm("web1").unwrap().status, VmStatus::Running);

    let output = b.command(&["migrate", "web1", "a", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Report = serde_json::from_slice(&output.stdout).expect("nothing but the report");
    assert_eq!((report.outcome, report.from.as_str()), (Outcome::Done, "b"));
    // How far it has come is printed too, unless it has ended by then.
    assert!(text(&output.stderr).contains("Migration "), "progress goes to standard error");
    b.assert_clean();
}

#[test]
fn a_command_at_the_wrong_host_says_where_the_vm_is() {
    let mut hosts = Hosts::new(["a", "b", "c"]);
    let [a, b, c] = &mut hosts.hosts[..] else { unreachable!() };
    a.run("web1", "-m 64");
    a.says(&["migrate", "web1", "b"]);
    for (host, to) in [(&*a, "c"), (&*c, "a")] {
        for args in [&["migrate", "web1", to][..], &["predict", "web1", to, "--rate", "100M"]] {
            let error = host.refuses(args);
            assert!(error.contains("there is no VM `web1` here: it is at b"), "{error}");
        }
    }
    assert!(a.refuses(&["migrate", "web2", "b"]).contains("`droveway list`"));
    // It is not to be asked any more.
    b.end("KILL");
    let error = a.refuses(&["migrate", "web1", "c"]);
    assert!(error.contains("has moved it to b"), "{error}");
    let error = c.refuses(&["migrate", "web1", "b"]);
    assert!(error.contains("`droveway list`"), "{error}");
    b.start();
}

#[test]
fn an_agent_that_does_not_run_is_not_said_to_be_lost() {
    let mut hosts = Hosts::new(["a", "b"]);
    let [a, b] = &mut hosts.hosts[..] else { unreachable!() };
    a.run("web1", "-m 64");
    b.end("KILL");
    let ended = a.command(&["migrate", "web1", "b"]).output().unwrap();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let said = host::text(&ended.stdout);
    assert!(said.contains("the agent of b can't be reached"), "{said}");
    assert!(!said.contains("lost the connection"), "{said}");
    assert_eq!(a.vm("web1").unwrap().status, VmStatus::Running);
    b.start();
}

#[test]
fn a_paused_vm_arrives_paused() {
    let hosts = Hosts::new(["a", "b"]);
    let [a, b] = &hosts.hosts[..] else { unreachable!() };
    a.run("web1", "-m 64 -S");
    let said = a.says(&["migrate", "web1", "b"]);
    assert!(said.contains("is on b, paused as it was"), "{said}");
    assert_eq!(b.vm("web1").unwrap().status, VmStatus::Paused);
}

#[test]
fn a_report_is_text_json_and_one_html_file() {
    let hosts = Hosts::new(["a", "b"]);
    let [a, _] = &hosts.hosts[..] else { unreachable!() };
    a.run("web1", "-m 64");
    let json = a.says(&["migrate", "web1", "b", "--json"]);
    let report: Report = serde_json::from_str(&json).unwrap();
    let id = report.id.as_str();

    assert!(a.says(&["report", id]).contains("Placement"));
    let again: Report = serde_json::from_str(&a.says(&["report", id, "--json"])).unwrap();
    assert_eq!(again.started_unix_s, report.started_unix_s);
    let page = hosts.dir.path().join("report.html");
    a.says(&["report", id, "--html", page.to_str().unwrap()]);
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("web1 moved to b") && page.ends_with("</html>\n"));

    let saved = hosts.dir.path().join("saved.json");
    fs::write(&saved, &json).unwrap();
    assert!(a.says(&["report", saved.to_str().unwrap()]).contains("web1 runs on b"));
    assert!(a.refuses(&["cancel", id]).contains("has ended"));
}

#[test]
fn what_the_destination_refuses_leaves_everything_as_it_was() {
    let hosts = Hosts::new(["a", "b"]);
    let [a, b] = &hosts.hosts[..] else { unreachable!() };
    let pid = a.run("web1", "-m 64");
    b.run("web1", "-m 64 -S");
    let output = a.command(&["migrate", "web1", "b"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("there is already a VM `web1` there"), "{output:?}");
    b.says(&["stop", "web1", "--force"]);

    let output = a.command(&["migrate", "web1", "b", "--set", "/nothing=/x"]).output().unwrap();
    assert!(text(&output.stdout).contains("`/nothing` occurs nowhere"), "{output:?}");
    b.assert_clean();
    let vm = a.vm("web1").unwrap();
    assert_eq!((vm.pid, vm.status, vm.migration), (pid, VmStatus::Running, None));
    assert!(a.refuses(&["migrate", "web1", "c"]).contains("peers file; there is: b"));
}

#[test]
fn a_disk_that_is_not_shared_is_never_used() {
    let hosts = Hosts::new(["a", "b"]);
    let [a, b] = &hosts.hosts[..] else { unreachable!() };
    for dir in ["one", "two"] {
        fs::create_dir(hosts.dir.path().join(dir)).unwrap();
        fs::File::create(hosts.dir.path().join(dir).join("d.img"))
            .unwrap()
            .set_len(1 << 20)
            .unwrap();
    }
    let (one, two) = (hosts.dir.path().join("one"), hosts.dir.path().join("two"));
    let drive = format!("-drive file={}/d.img,format=raw,if=virtio,cache=none", one.display());
    a.run("web1", &format!("-m 64 {drive}"));
    // A copy of the same name in another directory.
    let set = format!("{}={}", one.display(), two.display());
    let output = a.command(&["migrate", "web1", "b", "--set", &set]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stdout);
    let at = |option: &str| said.find(option).expect(option);
    assert!(at("--disks all --create-disks") < at("--shared-disks"), "the safe one first: {said}");
    assert!(said.contains("destroys the VM's data"), "{said}");
    b.assert_clean();
    a.says(&["migrate", "web1", "b"]);
    assert_eq!(b.vm("web1").unwrap().status, VmStatus::Running);
}

#[test]
fn a_qemu_that_somebody_else_started_receives_an_adopted_vm() {
    let hosts = Hosts::new(["a", "b"]);
    let [a, b] = &hosts.hosts[..] else { unreachable!() };
    let start = |name: &str, extra: &[&str]| {
        let qmp = hosts.dir.path().join(name);
        let child = std::process::Command::new(qemu())
            .args("-machine q35,accel=tcg -m 64 -nodefaults -display none -vga std".split(' '))
            .args(extra)
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", qmp.display()))
            .spawn()
            .unwrap();
        while !qmp.exists() {
            std::thread::yield_now();
        }
        (child, qmp.to_str().unwrap().to_owned())
    };
    let (mut source, from) = start("from.qmp", &[]);
    let (mut destination, to) = start("to.qmp", &["-incoming", "defer", "-S"]);
    a.says(&["attach", "web1", "--qmp", &from]);

    // By mistake, the socket of a running VM. It must not be touched.
    let (mut bystander, wrong) = start("wrong.qmp", &[]);
    let output = a.command(&["migrate", "web1", "b", "--incoming-qmp", &wrong]).output().unwrap();
    assert!(text(&output.stdout).contains("doesn't wait for a VM"), "{output:?}");
    assert!(is_alive(bystander.id()));
    bystander.kill().unwrap();
    bystander.wait().unwrap();

    let json = a.says(&["migrate", "web1", "b", "--incoming-qmp", &to, "--json"]);
    let report: Report = serde_json::from_str(&json).unwrap();
    assert_eq!(report.placement, "mapped");
    source.wait().unwrap();
    let vm = b.vm("web1").unwrap();
    assert_eq!((vm.pid, vm.attached), (destination.id(), true));
    b.says(&["stop", "web1", "--force"]);
    destination.wait().unwrap();
}
