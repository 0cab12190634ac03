use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use api::{BoundsChange, Phase, ResolveRequest, ResolveSide, RunRequest, StopHow, VmStatus};
use parking_lot::Mutex;
use qemu::probe::Probes;
use qemu::programs::Programs;
use switchover::MigrationId;
use switchover::journal::{Journal, JournalDir, Listed, Opened};
use switchover::source::Record;
use test_scope::TestDir;

use super::*;
use crate::config::PeerEntry;
use crate::events::Limits;
use crate::moves::history::reports;
use crate::moves::history::table::Entry;
use crate::peers::Peers;
use crate::state::StateDir;
use crate::vms::registry::Held;

mod upgrades;

struct Site {
    registry: Arc<Registry>,
    _dir: TestDir,
}

impl Site {
    /// A host with one VM, `web1`: a QEMU without a guest.
    fn new() -> Self {
        let dir = TestDir::new();
        let state = StateDir::open(dir.path()).unwrap();
        let registry = Arc::new(Registry::open(state, &Held::default()).unwrap());
        let qemu =
            std::env::var("DROVEWAY_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".to_owned());
        let rest = "-machine q35,accel=tcg -m 32 -nodefaults -display none -S";
        let argv = std::iter::once(qemu).chain(rest.split(' ').map(str::to_owned)).collect();
        let (cwd, share_domain) = ("/".to_owned(), String::new());
        let name = "web1".to_owned();
        let (guest_port, free_page_hint, hand_over) = (false, false, false);
        let request =
            RunRequest { name, argv, cwd, share_domain, guest_port, free_page_hint, hand_over };
        registry.run(&request, &Probes::new(Arc::new(Programs::usual(None)))).unwrap();
        Self { registry, _dir: dir }
    }

    fn migrations(&self, mover: Box<Mover>) -> Arc<Migrations> {
        let peer = |name: &str, address: &str| PeerEntry {
            name: name.to_owned(),
            rack: None,
            address: address.parse().unwrap(),
            nics: Vec::new(),
            carry_address: None,
            carry_ports: None,
            uplink: None,
        };
        let routes = Routes {
            peers: Peers::new(
                vec![peer("near", "127.0.0.1:7450"), peer("far", "10.9.9.9:7450")],
                None,
            ),
            insecure_plaintext: false,
        };
        let journals = JournalDir::open(&self.registry.state().journals()).unwrap();
        let local = Local {
            agent: "here".to_owned(),
            security: identity::Security::Plaintext,
            nics: Vec::new(),
            resources: engine::Resources::new(128 << 20, Vec::new()),
            programs: Arc::new(qemu::programs::Programs::usual(None)),
            scratch: self.registry.state().scratch(),
            fixed_cost: Arc::default(),
            journals: journals.clone(),
            quota_notes: None,
            agent_port: 7450,
            cpu_floor: api::CpuFloor::try_from(50_u8).unwrap(),
            waits: engine::Waits::default(),
            sharing: None,
            manager: None,
            xen: None,
        };
        let settlers = Settlers::new(
            Arc::clone(&self.registry),
            Events::new(Limits::default()).unwrap(),
            Arc::new(History::open("here", self.registry.state().reports())),
            journals,
            "here",
            identity::Security::Plaintext,
            Peers::default(),
        );
        Arc::new(Migrations::new(&settlers, local, routes, mover))
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = self.registry.stop("web1", StopHow { force: true, timeout_s: 0 });
    }
}

fn request(vm: &str, to: &str) -> MigrateRequest {
    serde_json::from_value(serde_json::json!({ "vm": vm, "to": to })).unwrap()
}

fn ended(watch: &Watch, outcome: Outcome) -> Migrated {
    let report = reports::empty(&watch.progress().1, outcome);
    Migrated { report, settlement: engine::Settlement::Settled }
}

fn never() -> Box<Mover> {
    Box::new(|_, _, _, _, _| panic!("nothing was to be moved"))
}

/// Follows a migration as a watcher does.
fn follow(migrations: &Migrations, id: &str) -> Progress {
    let mut version = 0;
    loop {
        let (next, progress) = migrations.wait(id, version, Duration::from_secs(1)).unwrap();
        if progress.outcome.is_some() {
            return progress;
        }
        version = next;
    }
}

