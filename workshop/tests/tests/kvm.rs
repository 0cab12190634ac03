//! VMs whose dirty pages KVM reports, not TCG. Where KVM only emulates, as nested KVM may, the
//! guests are small and slow, and are moved as elsewhere.

use api::{Outcome, Phase};
use end_to_end::{MIB, Moving, Side, World, bare, note};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;
use lab::setup::{self, Accelerator};
use marks::runs;

/// Blocks below 24 MiB are placed inline.
const MAPPED: &str = "32M";
const INLINE: &str = "16M";

/// Two hosts, and a guest for KVM if KVM can run it.
fn world(link: Link, memory: &str, rate: u64) -> Option<(World, GuestSpec)> {
    let world = World::new(link);
    if !setup::kvm_runs_bare(&world.kit).unwrap() {
        note("KVM runs no guest on this machine: nothing was tried with it");
        return None;
    }
    let mut spec = bare(memory, rate);
    spec.accelerator = Some(Accelerator::Kvm);
    spec.orders.repeated = true;
    (spec.orders.random_bytes, spec.orders.text_bytes) = (2 * MIB, 0);
    (spec.orders.working_set_bytes, spec.orders.tick_ms) = (2 * MIB, 20);
    Some((world, spec))
}

/// Moves it while it writes, and back.
fn there_and_back(memory: &str, change: impl FnOnce(&mut GuestSpec)) {
    moves(memory, &[Side::A, Side::B], change);
}

fn moves(memory: &str, sides: &[Side], change: impl FnOnce(&mut GuestSpec)) {
    let Some((world, mut spec)) = world(Link::one(1000), memory, 500_000) else { return };
    change(&mut spec);
    let guest = world.boot(&spec);
    for &from in sides {
        let before = guest.pulse().written.pages;
        let report = world.migrate(&guest, from, &[]);
        let placement = if memory == MAPPED { "mapped" } else { "inline" };
        assert_eq!((report.tap.as_str(), report.placement.as_str()), ("multifd", placement));
        let filled = spec.orders.random_bytes + spec.orders.working_set_bytes;
        assert!(report.body_bytes >= filled, "{}", report.body_bytes);
        assert!(guest.pulse().written.pages > before, "it does not write");
    }
    assert_eq!(guest.pulse().boots, 1);
}

#[runs(promised)]
#[test]
fn mapped_with_a_dirty_log() {
    there_and_back(MAPPED, |_| ());
}

#[test]
fn inline_with_a_dirty_log() {
    there_and_back(INLINE, |_| ());
}

/// The largest ring, and far from full when QEMU next empties it. A KVM that emulates records each
/// write of an instruction, and only now and then checks whether the ring is full; then further
/// entries replace the first ones. (With 4096 entries and string instructions five pages were lost
/// in most moves, by QEMU's own migration too, and the kernel warned: `kvm_dirty_ring_push`.)
fn with_rings(spec: &mut GuestSpec) {
    spec.dirty_ring = Some(65536);
    (spec.orders.repeated, spec.orders.rate) = (false, 100_000);
    // Each word by an instruction, which may be emulated.
    (spec.orders.random_bytes, spec.orders.working_set_bytes) = (MIB / 4, MIB / 2);
}

/// Each vCPU has a ring.
#[test]
fn mapped_with_dirty_rings() {
    there_and_back(MAPPED, |spec| {
        with_rings(spec);
        (spec.vcpus, spec.orders.writer_cpu) = (2, 2);
    });
}

/// QEMU places its pages, so the way back is as without rings.
#[test]
fn inline_with_a_dirty_ring() {
    moves(INLINE, &[Side::A], with_rings);
}

/// A guest that writes two and a half times as fast as the link carries, in Mbit/s.
fn hard(link: u32) -> Option<(World, Guest, u32)> {
    let rate = u64::from(link) * 1_000_000 / 8 * 5 / 2;
    let (world, mut spec) = world(Link::one(link), MAPPED, rate)?;
    spec.orders.random_bytes = MIB / 2;
    let guest = world.boot(&spec);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    Some((world, guest, pid))
}

/// Compressed, pages of one word each would all fit the link.
fn begin(world: &World, guest: &Guest, args: &[&str]) -> Moving {
    world.begin(guest, Side::A, &[&["--compress", "off"], args].concat())
}

#[runs(alone)]
#[test]
fn throttled_by_a_quota() {
    let Some((world, guest, _)) = hard(6) else { return };
    let moving = begin(&world, &guest, &["--throttle-floor", "5"]);
    let report = world.arrive(&guest, Side::A, moving);
    let slowed = report.slowed.as_ref().expect("it could not be followed otherwise");
    assert_eq!(slowed.by[..8], *"cgroup v");
    // How long it is throttled depends on how much CPU time the guest gets anyway.
    assert!((0.05..1.0).contains(&slowed.lowest_share), "{slowed:?}");
}

#[test]
fn cancelled() {
    let Some((world, guest, pid)) = hard(8) else { return };
    for phase in [Phase::FirstPass, Phase::LaterPass] {
        let mut moving = begin(&world, &guest, &[]);
        moving.wait_for(phase);
        moving.interrupt();
        let ended = moving.wait();
        assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
        world.assert_stayed(&guest, Side::A, pid);
    }
    guest.ask("rate 100000").unwrap();
    drop(world.migrate(&guest, Side::A, &[]));
}

#[runs(promised)]
#[test]
fn both_agents_die() {
    let Some((mut world, guest, pid)) = hard(8) else { return };
    let mut moving = begin(&world, &guest, &[]);
    moving.wait_for(Phase::LaterPass);
    for side in [Side::A, Side::B] {
        world.kill_agent(side);
    }
    let (moved, _, said) = moving.wait_any();
    assert!(!moved && said.contains("agent"), "{said}");
    for side in [Side::A, Side::B] {
        world.start_agent(side);
    }
    world.assert_stayed(&guest, Side::A, pid);
    guest.ask("rate 100000").unwrap();
    drop(world.migrate(&guest, Side::A, &[]));
}
