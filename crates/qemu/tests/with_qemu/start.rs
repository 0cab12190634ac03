use qemu::ram_blocks::RamBlocks;
use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use qemu::launch::bound_log;
use qemu::machine::{self, By, GuestPort, Start, StartError, UP_MAX};
use qemu::qmp::RunState;
use serde_json::json;

use crate::{argv, start, try_start};

#[test]
fn a_vm_is_started_and_ended() {
    let vm = start("-machine q35 -m 64 -S");
    assert!(vm.process.is_alive());
    assert_eq!(vm.qmp.run_state().unwrap(), RunState::Prelaunch);
    vm.qmp.cont().unwrap();
    assert_eq!(vm.qmp.run_state().unwrap(), RunState::Running);
    assert_eq!(vm.qmp.ram_bytes().unwrap(), 64 << 20);
    assert!(vm.version.starts_with(|first: char| first.is_ascii_digit()), "{}", vm.version);
    assert_eq!(vm.argv, argv("-machine q35 -m 64 -S"), "the user's own");
    assert_eq!(vm.qmp.vcpus().unwrap().len(), 1);
    vm.quit().unwrap();
    assert!(!vm.process.is_alive());
    // The reader of its socket may notice the end a little later.
    let until = Instant::now() + Duration::from_secs(20);
    while !vm.qmp.is_closed() {
        assert!(Instant::now() < until, "QEMU is gone, and its socket is not");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!vm.dir.path().join("qmp").exists());
    vm.quit().unwrap();
}

/// QEMU traces each of its commands to stderr, as a guest would fill the log by its console.
#[test]
fn a_log_that_grows_is_emptied_while_qemu_writes_to_it() {
    let vm = start("-machine q35 -m 64 -S");
    let log = vm.log().unwrap();
    let command = |path: &str| vm.qmp.execute("qom-list", json!({ "path": path }));
    let trace = json!({ "name": "handle_qmp_command", "enable": true });
    vm.qmp.execute("trace-event-set-state", trace).unwrap();
    let long = "x".repeat(64 << 10);
    while !bound_log(log).unwrap() {
        command(&long).unwrap_err();
    }
    command("/newest").unwrap_err();
    let text = fs::read_to_string(log).unwrap();
    assert!(text.contains("/newest") && !text.contains(&long), "{} bytes", text.len());
    assert!(!text.contains('\0'), "QEMU goes on at the new end");
    assert!(fs::read_to_string(log.with_file_name("qemu.log.1")).unwrap().contains(&long));
}

#[test]
fn a_qemu_that_does_not_answer_is_ended_by_force() {
    let vm = start("-machine q35 -m 64 -S");
    let stop =
        std::process::Command::new("kill").args(["-STOP", &vm.process.pid().to_string()]).status();
    assert!(stop.unwrap().success());
    vm.quit().unwrap();
    assert!(!vm.process.is_alive());
}

#[test]
fn a_vm_is_found_again_after_a_restart_with_the_ram_it_has() {
    let vm = start("-machine q35 -m 64 -S");
    RamBlocks::of(&vm).reached[0].mapping.write(5 << 20, b"written before").unwrap();
    let record = serde_json::to_string(&vm.record()).unwrap();
    let vm = vm.found_again(&record);
    let mut read = [0; 14];
    RamBlocks::of(&vm).reached[0].mapping.read(5 << 20, &mut read).unwrap();
    assert_eq!(&read, b"written before");
    assert_eq!(vm.qmp.run_state().unwrap(), RunState::Prelaunch);
    assert_eq!(serde_json::to_string(&vm.record()).unwrap(), record);

    vm.quit().unwrap();
    let gone = machine::reopen(&serde_json::from_str(&record).unwrap(), vm.dir.path()).unwrap_err();
    assert!(matches!(gone, StartError::Process(_)), "{gone}");
}

#[test]
fn a_vm_that_the_agent_did_not_start_is_attached() {
    let vm = start("-machine q35 -m 64 -S -qmp unix:other,server=on,wait=off");
    let attached = machine::attach(&vm.dir.path().join("other"), vm.dir.path()).unwrap();
    assert_eq!(attached.process.pid(), vm.process.pid());
    assert!(attached.is_attached());
    assert_eq!(attached.cwd, vm.dir.path());
    assert!(attached.argv.contains(&"q35".to_owned()));
    drop(attached);
    let again = machine::attach(&vm.dir.path().join("other"), vm.dir.path()).unwrap();
    assert_eq!(again.qmp.run_state().unwrap(), RunState::Prelaunch);
}

