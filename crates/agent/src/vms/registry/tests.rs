use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{ErrorCode, StopEnd, StopHow};
use qemu::machine::{By, GuestPort, Machine, Start, UP_MAX};
use qemu::process::Process;
use qemu::programs::Programs;
use serde_json::json;
use test_scope::TestDir;

use super::*;
use crate::vms::record::{Record, Standing};

mod left_alone;
mod next;
mod sent_again;

/// A QEMU without a guest; not even its firmware runs.
fn request(name: &str) -> RunRequest {
    let qemu = std::env::var("DROVEWAY_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".to_owned());
    let rest = "-machine q35,accel=tcg -m 32 -nodefaults -display none -S";
    RunRequest {
        name: name.to_owned(),
        argv: std::iter::once(qemu).chain(rest.split(' ').map(str::to_owned)).collect(),
        cwd: "/".to_owned(),
        share_domain: "tenant-7".to_owned(),
        guest_port: false,
        free_page_hint: false,
        hand_over: false,
    }
}

fn open(dir: &Path) -> Arc<Registry> {
    Arc::new(Registry::open(StateDir::open(dir).unwrap(), &Held::default()).unwrap())
}

fn probes() -> Probes {
    Probes::new(Arc::new(Programs::usual(None)))
}

const FORCE: StopHow = StopHow { force: true, timeout_s: 0 };

fn is_alive(pid: u32) -> bool {
    Process::now(pid).is_ok_and(|process| process.is_alive())
}

/// Leaves what an agent leaves that crashes during an arrival.
fn leave_behind(dir: &Path, standing: Option<Standing>, incoming: bool) -> u32 {
    leave(dir, standing, incoming, !incoming).process.pid()
}

/// The same, running or not.
fn leave(dir: &Path, standing: Option<Standing>, incoming: bool, run: bool) -> Machine {
    let state = StateDir::open(dir).unwrap();
    let dir = state.vm("web1");
    fs::create_dir_all(&dir).unwrap();
    Record::starting().write(&dir).unwrap();
    let argv = request("web1").argv;
    let start = Start {
        name: "web1",
        argv: &argv,
        cwd: Path::new("/"),
        dir: &dir,
        incoming,
        machine: None,
        by: By::Operator,
        user: None,
        guest_port: GuestPort::None,
        knows_legacy_ack: false,
        up_max: UP_MAX,
        idle_max: UP_MAX,
    };
    let machine = machine::start(&start).unwrap();
    if run {
        machine.qmp.cont().unwrap();
    }
    if let Some(standing) = standing {
        Record::new(standing, Some(machine.record()), 32 << 20, "", "tenant-7")
            .write(&dir)
            .unwrap();
    }
    machine
}

#[test]
fn a_vm_is_started_shown_found_again_and_stopped() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let started = registry.run(&request("web1"), &probes()).unwrap();
    assert_eq!((started.status, started.ram_bytes), (VmStatus::Paused, 32 << 20));
    assert!(!started.attached);
    assert_eq!(registry.run(&request("web1"), &probes()).unwrap_err().code(), ErrorCode::VmExists);

    drop(registry);
    let registry = open(dir.path());
    let found = registry.show("web1").unwrap();
    assert_eq!((found.pid, found.status), (started.pid, VmStatus::Paused));
    assert_eq!(found.argv, request("web1").argv);
    assert_eq!([&started.share_domain, &found.share_domain], ["tenant-7"; 2]);
    let strange = RunRequest { share_domain: "a b".to_owned(), ..request("web2") };
    assert!(matches!(registry.run(&strange, &probes()), Err(Denied::Invalid(_))));

    let button = registry.stop("web1", StopHow { force: false, timeout_s: 1 }).unwrap_err();
    assert!(button.to_string().contains("--force"), "{button}");
    let too_long = StopHow { force: true, timeout_s: api::STOP_S_MAX + 1 };
    assert!(matches!(registry.stop("web1", too_long), Err(Denied::Invalid(_))));
    assert_eq!(registry.stop("web1", FORCE).unwrap().end, StopEnd::PlugPulled);
    assert!(!is_alive(started.pid));
    assert!(registry.list().is_empty());
    assert_eq!(fs::read_dir(registry.state().vms()).unwrap().count(), 0);
    assert_eq!(registry.stop("web1", FORCE).unwrap_err().code(), ErrorCode::NoSuchVm);
}

/// As after an arrival: the source's QEMU may have plugged memory that the one here starts
/// without.
#[test]
fn memory_that_was_plugged_since_is_counted() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let mut with_slot = request("web1");
    let memory = with_slot.argv.iter_mut().find(|arg| *arg == "32").unwrap();
    memory.push_str(",slots=1,maxmem=1G");
    assert_eq!(registry.run(&with_slot, &probes()).unwrap().ram_bytes, 32 << 20);
    let machine = registry.vm("web1").unwrap().machine().unwrap();
    let bytes = 128_u64 << 20;
    let backend = json!({ "qom-type": "memory-backend-ram", "id": "m0", "size": bytes });
    machine.qmp.execute("object-add", backend).unwrap();
    let device = json!({ "driver": "pc-dimm", "id": "d0", "memdev": "m0" });
    machine.qmp.execute("device_add", device).unwrap();
    assert_eq!(registry.show("web1").unwrap().ram_bytes, (32 << 20) + bytes);
    registry.stop("web1", FORCE).unwrap();
}

