//! A VM under load that moves to and fro for long, with reboots between, and what its hosts' agents
//! hold after that: as much as before.

use std::thread::sleep;
use std::time::{Duration, Instant};

use lab::error::LabError;
use lab::field::Machine;
use lab::guest::Guest;
use lab::held::Held;
use lab::hosts::Link;
use lab::setup::Release;

use crate::field::{self, Field, Mover, Stream, Way};
use crate::{MIB, Side, World, bare};

/// Ways to move: an odd number, so that each of them leaves either host.
const WAYS: [[&str; 4]; 5] = [
    ["--tap", "multifd", "--compress", "zstd"],
    ["--tap", "classic", "--compress", "off"],
    ["--tap", "multifd", "--compress", "lz4"],
    ["--tap", "classic", "--compress", "zstd"],
    ["--tap", "multifd", "--compress", "off"],
];
const RATE: u64 = 5_000_000;
/// The guest reboots after so many moves, again and again.
const REBOOT_EACH: usize = 10;
/// Moves until agents have all that they keep for good; fewer where there are few in all.
const FIRST_MAX: usize = 20;
const FIRST_PART: usize = 3;
/// Memory that an agent may take besides: the last reports, and what its allocator keeps. A leak of
/// 100 KiB with each move is found in 200 of them.
const MORE_BYTES_MAX: u64 = 16 * MIB;
/// Longer than threads of an agent's pools wait for work.
const REST: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(500);
/// How often agents that hold more are given that time again.
const RESTS_MAX: usize = 5;

/// The least that both agents hold, once that gets no less any more.
fn at_rest(world: &World) -> [Held; 2] {
    let of = |side| Held::of(world.agent(side), world.host(side)).unwrap();
    let read = || [Side::A, Side::B].map(of);
    let (mut least, mut changed) = (read(), Instant::now());
    while changed.elapsed() < REST {
        sleep(PAUSE);
        let ([a, b], [least_a, least_b]) = (read(), least);
        let less = [least_a.least(a), least_b.least(b)];
        if less != least {
            (least, changed) = (less, Instant::now());
        }
    }
    least
}

/// How many moves come before the first count: an even number, as of all, since the VM has to be at
/// the same host at both.
fn first(moves: usize) -> usize {
    assert!(moves.is_multiple_of(2), "it has to end at the host where it was at the first count");
    (moves / FIRST_PART).clamp(2, FIRST_MAX).next_multiple_of(2)
}

/// Moves a VM so many times, an even number.
///
/// # Panics
/// If a move fails, the guest is not as it was, or an agent holds more than after the first moves.
pub fn live(moves: usize) {
    let first = first(moves);
    let world = World::new(Link::one(1000));
    let mut spec = bare("256M", RATE);
    spec.no_reboot = false;
    let guest = world.boot(&spec);
    let mut before = None;
    for nth in 1..=moves {
        move_on(&world, &guest, nth);
        if nth == first {
            before = Some(at_rest(&world));
        }
    }
    assert_as_before(&world, first, before.expect("there are moves"), moves);
}

/// The same with a Debian of the field lab, whose devices a reboot resets.
///
/// # Errors
/// If there is none.
///
/// # Panics
/// As [`live`].
pub fn live_as_debian(moves: usize) -> Result<(), LabError> {
    let first = first(moves);
    let snapshot = field::snapshot(Release::Bookworm, Machine::Virtio)?;
    let way = Way { mover: Mover::Own, stream: Stream::Multifd };
    let mut vm = Field::moved(&snapshot, way, 0);
    let mut before = None;
    for nth in 1..=moves {
        vm.move_on(1);
        if nth.is_multiple_of(REBOOT_EACH) {
            let reboot = field::named("reboot from inside");
            if let Err(why) = vm.does(reboot).and_then(|_| vm.lives()) {
                panic!("after {nth} moves: {why}");
            }
            println!("{nth} moves");
        }
        if nth == first {
            before = Some(at_rest(vm.world()));
        }
    }
    assert_as_before(vm.world(), first, before.expect("there are moves"), moves);
    Ok(())
}

/// Asserts that the agents hold as much after the last moves as after the first.
fn assert_as_before(world: &World, first: usize, before: [Held; 2], moves: usize) {
    let grown = |after: &[Held; 2]| {
        before.iter().zip(after).any(|(before, after)| after.has_grown(before, MORE_BYTES_MAX))
    };
    let mut after = at_rest(world);
    // A thread that does something now and then, such as a scan, is none that stays.
    for _ in 0..RESTS_MAX {
        if !grown(&after) {
            break;
        }
        let ([a, b], [least_a, least_b]) = (at_rest(world), after);
        after = [least_a.least(a), least_b.least(b)];
    }
    for (side, (before, after)) in [Side::A, Side::B].into_iter().zip(before.iter().zip(&after)) {
        let summary = format!(
            "{}'s agent, after {first} moves: {before}; after {moves}: {after}",
            side.name()
        );
        println!("{summary}");
        let grown = after.has_grown(before, MORE_BYTES_MAX);
        assert!(!grown, "{summary}\n{}", world.agent(side).log_text());
    }
}

/// The move of this number, from A if it is odd.
fn move_on(world: &World, guest: &Guest, nth: usize) {
    let from = if nth.is_multiple_of(2) { Side::B } else { Side::A };
    let way = &WAYS[nth % WAYS.len()];
    assert_eq!(world.migrate(guest, from, way).tap, way[1]);
    if nth.is_multiple_of(REBOOT_EACH) {
        let boots = guest.pulse().boots;
        guest.tell("reboot").unwrap();
        guest.wait_boots(boots + 1).unwrap();
        world.assert_intact(guest);
        println!("{nth} moves");
    }
}
