//! RAM that another QEMU on its host can map (`run --hand-over`): a VM has it wherever it moves.

use std::fs;

use api::{UpgradeHow, UpgradePlan};
use end_to_end::memory::HugePages;
use end_to_end::{Side, World, bare};
use lab::guest::GuestSpec;
use lab::hosts::Link;
use lab::setup::{self, Qemu};
use marks::runs;

/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "262296k";
const RATE: u64 = 2_000_000;
const PAGES: &str = "droveway-ram";
const HUGE: &str = "droveway-ram-hugetlb-2048kB";

/// The oldest QEMU and the newest.
fn qemus() -> [Qemu; 2] {
    let mut all = setup::qemus(&setup::ensure().unwrap()).unwrap();
    let newest = all.pop().unwrap();
    [all.into_iter().next().unwrap_or_else(|| newest.clone()), newest]
}

/// Asserts that the VM's QEMU has mapped a file of that name, which every process that has it open
/// can map as well.
fn assert_mapped(world: &World, side: Side, file: &str) {
    let pid = world.vm(side, "web1").unwrap().pid;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let end = format!("/memfd:{file} (deleted)");
    let mut mapped = maps.lines().filter(|line| line.ends_with(&end));
    assert!(mapped.any(|line| line.contains(" rw-s ")), "{maps}");
}

/// Moves a guest there and back.
fn there_and_back(world: &World, spec: &GuestSpec, qemu: &Qemu, file: &str) {
    let guest = world.boot_by(spec, &qemu.program, &["--hand-over"]);
    assert_mapped(world, Side::A, file);
    for from in [Side::A, Side::B] {
        assert_eq!(world.migrate(&guest, from, &[]).placement, "mapped");
        assert_mapped(world, from.other(), file);
    }
}

#[test]
fn there_and_back_with_the_oldest_and_the_newest() {
    for qemu in qemus() {
        let mut spec = bare(ODD, RATE);
        spec.machine = qemu.machine();
        there_and_back(&World::new(Link::one(1000)), &spec, &qemu, PAGES);
    }
}

#[test]
fn its_ram_could_be_handed_over_at_each_host() {
    for qemu in qemus() {
        let world = World::new(Link::one(1000));
        let (program, machine) = (qemu.program.display().to_string(), qemu.machine());
        let mut run = vec!["run", "web1", "--hand-over", "--", &program, "-machine", &machine];
        run.extend("-accel tcg -m 64 -nodefaults -display none -S".split(' '));
        world.says(Side::A, &run);
        let assert_handed_over = |side| {
            let text = world.tells(side, &["upgrade", "web1", "--dry-run", "--json"]);
            let plans: Vec<UpgradePlan> = serde_json::from_str(&text).unwrap();
            assert_eq!(plans[0].how, UpgradeHow::HandedOver, "{text}");
        };
        assert_handed_over(Side::A);
        for from in [Side::A, Side::B] {
            world.says(from, &["migrate", "web1", from.other().name()]);
            assert_handed_over(from.other());
        }
    }
}

#[runs(alone)]
#[test]
fn huge_pages_stay_huge() {
    // Dropped after the world: its VMs need the pages until they are gone.
    let _pool = HugePages::reserve(2 * 256 / 2);
    let world = World::new(Link::one(1000));
    let mut spec = bare("256M", RATE);
    spec.machine += ",memory-backend=huge";
    let backend = "memory-backend-memfd,id=huge,size=256M,hugetlb=on,hugetlbsize=2M";
    spec.extra.extend(["-object", backend].map(str::to_owned));
    let [_, newest] = qemus();
    there_and_back(&world, &spec, &newest, HUGE);
}
