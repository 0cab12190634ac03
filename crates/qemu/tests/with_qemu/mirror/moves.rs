//! A VM moves with its disks, and they hold what the guest wrote last.

use qemu::mirror::MirrorError;
use qemu::qmp::RunState;

use super::{Destination, FORMATS, MIB, Source, WAIT, pauses, same, taken, write};

#[test]
fn a_vm_moves_with_its_disks() {
    for cache in ["writeback", "none"] {
        moves_with_its_disks(&Source::start_with(cache));
    }
}

fn moves_with_its_disks(source: &Source) {
    let disks = source.disks();
    let names: Vec<&str> = disks.iter().map(|disk| disk.name.as_str()).collect();
    assert_eq!(names, ["d0", "d1"]);
    let mut there = Destination::of(source, &disks);
    let mirrors = there.mirrors(source, &disks);
    for round in 1..=20 {
        let (at, pattern) = (format!("{}M", 40 + round), 100 + round);
        write(&source.vm.qmp, "d0", pattern, &at, "1M");
        write(&source.vm.qmp, "d1", pattern, &at, "64k");
    }
    mirrors.wait_ready(WAIT).unwrap();
    assert!(mirrors.is_ready());
    let progress = mirrors.progress().unwrap();
    assert_eq!(progress.len(), 2);
    assert!(progress.iter().all(|disk| disk.ready && disk.total_bytes >= 20 * MIB));

    let running = mirrors.finish(WAIT).unwrap_err();
    assert!(matches!(running, MirrorError::Running), "{running}");
    let (outgoing, _at) = there.migrate(source);
    assert!(pauses(&outgoing, WAIT));
    // What the guest wrote last is not in the copies when they are drained.
    write(&source.vm.qmp, "d0", 201, "200M", "8M");
    write(&source.vm.qmp, "d1", 202, "200M", "8M");
    mirrors.finish(WAIT).unwrap();
    there.exports.stop().unwrap();
    outgoing.continue_switchover().unwrap();
    outgoing.wait_completed(WAIT).unwrap();
    there.incoming.wait_loaded(WAIT).unwrap();
    there.incoming.cont().unwrap();
    there.prepared.keep();
    assert_eq!(there.vm.qmp.run_state().unwrap(), RunState::Running);

    for format in FORMATS {
        let (from, to) = (source.path(format), there.images.path().join(format));
        assert!(same(format, &from, &to), "{format}");
        // 20 MiB from before, 20 (or 1) and 8 MiB since, and qcow2's tables, but
        // neither holes nor zeros.
        assert!(taken(&to) < 54 * MIB, "{format} takes {}", taken(&to));
    }
    write(&there.vm.qmp, "d0", 3, "1M", "1M");
    write(&there.vm.qmp, "d1", 3, "1M", "1M");
    assert!(!same("qcow2", &source.path("qcow2"), &there.images.path().join("qcow2")));
}
