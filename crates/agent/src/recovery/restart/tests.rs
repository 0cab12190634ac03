//! Journals that an earlier run left, and a VM that has had the name since.

use api::{RunRequest, StopHow, VmStatus};
use identity::Security;
use qemu::probe::Probes;
use qemu::programs::Programs;
use serde_json::json;
use switchover::MigrationId;
use switchover::journal::{Journal, JournalDir, Opened};
use test_scope::TestDir;

use super::super::Settlers;
use super::*;
use crate::events::{Events, Limits};
use crate::peers::Peers;
use crate::registry::{Held, Registry};
use crate::state::StateDir;

/// A host with a VM, `web1`: a QEMU without a guest.
fn host(dir: &TestDir) -> Arc<Registry> {
    let state = StateDir::open(dir.path()).unwrap();
    let registry = Arc::new(Registry::open(state, &Held::default()).unwrap());
    let qemu = std::env::var("DROVEWAY_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".to_owned());
    let rest = "-machine q35,accel=tcg -m 32 -nodefaults -display none -S";
    let request = RunRequest {
        name: "web1".to_owned(),
        argv: std::iter::once(qemu).chain(rest.split(' ').map(str::to_owned)).collect(),
        cwd: "/".to_owned(),
        share_domain: String::new(),
        guest_port: false,
        free_page_hint: false,
    };
    registry.run(&request, &Probes::new(Arc::new(Programs::usual(None)))).unwrap();
    registry
}

#[test]
fn the_end_of_an_earlier_switchover_leaves_another_vm_of_that_name_alone() {
    let dir = TestDir::new();
    let registry = host(&dir);
    let machine = registry.vm("web1").unwrap().machine().unwrap();
    // The QEMU of the VM that had the name before.
    let mut gone = serde_json::to_value(machine.record()).unwrap();
    gone["process"]["start_time"] = json!(1);
    let opened = || Opened {
        migration: MigrationId::random().unwrap(),
        vm: "web1".to_owned(),
        peer: "host-b".to_owned(),
        // Nothing listens there.
        peer_address: "127.0.0.1:1".to_owned(),
        run: false,
        qemu: gone.clone(),
    };
    let journals = JournalDir::open(&registry.state().journals()).unwrap();
    let mut left: Journal<source::Record> = journals.create(opened()).unwrap();
    for record in [
        source::Record::Stopped { run: false },
        source::Record::Committed { run: false },
        source::Record::Dropped,
    ] {
        left.append(&record).unwrap();
    }
    let mut came: Journal<destination::Record> = journals.create(opened()).unwrap();
    let reason = "as a test wants it".into();
    came.append(&destination::Record::Refused { reason }).unwrap();
    drop((left, came));
    // Its own switchover is unsettled too.
    registry.unsettled("web1");
    let settlers = Settlers::new(
        Arc::clone(&registry),
        Events::new(Limits::default()).unwrap(),
        journals.clone(),
        "host-a",
        Security::Plaintext,
        Peers::default(),
    );
    settlers.take_up(journals.contents().unwrap());
    settlers.close();
    assert!(registry.is_unsettled("web1") && machine.process.is_alive());
    assert!(registry.state().vm("web1").join("record.json").exists());
    registry.stays("web1");
    assert_eq!(registry.show("web1").unwrap().status, VmStatus::Paused);
    registry.stop("web1", StopHow { force: true, timeout_s: 0 }).unwrap();
}