/// As after the agent has lost its record: the next QEMU gets a file of its own.
#[test]
fn an_attached_vm_has_the_kind_of_its_ram_s_file() {
    let made = "memory-backend-file,id=r,size=64M,share=on,mem-path=/proc/self/fd/droveway-ram";
    let vm = start(&format!(
        "-machine q35,memory-backend=r -m 64 -S -object {made} -qmp unix:other,server=on,wait=off"
    ));
    let attached = machine::attach(&vm.dir.path().join("other"), vm.dir.path()).unwrap();
    assert!(attached.argv.iter().any(|word| word == made), "{:?}", attached.argv);
}

#[test]
fn a_refused_start_has_qemu_s_message_and_leaves_nothing() {
    let table = [
        ("-machine nosuch", "machine type"),
        ("-machine q35 -device nosuch", "nosuch"),
        ("-machine q35 -drive file=missing.img,format=raw", "missing.img"),
    ];
    for (arguments, piece) in table {
        let dir = tempfile::tempdir().unwrap();
        let error = try_start(arguments, dir.path()).unwrap_err();
        assert!(matches!(error, StartError::Ended { .. }), "{error}");
        assert!(error.to_string().contains(piece), "{error}");
        assert!(!dir.path().join("qmp").exists());
    }
}

/// Like a QEMU with `-serial unix:w.sock,server`, which waits for a client.
#[test]
fn a_qemu_that_does_not_answer_is_ended_and_its_words_are_told() {
    let script = "echo QEMU waiting for connection on: disconnected:unix:w.sock; exec sleep 1000";
    let error = silent(script, Duration::from_secs(2), UP_MAX);
    assert!(error.contains("no greeting within 2 s"), "{error}");
    assert!(error.contains("waiting for connection on: disconnected:unix:w.sock"), "{error}");
}

/// One that works, as while it touches its memory, gets all of its time.
#[test]
fn a_qemu_that_does_nothing_at_its_start_is_ended_before_its_time_is_over() {
    let (long, idle_max) = (Duration::from_secs(6), Duration::from_secs(2));
    let hangs = silent("kill -STOP $$", UP_MAX, idle_max);
    assert!(hangs.contains("has used no CPU time for 2 s"), "{hangs}");
    let works = silent("while :; do :; done", long, idle_max);
    assert!(works.contains("no greeting within 6 s"), "{works}");
}

/// The reason why such a script does not start as a QEMU, of which nothing is left.
fn silent(script: &str, up_max: Duration, idle_max: Duration) -> String {
    let dir = tempfile::tempdir().unwrap();
    let argv = ["sh", "-c", script].map(str::to_owned);
    let start = Start {
        name: "test",
        argv: &argv,
        cwd: dir.path(),
        dir: dir.path(),
        incoming: false,
        machine: None,
        by: By::Operator,
        user: None,
        guest_port: GuestPort::None,
        knows_legacy_ack: false,
        up_max,
        idle_max,
    };
    let launched = Cell::new(None);
    let error = machine::start_reporting(&start, &|pid| launched.set(Some(pid))).unwrap_err();
    let pid = launched.get().expect("its process is told, though it never answers");
    assert!(matches!(error, StartError::Silent { .. }), "{error}");
    assert!(!dir.path().join("qmp").exists());
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "it is ended");
    error.to_string()
}

#[test]
fn two_vms_do_not_share_what_they_inherit() {
    let (one, other) = (start("-machine q35 -m 64 -S"), start("-machine q35 -m 32 -S"));
    let sockets = |pid: u32| {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let links = entries.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        let sockets = links.filter(|link| link.to_string_lossy().starts_with("socket:"));
        sockets.collect::<std::collections::HashSet<_>>()
    };
    let (ones, others) = (sockets(one.process.pid()), sockets(other.process.pid()));
    assert!(!ones.is_empty() && ones.is_disjoint(&others), "{ones:?} {others:?}");
    other.process.kill().unwrap();
    other.process.wait_exited(Duration::from_secs(10)).unwrap();
    assert!(one.process.is_alive());
}
