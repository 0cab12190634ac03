//! In doubt, the agent ends no QEMU and removes nothing.

use std::os::unix::net::UnixListener;
use std::thread;

use super::*;

/// A part of the VM's problem, and the damage to its record that causes it.
type Damage = (&'static str, fn(&Path));

const DAMAGE: [Damage; 5] = [
    ("damaged", |record| fs::write(record, "{").unwrap()),
    ("damaged", |record| fs::write(record, "").unwrap()),
    ("newer", |record| fs::write(record, r#"{"version":99,"standing":"starting"}"#).unwrap()),
    ("directory", |record| {
        fs::remove_file(record).unwrap();
        fs::create_dir(record).unwrap();
    }),
    ("there is no", |record| fs::remove_file(record).unwrap()),
];

fn attach(dir: &Path) -> AttachRequest {
    let qmp = dir.join("qmp").to_str().unwrap().to_owned();
    AttachRequest { name: "web1".to_owned(), qmp, share_domain: "tenant-7".to_owned() }
}

fn assert_unreadable(registry: &Arc<Registry>, says: &str) {
    let shown = registry.show("web1").unwrap();
    let problem = shown.problem.unwrap_or_default();
    assert_eq!(shown.status, VmStatus::Unreadable, "{problem}");
    for part in [says, "web1", "droveway attach web1 --qmp", "resolve web1 --there"] {
        assert!(problem.contains(part), "{part}: {problem}");
    }
    for (denied, code) in [
        (registry.stop("web1", FORCE).map(drop), ErrorCode::VmUnreadable),
        (registry.begin_move("web1", "deadbeef").map(drop), ErrorCode::VmUnreadable),
        (registry.expect("web1", "deadbeef", "host-a").map(drop), ErrorCode::VmExists),
        (registry.run(&request("web1"), &probes()).map(drop), ErrorCode::VmExists),
    ] {
        assert_eq!(denied.unwrap_err().code(), code);
    }
}

#[test]
fn a_vm_whose_record_cannot_be_read_is_left_alone_until_it_is_attached() {
    for (says, damage) in DAMAGE {
        let dir = TestDir::new();
        let registry = open(dir.path());
        let wanted = RunRequest { guest_port: true, ..request("web1") };
        let pid = registry.run(&wanted, &probes()).unwrap().pid;
        let vm = registry.state().vm("web1");
        drop(registry);
        damage(&vm.join("record.json"));
        let registry = open(dir.path());
        assert!(is_alive(pid), "{says}");
        assert_unreadable(&registry, says);
        assert_unreadable(&registry, "record.json");
        // Its QEMU survives any request.
        let running = registry.forget_unreadable("web1").unwrap_err();
        assert!(running.to_string().contains("never ends"), "{running}");
        let mut wrong = attach(&vm);
        wrong.qmp = "/dev/null".to_owned();
        let wrong = registry.attach(&wrong).unwrap_err();
        assert!(wrong.to_string().contains(vm.to_str().unwrap()), "{wrong}");
        assert!(is_alive(pid), "{says}");
        assert_unreadable(&registry, says);

        let again = registry.attach(&attach(&vm)).unwrap();
        assert_eq!((again.pid, again.status, again.problem), (pid, VmStatus::Paused, None));
        assert_eq!((again.argv, again.attached), (wanted.argv, false));
        assert!(registry.vm("web1").unwrap().machine().unwrap().guest_port);
        drop(registry);
        let registry = open(dir.path());
        let found = registry.show("web1").unwrap();
        assert_eq!((found.pid, found.status), (pid, VmStatus::Paused));
        assert_eq!(found.share_domain, "tenant-7");
        registry.stop("web1", FORCE).unwrap();
        assert!(!is_alive(pid));
        assert_eq!(fs::read_dir(registry.state().vms()).unwrap().count(), 0);
    }
}

#[test]
fn an_open_journal_does_not_end_a_vm_without_its_record() {
    let dir = TestDir::new();
    let machine = leave(dir.path(), Some(Standing::Here), false, true);
    let state = StateDir::open(dir.path()).unwrap();
    fs::write(state.vm("web1").join("record.json"), "{").unwrap();
    let pid = machine.process.pid();
    let held = Held(vec![("web1".to_owned(), Some(machine.record()))]);
    drop(machine);
    let registry = Arc::new(Registry::open(state, &held).unwrap());
    assert!(is_alive(pid) && registry.is_unsettled("web1"));
    assert_eq!(registry.show("web1").unwrap().status, VmStatus::InDoubt);
    let vm = registry.state().vm("web1");
    assert!(registry.attach(&attach(&vm)).is_err());
    // As when its journal says that it goes on here.
    registry.stays("web1");
    assert_unreadable(&registry, "damaged");
    assert_eq!(registry.attach(&attach(&vm)).unwrap().status, VmStatus::Running);
    registry.stop("web1", FORCE).unwrap();
}

#[test]
fn an_operator_has_a_vm_run_again_or_forgets_it() {
    let dir = TestDir::new();
    let machine = leave(dir.path(), Some(Standing::Arriving), false, false);
    let pid = machine.process.pid();
    drop(machine);
    // A loaded VM may be the only copy: nothing shows that its source kept it.
    let registry = open(dir.path());
    assert!(is_alive(pid));
    assert_unreadable(&registry, "was arriving");
    let taken = registry.take_again("web1").unwrap();
    assert_eq!((taken.pid, taken.status), (pid, VmStatus::Running));
    assert_eq!(taken.share_domain, "tenant-7");
    let record = registry.state().vm("web1").join("record.json");
    drop(registry);
    Process::now(pid).unwrap().kill().unwrap();
    Process::now(pid).map(|process| process.wait_exited(Duration::from_secs(10))).ok();
    fs::write(&record, "{").unwrap();
    let registry = open(dir.path());
    assert_unreadable(&registry, "damaged");
    assert!(registry.take_again("web1").is_err());
    assert_unreadable(&registry, "damaged");
    registry.forget_unreadable("web1").unwrap();
    assert!(registry.is_free("web1") && !record.exists());
}

/// As where memory ran out, and the kernel ended QEMU with the agent.
#[test]
fn a_qemu_that_exits_as_the_agent_starts_is_waited_for() {
    for is_gone_soon in [true, false] {
        let dir = TestDir::new();
        let vm = StateDir::open(dir.path()).unwrap().vm("web1");
        fs::create_dir_all(&vm).unwrap();
        Record::starting().write(&vm).unwrap();
        let listener = UnixListener::bind(vm.join("qmp")).unwrap();
        let closing = thread::spawn(move || {
            let mut closed = 0;
            while let Ok((client, _)) = listener.accept() {
                // Nothing is read, and no greeting sent.
                drop(client);
                closed += 1;
                if is_gone_soon && closed == 3 {
                    break;
                }
            }
        });
        let registry = open(dir.path());
        if is_gone_soon {
            assert!(registry.is_free("web1") && !vm.exists());
            closing.join().unwrap();
        } else {
            assert_unreadable(&registry, "can't be ended: QEMU closed its QMP connection");
        }
    }
}

#[test]
fn a_qemu_that_somebody_else_talks_to_is_not_taken_for_a_dead_one() {
    for standing in [Some(Standing::Arriving), Some(Standing::Here), None] {
        let dir = TestDir::new();
        // QEMU serves one client at a time.
        let machine = leave(dir.path(), standing, true, false);
        let registry = open(dir.path());
        assert!(machine.process.is_alive(), "{standing:?}");
        assert_unreadable(&registry, "its QEMU");
        assert!(registry.forget_unreadable("web1").is_err());
        assert_unreadable(&registry, "its QEMU");
        machine.quit().unwrap();
        registry.forget_unreadable("web1").unwrap();
    }
}

#[test]
fn images_of_a_vm_that_may_have_been_here_stay() {
    let dir = TestDir::new();
    let image = dir.path().join("disk.img");
    fs::write(&image, "its only copy").unwrap();
    let machine = leave(dir.path(), Some(Standing::Arriving), true, false);
    let vm = StateDir::open(dir.path()).unwrap().vm("web1");
    images::note(&vm, std::slice::from_ref(&image), None).unwrap();
    machine.quit().unwrap();
    let registry = open(dir.path());
    let dead = registry.show("web1").unwrap();
    assert_eq!(dead.status, VmStatus::Dead);
    assert!(dead.problem.unwrap().contains("was arriving"));
    registry.stop("web1", FORCE).unwrap();
    assert!(image.exists() && !vm.exists());
}

#[test]
fn a_directory_that_nothing_was_started_from_goes() {
    let dir = TestDir::new();
    let state = StateDir::open(dir.path()).unwrap();
    for (name, file) in [("web1", None), ("web2", Some("record.new")), ("web3", Some("qemu.log"))] {
        fs::create_dir(state.vm(name)).unwrap();
        if let Some(file) = file {
            fs::write(state.vm(name).join(file), "").unwrap();
        }
    }
    drop(state);
    let registry = open(dir.path());
    let names: Vec<String> = registry.list().into_iter().map(|vm| vm.name).collect();
    assert_eq!(names, ["web3"]);
    assert_eq!(fs::read_dir(registry.state().vms()).unwrap().count(), 1);
}

#[test]
fn an_arrival_that_cannot_be_noted_stays_and_is_noted_later() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let mut claim = registry.expect("web1", "deadbeef", "host-a").unwrap();
    claim.note_starting().unwrap();
    let argv = request("web1").argv;
    let start = Start {
        name: "web1",
        argv: &argv,
        cwd: Path::new("/"),
        dir: &claim.dir,
        incoming: true,
        machine: None,
        by: By::Operator,
        user: None,
        guest_port: GuestPort::None,
        knows_legacy_ack: false,
        up_max: UP_MAX,
        idle_max: UP_MAX,
    };
    let pid = claim.fill(machine::start(&start).unwrap(), "").unwrap().machine().unwrap();
    let pid = pid.process.pid();
    claim.note(Standing::Arriving).unwrap();
    // As on a full disk: nothing can replace the record.
    let record = claim.dir.join("record.json");
    let kept = fs::read(&record).unwrap();
    fs::remove_file(&record).unwrap();
    fs::create_dir(&record).unwrap();
    claim.adopt().unwrap_err();
    claim.free();
    assert!(is_alive(pid));
    let problem = registry.show("web1").unwrap().problem.unwrap();
    assert!(problem.contains("can't be written") && problem.contains("make room"), "{problem}");
    registry.note_here("web1").unwrap_err();
    fs::remove_dir(&record).unwrap();
    fs::write(&record, kept).unwrap();
    registry.note_here("web1").unwrap();
    assert_eq!(registry.show("web1").unwrap().problem, None);
    let vm = registry.state().vm("web1");
    assert_eq!(Record::read(&vm).unwrap().standing, Standing::Here);
    registry.stop("web1", FORCE).unwrap();
    registry.note_here("web1").unwrap();
}
