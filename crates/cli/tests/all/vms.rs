//! Starting, showing and stopping VMs with the command.

use api::VmStatus;

use crate::host::{Hosts, is_alive, kill, qemu};

#[test]
fn a_vm_is_run_listed_shown_and_stopped() {
    let hosts = Hosts::new(["a"]);
    let [a] = &hosts.hosts[..] else { unreachable!() };
    let pid = a.run_halted("web1", "-m 64");

    let list = a.says(&["list"]);
    let row = list.lines().find(|line| line.starts_with("web1")).unwrap();
    assert!(row.contains("running") && row.contains(&pid.to_string()), "{list}");
    let show = a.says(&["show", "web1"]);
    assert!(show.contains("-nodefaults -display none -vga std -m 64"), "{show}");
    assert!(show.contains("64.0 MiB"), "{show}");

    assert!(a.refuses(&["run", "web1", "--", &qemu()]).contains("already"));
    assert!(a.refuses(&["stop", "web2"]).contains("no VM `web2`"));
    let stopped = a.says(&["stop", "web1", "--timeout", "0"]);
    assert!(stopped.contains("its QEMU was ended"), "firmware has no power button: {stopped}");
    assert!(!is_alive(pid));
    a.assert_clean();
}

#[test]
fn relative_paths_start_from_the_commands_directory() {
    let hosts = Hosts::new(["a"]);
    let [a] = &hosts.hosts[..] else { unreachable!() };
    let disk = hosts.dir.path().join("disk.img");
    std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let qemu = qemu();
    let output = a
        .command(&["run", "web1", "--", &qemu, "-m", "64", "-display", "none", "-S"])
        .args(["-drive", "file=disk.img,format=raw,if=virtio"])
        .current_dir(hosts.dir.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(a.vm("web1").unwrap().status, VmStatus::Paused);
    let error = a.refuses(&["stop", "web1"]);
    assert!(
        error.contains("can't react to its power button") && error.contains("--force"),
        "{error}"
    );
    a.says(&["stop", "web1", "--force"]);
}

#[test]
fn qemus_own_words_are_shown_when_it_does_not_start() {
    let hosts = Hosts::new(["a"]);
    let [a] = &hosts.hosts[..] else { unreachable!() };
    let error = a.refuses(&["run", "web1", "--", &qemu(), "-machine", "nonsense"]);
    assert!(error.contains("nsupported machine type"), "{error}");
    let error = a.refuses(&["run", "web1", "--", "/nonexistent/qemu"]);
    assert!(error.contains("is QEMU installed"), "{error}");
    a.assert_clean();
}

#[test]
fn a_dead_vm_says_why_until_it_is_stopped() {
    let hosts = Hosts::new(["a"]);
    let [a] = &hosts.hosts[..] else { unreachable!() };
    let pid = a.run_halted("web1", "-m 64");
    kill("TERM", pid);
    // QEMU takes a moment to end, and `list` notices it.
    while a.vm("web1").unwrap().status != VmStatus::Dead {
        std::thread::yield_now();
    }
    let show = a.says(&["show", "web1"]);
    assert!(show.contains("ended by a signal") && show.contains("terminating on signal"), "{show}");
    assert!(a.says(&["stop", "web1"]).contains("was dead"));
    a.assert_clean();
}

#[test]
fn how_vms_can_get_another_qemu_is_shown() {
    let hosts = Hosts::new(["a"]);
    let [a] = &hosts.hosts[..] else { unreachable!() };
    let inside = |name: &str| hosts.dir.path().join(name).display().to_string();
    let object = "-object memory-backend-file,id=r,size=64M,share=on,mem-path=";
    a.run_halted("shared", &format!("-m 64 {object}{} -machine memory-backend=r", inside("ram")));
    a.run_halted("private", "-m 64");
    let options = ["-machine", "q35,accel=tcg", "-nodefaults", "-display", "none", "-m", "64"];
    let qemu = qemu();
    a.says(&[&["run", "made", "--hand-over", "--", &qemu][..], &options].concat());
    a.run_halted("listens", &format!("-m 64 -serial unix:{},server=on,wait=off", inside("talk")));
    a.run_halted("talks", "-m 64 -serial pty");
    let shown = a.says(&["upgrade", "--all", "--dry-run"]);
    let row = |name: &str| shown.lines().find(|line| line.starts_with(name)).unwrap();
    assert!(row("made").contains("handed over"), "{shown}");
    assert!(row("shared").contains("handed over"), "{shown}");
    assert!(row("private").contains("copied: needs up to 64.0 MiB"), "{shown}");
    assert!(row("listens").contains("copied: needs up to 64.0 MiB"), "{shown}");
    let why = "  -serial is connected to something outside of QEMU\n";
    assert!(!row("talks").contains("copied") && shown.contains(why), "{shown}");
    let other = a.refuses(&["upgrade", "private", "--qemu", "/bin/sh", "--dry-run"]);
    assert!(other.contains("is not in qemu-programs"), "{other}");
    // Without `--dry-run`, each VM is tried.
    let tried = a.command(&["upgrade", "gone", "nowhere", "--json"]).output().unwrap();
    let (said, reports) = (String::from_utf8_lossy(&tried.stderr), tried.stdout);
    assert_eq!((tried.status.code(), reports.trim_ascii()), (Some(1), &b"[]"[..]), "{said}");
    assert!(said.contains("2 of 2 VMs have not got it: "), "{said}");
    assert!(said.contains("nowhere: there is no VM `nowhere` here"), "{said}");
    let same = a.says(&["upgrade", "private", "--accept-lost-writes"]);
    assert!(same.starts_with("private "), "{same}");
}

#[test]
fn a_vm_that_somebody_else_started_is_adopted() {
    let hosts = Hosts::new(["a"]);
    let [a] = &hosts.hosts[..] else { unreachable!() };
    let qmp = hosts.dir.path().join("their.qmp");
    let mut theirs = std::process::Command::new(qemu())
        .args("-machine q35,accel=tcg -m 64 -nodefaults -display none -qmp".split(' '))
        .arg(format!("unix:{},server=on,wait=off", qmp.display()))
        .spawn()
        .unwrap();
    // The socket exists a moment before QEMU listens at it.
    while std::os::unix::net::UnixStream::connect(&qmp).is_err() {
        std::thread::yield_now();
    }
    let qmp = qmp.to_str().unwrap();
    assert!(a.says(&["attach", "web1", "--qmp", qmp]).contains("adopted"));
    let vm = a.vm("web1").unwrap();
    assert_eq!((vm.pid, vm.attached), (theirs.id(), true));
    a.says(&["stop", "web1", "--force"]);
    theirs.wait().unwrap();
    a.assert_clean();
    // QEMU has removed its socket.
    let file = hosts.dir.path().join("peers.toml");
    for (wrong, why) in [(qmp, "it does not exist"), (file.to_str().unwrap(), "it is not a socket")]
    {
        let error = a.refuses(&["attach", "web1", "--qmp", wrong]);
        assert!(error.contains(why) && error.contains("-qmp unix:SOCKET"), "{error}");
    }
    a.assert_clean();
}
