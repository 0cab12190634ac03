//! A QEMU whose program is replaced on disk while it runs, as an upgrade of the package does, is
//! reported. The VM itself notices nothing.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use api::{Examination, Severity};
use end_to_end::{Side, World, bare};
use lab::hosts::Link;

/// A size that QEMU 7.2 runs correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "262296k";

/// Gives a copy of QEMU the place of the one before. It finds modules and firmware next to itself.
fn install(qemu: &Path, program: &Path) {
    let unpacked = program.with_extension("unpacked");
    fs::copy(qemu, &unpacked).unwrap();
    fs::rename(unpacked, program).unwrap();
}

#[test]
fn a_vm_whose_qemu_was_replaced_is_reported_and_runs_on() {
    let world = World::new(Link::one(1000));
    let qemu = world.kit.qemu_system.canonicalize().unwrap();
    let installed = qemu.ancestors().nth(2).unwrap();
    let prefix = tempfile::tempdir().unwrap();
    fs::create_dir(prefix.path().join("bin")).unwrap();
    for part in ["share", "lib"] {
        symlink(installed.join(part), prefix.path().join(part)).unwrap();
    }
    let program = prefix.path().join("bin/qemu-system-x86_64");
    install(&qemu, &program);
    let guest = world.boot_with(&bare(ODD, 2_000_000), &program);
    let pid = world.vm(Side::A, "web1").unwrap().pid;

    let reported = || {
        let list = world.tells(Side::A, &["list"]);
        let row = list.lines().find(|line| line.starts_with("web1")).unwrap();
        let show = world.tells(Side::A, &["show", "web1"]);
        let text = world.tells(Side::A, &["doctor", "--json"]);
        let examined: Examination = serde_json::from_str(&text).unwrap();
        let mut notes = examined.findings.iter().filter(|one| one.severity == Severity::Note);
        [
            world.vm(Side::A, "web1").unwrap().program_replaced,
            row.ends_with("replaced"),
            show.contains("replaced on disk since QEMU started"),
            notes.any(|one| one.text.starts_with("The QEMU of web1 runs a program that was")),
        ]
    };
    assert_eq!(reported(), [false; 4]);
    install(&qemu, &program);
    assert_eq!(reported(), [true; 4]);
    let vm = world.vm(Side::A, "web1").unwrap();
    assert_eq!(vm.pid, pid, "{vm:?}");
    world.assert_intact(&guest);
}
