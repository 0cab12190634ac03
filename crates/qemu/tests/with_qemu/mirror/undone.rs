//! Whenever mirrors are cancelled, the source is as it was, and nothing of the agent is
//! left in QEMU.

use std::mem::ManuallyDrop;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use qemu::mirror::{self, Late, PREFIX};
use qemu::outgoing::{self, Outgoing, StreamKind};
use qemu::qmp::{Qmp, RunState};
use serde_json::{Value, json};

use super::{Destination, MIB, Source, WAIT, pauses};
use crate::migrate::{PLAIN, carry, socket};
use crate::start;

#[test]
fn undone_at_each_step_the_source_is_as_it_was() {
    for step in 0..5 {
        let source = Source::start();
        let disks = source.disks();
        let there = Destination::of(&source, &disks);
        let mirrors = there.mirrors(&source, &disks);
        if step >= 1 {
            mirrors.wait_ready(WAIT).unwrap();
        }
        if step >= 2 {
            for disk in &disks {
                let late = mirrors.converge(&disk.name, 4 * MIB).unwrap();
                let can_change = source.vm.qmp.version() >= (8, 2, 0);
                let throttled = Late::Throttled { bytes_per_s: 4 * MIB };
                assert_eq!(late, if can_change { Late::WriteBlocking } else { throttled });
                mirrors.slow(&disk.name, 2 * MIB).unwrap();
                mirrors.converge(&disk.name, MIB).unwrap();
            }
            assert!(mirrors.converge("d7", MIB).is_err());
        }
        let outgoing = (step >= 3).then(|| {
            let (outgoing, at) = there.migrate(&source);
            assert!(pauses(&outgoing, WAIT));
            (outgoing, at)
        });
        if step >= 4 {
            mirrors.finish(WAIT).unwrap();
        }
        if step == 0 {
            drop(mirrors);
        } else {
            mirrors.undo().unwrap();
        }
        if let Some((outgoing, _at)) = outgoing {
            outgoing.back_out(true).unwrap();
        }
        source.is_unhurt();
        let made: Vec<PathBuf> = there.prepared.created().map(Path::to_owned).collect();
        assert_eq!(made.len(), 2);
        drop(there);
        assert!(made.iter().all(|path| !path.exists()), "step {step}");
    }
}

/// Neither had a limit before.
#[test]
fn two_throttled_disks_share_no_limit() {
    let source = Source::start();
    let disks = source.disks();
    let there = Destination::of(&source, &disks);
    let mirrors = there.mirrors(&source, &disks);
    mirrors.wait_ready(WAIT).unwrap();
    for (disk, bytes_per_s) in disks.iter().zip([2 * MIB, 3 * MIB]) {
        mirrors.slow(&disk.name, bytes_per_s).unwrap();
    }
    let all = source.vm.qmp.execute("query-block", json!({})).unwrap();
    let limit = |drive: &Value| drive["inserted"]["bps_wr"].as_u64().unwrap();
    let mut limits: Vec<u64> = all.as_array().unwrap().iter().map(limit).collect();
    limits.sort_unstable();
    assert_eq!(limits, [2 * MIB, 3 * MIB]);
    mirrors.undo().unwrap();
    source.is_unhurt();
}

#[test]
fn what_a_crashed_agent_left_is_removed_and_limits_are_as_their_owner_set_them() {
    let source = Source::start();
    let limits = json!({"id": "/machine/peripheral/disk1/virtio-backend", "bps": 0, "bps_rd": 0, "bps_wr": 50_000_000, "iops": 0,
        "iops_rd": 7000, "iops_wr": 0, "bps_wr_max": 60_000_000, "group": "theirs"});
    source.vm.qmp.execute("block_set_io_throttle", limits).unwrap();
    let shown = |qmp: &Qmp| -> Vec<Value> {
        let all = qmp.execute("query-block", json!({})).unwrap();
        let one = |drive: &Value| {
            let keys = ["bps", "bps_wr", "bps_wr_max", "iops_rd", "group"];
            keys.iter().map(|key| drive["inserted"][key].clone()).collect()
        };
        all.as_array().unwrap().iter().map(one).collect()
    };
    let before = shown(&source.vm.qmp);
    let disks = source.disks();
    let there = Destination::of(&source, &disks);
    let mirrors = there.mirrors(&source, &disks);
    mirrors.wait_ready(WAIT).unwrap();
    for disk in &disks {
        mirrors.slow(&disk.name, 3 * MIB).unwrap();
        mirrors.slow(&disk.name, 2 * MIB).unwrap();
    }
    let slowed = shown(&source.vm.qmp);
    assert!(slowed.iter().all(|drive| drive[1] == 2 * MIB), "{slowed:?}");

    // An agent that crashes undoes nothing.
    std::mem::forget(mirrors);
    let next = there.mirrors(&source, &disks);
    assert_eq!(shown(&source.vm.qmp), before, "the next begins with what the last one left");
    next.wait_ready(WAIT).unwrap();
    next.slow("d1", MIB).unwrap();
    std::mem::forget(next);
    assert!(mirror::remove_left(&source.vm.qmp).unwrap());
    assert_eq!(shown(&source.vm.qmp), before);
    assert!(!mirror::remove_left(&source.vm.qmp).unwrap(), "nothing is left");
    source.is_unhurt();
}

/// Its target is in use by something that is not the agent's, so QEMU doesn't remove it.
#[test]
fn a_vm_goes_on_after_a_crash_even_if_something_of_a_mirror_stays() {
    let source = start(PLAIN);
    let disk = json!({"driver": "null-co", "node-name": format!("{PREFIX}0"), "size": MIB});
    let user = json!({"driver": "raw", "node-name": "user", "file": format!("{PREFIX}0")});
    source.qmp.execute("blockdev-add", disk).unwrap();
    source.qmp.execute("blockdev-add", user).unwrap();
    let (at, listener) = socket(&source);
    // Without `Drop`, nothing is restored.
    let outgoing =
        ManuallyDrop::new(Outgoing::new(&source, StreamKind::Classic, at.path()).unwrap());
    let (to, mut from) = UnixStream::pair().unwrap();
    let reader = std::thread::spawn(move || std::io::copy(&mut from, &mut std::io::sink()));
    drop(carry(&outgoing, &listener, to));
    outgoing.allow(1 << 30, 300).unwrap();
    outgoing.wait_completed(WAIT).unwrap();
    assert_eq!(source.qmp.run_state().unwrap(), RunState::PostMigrate);
    let left = outgoing::resume(&source, true).unwrap();
    assert_eq!(source.qmp.run_state().unwrap(), RunState::Running);
    let left = left.expect("the node is in use").to_string();
    assert!(left.contains("droveway-mirror-0"), "{left}");
    reader.join().unwrap().unwrap();
    // Later it may be removed.
    source.qmp.execute("blockdev-del", json!({"node-name": "user"})).unwrap();
    source.qmp.stop().unwrap();
    assert!(outgoing::resume(&source, false).unwrap().is_none());
    assert_eq!(source.qmp.run_state().unwrap(), RunState::Paused, "its owner stopped it");
}
