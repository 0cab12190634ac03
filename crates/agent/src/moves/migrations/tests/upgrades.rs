//! Migrations within this host, with a real QEMU at both ends.

use api::UpgradeRequest;

use super::*;
use crate::examiner::Examiner;

fn examiner(migrations: &Migrations) -> Arc<Examiner> {
    let (registry, local) = (Arc::clone(&migrations.registry), migrations.local.clone());
    let listen = "127.0.0.1:7450".parse().unwrap();
    let routes = migrations.routes.clone();
    let (nic_speeds, passwords) = (Vec::new(), Vec::new());
    Arc::new(Examiner::new(registry, local, routes, listen, nic_speeds, None, passwords))
}

/// QEMUs of old releases lose writes under TCG.
fn request() -> UpgradeRequest {
    UpgradeRequest { accept_lost_writes: true, ..UpgradeRequest::default() }
}

#[test]
fn a_vm_gets_another_qemu_twice_and_keeps_its_name() {
    let site = Site::new();
    let migrations = site.migrations(Box::new(engine::migrate));
    let examiner = examiner(&migrations);
    let dir = site.registry.state().vm("web1");
    let mut pid = site.registry.show("web1").unwrap().pid;
    for (seat, other) in [(dir.join("2"), dir.clone()), (dir.clone(), dir.join("2"))] {
        let former = site.registry.vm("web1").unwrap().machine().unwrap();
        let id = migrations.upgrade(&examiner, "web1", request()).unwrap();
        let last = follow(&migrations, &id);
        assert_eq!(last.outcome, Some(Outcome::Done), "{last:?}");
        let report = migrations.report(&id).unwrap();
        assert_eq!((report.from.as_str(), report.to.as_str()), ("here", "here"));

        let now = site.registry.show("web1").unwrap();
        assert_ne!(now.pid, pid);
        pid = now.pid;
        assert_eq!((now.status, now.migration, now.problem), (VmStatus::Paused, None, None));
        assert!(!former.process.is_alive());
        assert!(seat.join("qmp").exists() && !other.join("qmp").exists());
        assert!(!dir.join("next.json").exists());
        assert!(site.registry.next("web1").is_none());
        assert_eq!(site.registry.promised(), 0);
    }
    let journals = JournalDir::open(&site.registry.state().journals()).unwrap();
    assert!(journals.contents().unwrap().is_empty());
    assert!(migrations.last_that_moved("web1").is_none(), "it is where it was");
}

#[test]
fn a_running_vm_runs_on_in_its_next_qemu() {
    let site = Site::new();
    site.registry.vm("web1").unwrap().machine().unwrap().qmp.cont().unwrap();
    let migrations = site.migrations(Box::new(engine::migrate));
    let id = migrations.upgrade(&examiner(&migrations), "web1", request()).unwrap();
    assert_eq!(follow(&migrations, &id).outcome, Some(Outcome::Done));
    assert_eq!(site.registry.show("web1").unwrap().status, VmStatus::Running);
}

/// Its sides, its machines and its seat: nothing of it is left.
#[test]
fn a_vm_that_gets_no_other_qemu_stays_as_it_was() {
    let movers: [Box<Mover>; 2] = [
        Box::new(|_, _, _, _, watch| ended(watch, Outcome::Failed("as a test wants".to_owned()))),
        Box::new(|_, _, _, _, _| panic!("as a test wants it")),
    ];
    for mover in movers {
        let site = Site::new();
        let pid = site.registry.show("web1").unwrap().pid;
        let migrations = site.migrations(mover);
        let id = migrations.upgrade(&examiner(&migrations), "web1", request()).unwrap();
        assert!(matches!(follow(&migrations, &id).outcome, Some(Outcome::Failed(_))));
        let now = site.registry.show("web1").unwrap();
        assert_eq!((now.pid, now.status, now.migration), (pid, VmStatus::Paused, None));
        assert!(!site.registry.state().vm("web1").join("next.json").exists());
    }
}

/// The next QEMU exists when the source's side is cancelled.
#[test]
fn a_cancelled_upgrade_leaves_no_second_qemu() {
    let site = Site::new();
    let pid = site.registry.show("web1").unwrap().pid;
    let seen = Arc::new(Mutex::new(None));
    let mover: Box<Mover> = {
        let (seen, registry) = (Arc::clone(&seen), Arc::clone(&site.registry));
        Box::new(move |local, peer, vm, request, watch| {
            let (registry, watch_too) = (Arc::clone(&registry), Arc::clone(watch));
            let cancels = thread::spawn(move || {
                let until = Instant::now() + Duration::from_secs(20);
                while Instant::now() < until {
                    if let Some(next) = registry.next("web1") {
                        watch_too.cancel();
                        return next.machine().map(|machine| machine.process.pid());
                    }
                    thread::yield_now();
                }
                None
            });
            let migrated = engine::migrate(local, peer, vm, request, watch);
            *seen.lock() = cancels.join().unwrap();
            migrated
        })
    };
    let migrations = site.migrations(mover);
    let id = migrations.upgrade(&examiner(&migrations), "web1", request()).unwrap();
    let last = follow(&migrations, &id);
    assert_eq!(last.outcome, Some(Outcome::Cancelled), "{last:?}");
    let next = seen.lock().take().unwrap();
    assert!(!qemu::process::Process::now(next).is_ok_and(|process| process.is_alive()));
    assert_eq!(site.registry.show("web1").unwrap().pid, pid);
    assert!(!site.registry.state().vm("web1").join("2").exists());
}

#[test]
fn a_vm_that_can_get_no_other_qemu_is_not_touched() {
    let site = Site::new();
    let migrations = site.migrations(never());
    let examiner = examiner(&migrations);
    let program = Some("/nonexistent/qemu".to_owned());
    let elsewhere = UpgradeRequest { program, ..request() };
    for (vm, request, says) in
        [("web2", request(), "no VM `web2`"), ("web1", elsewhere, "/nonexistent/qemu")]
    {
        let refused = migrations.upgrade(&examiner, vm, request).unwrap_err().to_string();
        assert!(refused.contains(says), "{refused}");
    }
    assert!(migrations.list().is_empty());
    assert!(site.registry.show("web1").unwrap().migration.is_none());
    let plan = migrations.plan_upgrade(&examiner, "web1", None).unwrap();
    assert_eq!((plan.how, plan.copied_bytes), (api::UpgradeHow::Copied, 32 << 20));
}