#[test]
fn the_helper_is_asked_where_there_is_a_port_and_the_vm_runs() {
    let dir = TestDir::new();
    let mut registry = open(dir.path());
    let with_port = RunRequest { guest_port: true, ..request("web1") };
    registry.run(&with_port, &probes()).unwrap();
    registry.run(&request("web2"), &probes()).unwrap();
    let helper = |registry: &Registry, name: &str| registry.examine(name).unwrap().helper;
    let found = helper(&registry, "web1");
    assert!(matches!(found, Some(GuestHelper::NotAsked { .. })), "{found:?}");
    for name in ["web1", "web2"] {
        registry.vm(name).unwrap().machine().unwrap().qmp.cont().unwrap();
    }
    for _ in 0..2 {
        let found = helper(&registry, "web1");
        assert!(matches!(found, Some(GuestHelper::Silent { .. })), "{found:?}");
        let found = helper(&registry, "web2");
        assert!(matches!(found, Some(GuestHelper::NoPort { .. })), "{found:?}");
        assert_eq!(registry.show("web1").unwrap().helper, None);
        // A restart of the agent keeps this.
        drop(registry);
        registry = open(dir.path());
        assert!(registry.vm("web1").unwrap().machine().unwrap().guest_port);
    }
    for name in ["web1", "web2"] {
        registry.stop(name, FORCE).unwrap();
    }
}

#[test]
fn a_dead_vm_stays_until_it_is_stopped() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let pid = registry.run(&request("web1"), &probes()).unwrap().pid;
    Process::now(pid).unwrap().kill().unwrap();
    Process::now(pid).map(|process| process.wait_exited(Duration::from_secs(10))).ok();
    // By the agent that started it, and by the next one.
    assert_dead(&registry, pid);
    drop(registry);
    let registry = open(dir.path());
    assert_dead(&registry, pid);
    assert_eq!(registry.stop("web1", FORCE).unwrap().end, StopEnd::WasDead);
    assert!(registry.list().is_empty());
}

#[test]
fn a_qemu_that_does_not_start_leaves_nothing() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let mut wrong = request("web1");
    wrong.argv.extend(["-machine".to_owned(), "nonsense".to_owned()]);
    let error = registry.run(&wrong, &probes()).unwrap_err();
    assert!(matches!(&error, Denied::Qemu(text) if text.contains("nsupported machine type")));
    assert!(registry.list().is_empty() && registry.is_free("web1"));
    assert_eq!(fs::read_dir(registry.state().vms()).unwrap().count(), 0);
}

#[test]
fn one_thing_happens_to_a_vm_at_a_time() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    registry.run(&request("web1"), &probes()).unwrap();
    registry.begin_move("web1", "deadbeef").unwrap();
    assert_eq!(registry.show("web1").unwrap().migration.as_deref(), Some("deadbeef"));
    for denied in [
        registry.stop("web1", FORCE).map(drop),
        registry.begin_move("web1", "cafe0000").map(drop),
        registry.expect("web1", "cafe0000", "host-a").map(drop),
    ] {
        assert!(denied.unwrap_err().to_string().contains("droveway cancel deadbeef"));
    }
    registry.stays("web1");
    registry.stop("web1", FORCE).unwrap();
}

#[test]
fn a_name_that_is_claimed_is_free_again_when_nothing_came_of_it() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let claim = registry.expect("web1", "deadbeef", "host-a").unwrap();
    assert!(!registry.is_free("web1"));
    assert!(!registry.wait_none_arriving(Duration::ZERO));
    claim.note_starting().unwrap();
    drop(claim);
    assert!(registry.is_free("web1"));
    assert!(registry.wait_none_arriving(Duration::ZERO));
    assert_eq!(fs::read_dir(registry.state().vms()).unwrap().count(), 0);
    let long = "n".repeat(registry.state().name_letters_max() + 1);
    assert!(registry.expect(&long, "deadbeef", "host-a").is_err());
}