#[test]
fn a_migration_that_arrives_is_commanded_where_it_begins() {
    let site = Site::new();
    let migrations = site.migrations(never());
    let claim = site.registry.expect("web2", "deadbeef", "host-a").unwrap();
    let wait = Duration::from_secs(1);
    let change = serde_json::from_str(r#"{ "priority": "high" }"#).unwrap();
    for error in [
        migrations.cancel("deadbeef").unwrap_err(),
        migrations.set("deadbeef", change).unwrap_err(),
        migrations.wait("deadbeef", 0, wait).unwrap_err(),
        migrations.report("deadbeef").unwrap_err(),
    ] {
        let error = error.to_string();
        assert!(error.contains("brings web2 here: repeat this on the source host"), "{error}");
    }
    drop(claim);
    let error = migrations.cancel("deadbeef").unwrap_err().to_string();
    assert!(error.contains("no migration `deadbeef` here"), "{error}");
}

#[test]
fn what_cannot_be_moved_is_refused_with_the_reason() {
    let site = Site::new();
    let migrations = site.migrations(never());
    for (vm, to, says) in [
        ("web1", "here", "this host"),
        ("web1", "nowhere", "peers file; there is: near, far"),
        ("web1", "far", "`droveway ca issue here`"),
        ("web2", "near", "no VM `web2`"),
    ] {
        let error = migrations.start(request(vm, to)).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    let none = MigrateRequest { downtime_ms: 0, ..request("web1", "near") };
    assert!(migrations.start(none).is_err());
    let (downtime_ms, blackout_max_s) = (4000, Some(3));
    let short = MigrateRequest { downtime_ms, blackout_max_s, ..request("web1", "near") };
    let error = migrations.start(short).unwrap_err().to_string();
    assert!(error.contains("--blackout-max"), "{error}");
    let endless = MigrateRequest { timeout_s: Some(u64::MAX), ..request("web1", "near") };
    let error = migrations.start(endless).unwrap_err().to_string();
    assert!(error.contains("outside 1 to 86400"), "{error}");
    assert!(migrations.list().is_empty());
    assert!(site.registry.show("web1").unwrap().migration.is_none());
}

#[test]
fn a_cpu_floor_is_that_of_the_request_or_the_agent_and_never_with_disks() {
    let site = Site::new();
    let migrations = site.migrations(never());
    let floor = |percent: Option<u8>, disks: Option<&str>| {
        let mut request = request("web1", "near");
        request.bounds.cpu_floor = percent.map(|percent| percent.try_into().unwrap());
        request.disks = disks.map(str::to_owned);
        migrations.cpu_floor(&request).map(|floor| floor.map(u8::from))
    };
    assert_eq!(floor(None, None), Ok(Some(50)));
    assert_eq!(floor(Some(20), None), Ok(Some(20)));
    assert_eq!(floor(Some(100), None), Ok(None));
    assert_eq!(floor(None, Some("all")), Ok(None));
    assert_eq!(floor(Some(100), Some("all")), Ok(None));
    let error = floor(Some(20), Some("all")).unwrap_err().to_string();
    assert!(error.contains("while disks move"), "{error}");
    // A domain of Xen has that of the agent too.
    assert_eq!(migrations.floor_for(None).map(u8::from), Some(50));
    assert_eq!(migrations.floor_for(Some(api::CpuFloor::ALL)), None);
}

#[test]
fn a_vm_that_moved_is_removed_before_the_end_is_reported() {
    let site = Site::new();
    let migrations = site.migrations(Box::new(|_, _, vm, _, watch| {
        vm.machine.quit().unwrap();
        ended(watch, Outcome::Done)
    }));
    let id = migrations.start(request("web1", "near")).unwrap();
    let last = follow(&migrations, &id);
    assert_eq!(last.outcome, Some(Outcome::Done));
    assert!(site.registry.list().is_empty());
    assert_eq!(migrations.report(&id).unwrap().vm, "web1");
    assert!(migrations.cancel(&id).unwrap_err().to_string().contains("has ended"));

    let later = site.migrations(never());
    assert_eq!(later.report(&id).unwrap().outcome, Outcome::Done, "reports survive the agent");
    assert_eq!(later.show(&id).unwrap().outcome, Some(Outcome::Done));
    assert_eq!(follow(&later, &id).vm, "web1");
    assert!(later.cancel(&id).unwrap_err().to_string().contains("has ended"));
}

#[test]
fn a_fault_in_the_engine_ends_one_migration_and_nothing_else() {
    let site = Site::new();
    let migrations = site.migrations(Box::new(|_, _, _, _, _| panic!("as a test wants it")));
    let id = migrations.start(request("web1", "near")).unwrap();
    let last = follow(&migrations, &id);
    assert!(!last.in_doubt);
    assert!(
        matches!(last.outcome, Some(Outcome::Failed(why)) if why.contains("droveway show web1"))
    );
    let vm = site.registry.show("web1").unwrap();
    assert_eq!((vm.status, vm.migration), (VmStatus::Paused, None));
    let again = migrations.start(request("web1", "near")).unwrap();
    assert_ne!(id, again);
    follow(&migrations, &again);
    let listed: Vec<String> = migrations.list().into_iter().map(|one| one.id).collect();
    assert_eq!(listed, [again, id], "the latest first");
}

/// Moves `vm` until these records are in its journal, and no further.
fn fails_at(records: &'static [Record]) -> Box<Mover> {
    Box::new(move |local, peer, vm, _, watch| {
        let id = MigrationId::new(&watch.progress().1.id).unwrap();
        let opened = Opened {
            migration: MigrationId::random().unwrap(),
            vm: vm.name.clone(),
            peer: peer.name.clone(),
            // Nothing listens there.
            peer_address: "127.0.0.1:1".to_owned(),
            run: false,
            qemu: serde_json::to_value(vm.machine.record()).unwrap(),
            listed: Some(Listed::now(id)),
            handed_over: false,
        };
        let mut journal: Journal<Record> = local.journals.create(opened).unwrap();
        records.iter().for_each(|record| journal.append(record).unwrap());
        panic!("as a test wants it");
    })
}

/// The journal says that the VM belongs to the other host, so no operation is permitted on it
/// here until that is settled.
#[test]
fn after_a_fault_past_the_commit_the_vm_is_held_until_the_operator_decides() {
    let site = Site::new();
    let migrations = site.migrations(fails_at(&[Record::Committed { run: false }]));
    let id = migrations.start(request("web1", "near")).unwrap();
    assert!(follow(&migrations, &id).in_doubt);
    assert!(migrations.report(&id).unwrap().in_doubt);
    let show = || site.registry.show("web1").unwrap();
    assert_eq!(show().status, VmStatus::InDoubt);
    for error in [
        migrations.start(request("web1", "near")).map(drop).unwrap_err(),
        site.registry.stop("web1", StopHow { force: true, timeout_s: 0 }).map(drop).unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(text.contains("not settled") || text.contains("in doubt"), "{text}");
    }
    let until = Instant::now() + Duration::from_secs(20);
    while show().problem.is_none() && Instant::now() < until {
        thread::yield_now();
    }
    let problem = show().problem.expect("it is said what to do");
    assert!(problem.contains("droveway resolve web1"), "{problem}");
    let told = || -> Vec<Happening> {
        let about_doubt = |one: &Happening| {
            matches!(one, Happening::VmInDoubt { .. } | Happening::VmSettled { .. })
        };
        migrations.events.told().into_iter().filter(about_doubt).collect()
    };
    while told().is_empty() && Instant::now() < until {
        thread::yield_now();
    }
    let vm = || "web1".to_owned();
    let in_doubt = Happening::VmInDoubt { vm: vm(), problem };
    assert_eq!(told(), std::slice::from_ref(&in_doubt));
    let decision = ResolveRequest { side: ResolveSide::Here, certain: true };
    migrations.settlers.decide("web1", decision).unwrap();
    assert_eq!(show().status, VmStatus::Paused);
    migrations.settlers.close();
    assert_eq!(told(), [in_doubt, Happening::VmSettled { vm: vm() }]);
    // So do all views of the migration, and after a restart.
    for migrations in [Arc::clone(&migrations), site.migrations(never())] {
        let report = migrations.report(&id).unwrap();
        assert!(!report.in_doubt && report.settled_unix_s.is_some());
        let stays = Outcome::Failed("the operator decided. The VM stays where it was".to_owned());
        assert_eq!(report.outcome, stays);
        for shown in [migrations.show(&id).unwrap(), migrations.list().remove(0)] {
            assert_eq!(
                (shown.id, shown.in_doubt, shown.outcome),
                (id.clone(), false, Some(stays.clone()))
            );
        }
    }
}

/// The other host may never come back, so the operator can end the wait for it.
#[test]
fn a_vm_that_was_taken_back_can_move_again_when_the_operator_says_so_again() {
    let site = Site::new();
    let migrations = site.migrations(fails_at(&[Record::Committed { run: false }]));
    let id = migrations.start(request("web1", "near")).unwrap();
    follow(&migrations, &id);
    let decision = ResolveRequest { side: ResolveSide::Here, certain: true };
    migrations.settlers.decide("web1", decision).unwrap();
    assert_eq!(site.registry.show("web1").unwrap().status, VmStatus::Paused);
    let denied = migrations.start(request("web1", "near")).unwrap_err();
    assert_eq!(denied.code(), ErrorCode::VmInDoubt);
    assert!(denied.to_string().contains("`droveway resolve web1 --here`"), "{denied}");

    migrations.settlers.decide("web1", decision).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while migrations.settlers.keeps_here("web1").is_err() && Instant::now() < until {
        thread::yield_now();
    }
    assert_eq!(migrations.settlers.keeps_here("web1"), Ok(()));
    let journals = JournalDir::open(&site.registry.state().journals()).unwrap();
    assert!(journals.contents().unwrap().is_empty());
    let denied = migrations.settlers.decide("web1", decision).unwrap_err();
    assert_eq!(denied.code(), ErrorCode::VmNotInDoubt);
    migrations.settlers.close();
}

#[test]
fn after_a_fault_before_the_commit_the_vm_is_settled_and_free() {
    let site = Site::new();
    let migrations = site.migrations(fails_at(&[Record::Stopped { run: false }]));
    let id = migrations.start(request("web1", "near")).unwrap();
    follow(&migrations, &id);
    let until = Instant::now() + Duration::from_secs(20);
    while site.registry.is_unsettled("web1") && Instant::now() < until {
        thread::yield_now();
    }
    assert_eq!(site.registry.show("web1").unwrap().status, VmStatus::Paused);
    let journals = JournalDir::open(&site.registry.state().journals()).unwrap();
    assert_eq!(journals.contents().unwrap().len(), 0);
    migrations.settlers.close();
}

#[test]
fn while_it_moves_a_vm_is_not_moved_or_stopped() {
    let site = Site::new();
    let (go, gone) = channel::<()>();
    let gone = Mutex::new(gone);
    let migrations = site.migrations(Box::new(move |_, _, _, _, watch| {
        // Returns when the test drops its end.
        let _ = gone.lock().recv();
        ended(watch, Outcome::Cancelled)
    }));
    let id = migrations.start(request("web1", "near")).unwrap();
    for error in [
        migrations.start(request("web1", "near")).map(drop).unwrap_err(),
        site.registry.stop("web1", StopHow { force: true, timeout_s: 0 }).map(drop).unwrap_err(),
    ] {
        assert!(error.to_string().contains(&format!("droveway cancel {id}")), "{error}");
    }
    let running = migrations.report(&id).unwrap_err();
    assert!(running.to_string().contains("still running"), "{running}");
    let change = |json: &str| serde_json::from_str::<BoundsChange>(json).unwrap();
    let limited = change(r#"{"limit_bits_per_s":1000000}"#);
    let bounds = migrations.set(&id, limited.clone()).unwrap();
    assert_eq!(bounds.limit_bits_per_s, api::BitRate::from_bits(1_000_000));
    let bounds = migrations.set(&id, change(r#"{"priority":"high"}"#)).unwrap();
    assert_eq!(bounds.limit_bits_per_s, api::BitRate::from_bits(1_000_000), "it stays");
    migrations.cancel(&id).unwrap();
    drop(go);
    migrations.close(Instant::now());
    assert_eq!(migrations.show(&id).unwrap().outcome, Some(Outcome::Cancelled));
    assert!(migrations.set(&id, limited).unwrap_err().to_string().contains("has ended"));
    assert_eq!(migrations.start(request("web1", "near")), Err(Denied::Closing));
    assert!(site.registry.show("web1").unwrap().migration.is_none());
}

/// Lists a migration to `near` that is carried for another program.
fn list_carried(migrations: &Migrations, id: &str, vm: &str, phase: Phase) {
    let progress = Progress { phase, ..Progress::new((id, vm), ("here", "near"), 0) };
    let watch = Arc::new(Watch::new(progress, Bounds::default()));
    let what = What::Migration;
    let (thread, report, settled) = (None, None, None);
    let entry = Entry { number: 1, what, watch, thread, report, settled };
    migrations.history.table.lock().entries.insert(id.to_owned(), entry);
}

/// As one in post-copy, which may have a second connection for urgent pages.
#[test]
fn a_migration_past_its_commit_is_not_cancelled_but_waited_for() {
    let site = Site::new();
    let migrations = site.migrations(never());
    let (main, urgent, other) = ("0000000a", "0000000b", "0000000c");
    list_carried(&migrations, main, "db1", Phase::Committed);
    list_carried(&migrations, urgent, "db1", Phase::FirstPass);
    list_carried(&migrations, other, "db2", Phase::FirstPass);
    for id in [main, urgent] {
        let denied = migrations.cancel(id).unwrap_err();
        assert_eq!(denied.code(), ErrorCode::MigrationCommitted, "{denied}");
    }
    migrations.cancel(other).unwrap();
    let end = |id: &str| {
        let progress = migrations.show(id).unwrap();
        migrations.keep_quietly(id, reports::empty(&progress, Outcome::Done));
    };
    end(other);
    thread::scope(|scope| {
        let closing = scope.spawn(|| {
            migrations.close(Instant::now() + Duration::from_secs(60));
            [main, urgent].map(|id| migrations.show(id).unwrap().outcome)
        });
        while !migrations.history.table.lock().closing {
            thread::yield_now();
        }
        end(main);
        end(urgent);
        let done = Some(Outcome::Done);
        assert_eq!(closing.join().unwrap(), [done.clone(), done], "it waits for both");
    });

    // The wait has an end.
    list_carried(&migrations, "0000000d", "db1", Phase::Committed);
    migrations.close(Instant::now());
}

/// While one goes there, a second connection of QEMU's may be silent: it may turn to post-copy.
#[test]
fn a_vm_that_is_carried_is_known_by_its_host_until_it_has_ended() {
    let site = Site::new();
    let migrations = site.migrations(never());
    assert!(!migrations.is_carrying_to("near"));
    let all = [What::Migration, What::Disk, What::Connection];
    for (id, what) in ["0000000a", "0000000b", "0000000c"].into_iter().zip(all) {
        let seen = Mutex::new(None);
        migrations.carry((id, "db1", "near"), Bounds::default(), what, |watch| {
            *seen.lock() = Some([
                migrations.is_carrying_to("near"),
                migrations.is_carrying("db1", "near"),
                migrations.is_carrying_to("far"),
                migrations.is_carrying("db2", "near"),
            ]);
            reports::empty(&watch.progress().1, Outcome::Done)
        });
        let is_vm = what == What::Migration;
        assert_eq!(*seen.lock(), Some([is_vm, is_vm, false, false]), "{what:?}");
        assert!(!migrations.is_carrying_to("near"), "{what:?}");
    }
}

/// So that it ends with one that fails.
#[test]
fn another_connection_of_a_vm_that_is_carried_knows_its_migration() {
    let site = Site::new();
    let migrations = site.migrations(never());
    let begin = |id, vm, what, run: &dyn Fn(&Arc<Watch>)| {
        migrations.carry((id, vm, "near"), Bounds::default(), what, |watch| {
            run(watch);
            reports::empty(&watch.progress().1, Outcome::Done)
        });
    };
    begin("0000000a", "db1", What::Migration, &|main| {
        assert!(main.main().is_none());
        begin("0000000b", "db1", What::Connection, &|channel| {
            assert!(channel.main().is_some_and(|it| Arc::ptr_eq(it, main)));
        });
        begin("0000000c", "db1", What::Disk, &|disk| assert!(disk.main().is_none()));
        begin("0000000d", "db2", What::Connection, &|other| assert!(other.main().is_none()));
        // It may be of either.
        begin("0000000f", "db1", What::Migration, &|_| {
            begin("00000010", "db1", What::Connection, &|one| assert!(one.main().is_none()));
        });
    });
    begin("0000000e", "db1", What::Connection, &|late| assert!(late.main().is_none()));
}

/// A VM with disks is one VM that moves.
#[test]
fn a_disk_that_is_carried_is_listed_and_does_not_count_as_a_vm() {
    let site = Site::new();
    let migrations = site.migrations(never());
    for (id, what, vms) in [("0000000a", What::Migration, 1), ("0000000b", What::Disk, 0)] {
        let seen = Mutex::new(None);
        migrations.carry((id, "db1", "near"), Bounds::default(), what, |watch| {
            let is_listed = migrations.list().iter().any(|one| one.id == id);
            *seen.lock() = Some((is_listed, migrations.moving().len()));
            reports::empty(&watch.progress().1, Outcome::Done)
        });
        assert_eq!(*seen.lock(), Some((true, vms)), "{what:?}");
        assert!(migrations.moving().is_empty(), "it has ended");
    }
}

#[test]
fn an_unknown_migration_is_refused() {
    let site = Site::new();
    let migrations = site.migrations(never());
    for id in ["deadbeef", "../../etc/passwd", ""] {
        assert!(
            matches!(migrations.show(id), Err(denied) if denied.code() == ErrorCode::NoSuchMigration)
        );
        assert!(
            matches!(migrations.report(id), Err(denied) if denied.code() == ErrorCode::NoSuchMigration)
        );
        assert!(
            matches!(migrations.cancel(id), Err(denied) if denied.code() == ErrorCode::NoSuchMigration)
        );
        assert!(
            matches!(migrations.wait(id, 0, Duration::ZERO), Err(denied) if denied.code() == ErrorCode::NoSuchMigration)
        );
    }
}