#[test]
fn memory_that_is_promised_to_an_arriving_vm_is_not_promised_again() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let promise = |claim: &Claim, bytes: u64| {
        claim.promise(bytes, |others| {
            let fits = others + bytes <= 10 << 30;
            if fits { Ok(()) } else { Err(Denied::Local(format!("{others} are promised"))) }
        })
    };
    let one = registry.expect("web1", "deadbeef", "host-a").unwrap();
    let two = registry.expect("web2", "cafe0000", "host-a").unwrap();
    promise(&one, 8 << 30).unwrap();
    promise(&one, 9 << 30).expect("its own memory does not count");
    let denied = promise(&two, 2 << 30).unwrap_err();
    assert_eq!(denied, Denied::Local(format!("{} are promised", 9_u64 << 30)));
    promise(&two, 1 << 30).unwrap();
    assert_eq!(registry.promised(), 10 << 30, "though neither QEMU has answered yet");
    drop(one);
    assert_eq!(registry.promised(), 1 << 30);
    promise(&two, 10 << 30).expect("an arrival that ends frees what it was promised");
}

#[test]
fn no_vm_arrives_where_there_are_too_many() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    let expect = |name: &str| registry.expect(name, "deadbeef", "host-a");
    let mut claims: Vec<Claim> =
        (0..VMS_MAX).map(|nth| expect(&format!("vm{nth}")).unwrap()).collect();
    registry.unsettled("vm0");
    let refused = expect("web1").map(drop).unwrap_err();
    assert!(refused.to_string().contains("1024 VMs"), "{refused}");
    assert!(registry.is_free("web1") && !registry.state().vm("web1").exists());
    // The operator of this host decides.
    drop(registry.claim("web1", Busy::Starting).unwrap());
    claims.pop();
    drop(expect("web1").unwrap());
}

#[test]
fn half_an_arrival_is_removed_after_a_crash() {
    for standing in [Some(Standing::Arriving), None] {
        let dir = TestDir::new();
        let pid = leave_behind(dir.path(), standing, true);
        let registry = open(dir.path());
        assert!(registry.list().is_empty());
        assert!(!is_alive(pid), "{standing:?}");
        assert_eq!(fs::read_dir(registry.state().vms()).unwrap().count(), 0);
    }
}

#[test]
fn a_vm_that_runs_is_kept_even_if_its_record_came_too_late() {
    let dir = TestDir::new();
    let pid = leave_behind(dir.path(), Some(Standing::Arriving), false);
    let registry = open(dir.path());
    let kept = registry.show("web1").unwrap();
    assert_eq!((kept.pid, kept.status), (pid, VmStatus::Running));
    registry.stop("web1", FORCE).unwrap();
}

#[test]
fn a_migration_left_behind_that_cannot_be_undone_is_reported() {
    let dir = TestDir::new();
    let registry = open(dir.path());
    registry.run(&request("web1"), &probes()).unwrap();
    let note = registry.state().vm("web1").join("settings-before.json");
    drop(registry);
    fs::write(&note, "half a no").unwrap();
    let registry = open(dir.path());
    let problem = registry.show("web1").unwrap().problem.unwrap();
    assert!(problem.contains("settings-before.json"), "{problem}");
    drop(registry);
    fs::write(&note, r#"{"capabilities":{},"parameters":{}}"#).unwrap();
    let registry = open(dir.path());
    assert_eq!(registry.show("web1").unwrap().problem, None);
    assert!(!note.exists());
    registry.stop("web1", FORCE).unwrap();
}

#[test]
fn what_is_no_vm_is_left_alone() {
    let dir = TestDir::new();
    let state = StateDir::open(dir.path()).unwrap();
    fs::write(state.vms().join("README"), "").unwrap();
    fs::create_dir(state.vms().join("-x")).unwrap();
    drop(state);
    let registry = open(dir.path());
    assert!(registry.list().is_empty());
    assert_eq!(fs::read_dir(registry.state().vms()).unwrap().count(), 2);
}

#[test]
fn vms_are_scanned_from_their_start_and_after_a_restart_of_the_agent() {
    let dir = TestDir::new();
    let sharing = || dedup::destination::Sharing::start(b"secret".to_vec(), None).unwrap();
    let open = || {
        let holdings = crate::vms::holdings::Holdings::start(sharing(), 1.0).unwrap();
        let registry = Registry::open(StateDir::open(dir.path()).unwrap(), &Held::default());
        Arc::new(registry.unwrap().with_holdings(Some(holdings)))
    };
    let looked_at = |registry: &Registry| {
        let end = Instant::now() + Duration::from_secs(60);
        while registry.show("web1").unwrap().content.is_none_or(|known| known.rounds == 0) {
            assert!(Instant::now() < end, "nobody looks at it");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let registry = open();
    registry.run(&request("web1"), &probes()).unwrap();
    looked_at(&registry);
    drop(registry);
    let registry = open();
    looked_at(&registry);
    registry.stop("web1", FORCE).unwrap();
}

fn assert_dead(registry: &Registry, pid: u32) {
    let dead = registry.show("web1").unwrap();
    assert_eq!((dead.status, dead.pid), (VmStatus::Dead, pid));
    assert!(dead.problem.is_some());
    assert_eq!(registry.begin_move("web1", "deadbeef").unwrap_err().code(), ErrorCode::VmDead);
}
