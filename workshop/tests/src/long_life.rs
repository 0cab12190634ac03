//! A VM under load that moves to and fro for long, with reboots between, and what its hosts' agents
//! hold after that: as much as before.

use std::fmt;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use lab::guest::Guest;
use lab::hosts::Link;

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

/// What an agent holds while nothing moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    descriptors: usize,
    threads: usize,
    /// In its state directory, without reports, of which it keeps some hundred.
    files: usize,
    memory_bytes: u64,
}

impl Held {
    fn of(world: &World, side: Side) -> Self {
        let pid = world.agent(side).pid();
        let entries = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
        Self {
            descriptors: entries("fd"),
            threads: entries("task"),
            files: files(&world.host(side).inside("state")),
            memory_bytes: anonymous_bytes(pid),
        }
    }

    fn least(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors.min(other.descriptors),
            threads: self.threads.min(other.threads),
            files: self.files.min(other.files),
            memory_bytes: self.memory_bytes.min(other.memory_bytes),
        }
    }

    /// Whether it is more than before.
    fn has_grown(&self, before: &Self) -> bool {
        self.descriptors > before.descriptors
            || self.threads > before.threads
            || self.files > before.files
            || self.memory_bytes > before.memory_bytes + MORE_BYTES_MAX
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { descriptors, threads, files, memory_bytes } = self;
        let mib = memory_bytes / MIB;
        write!(f, "{descriptors} descriptors, {threads} threads, {files} files, {mib} MiB")
    }
}

/// Files below a directory that are no reports. One may vanish meanwhile.
fn files(dir: &Path) -> usize {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let count = entries.map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() && entry.file_name() == "reports" => 0,
        Ok(kind) if kind.is_dir() => files(&entry.path()),
        _ => 1,
    });
    count.sum()
}

fn anonymous_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// The least that both agents hold, once that gets no less any more.
fn at_rest(world: &World) -> [Held; 2] {
    let read = || [Side::A, Side::B].map(|side| Held::of(world, side));
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

/// Moves a VM so many times, an even number.
///
/// # Panics
/// If a move fails, the guest is not as it was, or an agent holds more than after the first moves.
pub fn live(moves: usize) {
    assert!(moves.is_multiple_of(2), "it has to end at the host where it was at the first count");
    let world = World::new(Link::one(1000));
    let mut spec = bare("256M", RATE);
    spec.no_reboot = false;
    let guest = world.boot(&spec);
    let first = (moves / FIRST_PART).clamp(2, FIRST_MAX).next_multiple_of(2);
    let mut before = None;
    for nth in 1..=moves {
        move_on(&world, &guest, nth);
        if nth == first {
            before = Some(at_rest(&world));
        }
    }
    let (before, after) = (before.expect("there are moves"), at_rest(&world));
    for (side, (before, after)) in [Side::A, Side::B].into_iter().zip(before.iter().zip(&after)) {
        let summary = format!(
            "{}'s agent, after {first} moves: {before}; after {moves}: {after}",
            side.name()
        );
        println!("{summary}");
        assert!(!after.has_grown(before), "{summary}\n{}", world.agent(side).log_text());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_more_of_anything_but_some_memory_is_growth() {
        type Change = fn(&mut Held);
        let before = Held { descriptors: 20, threads: 8, files: 5, memory_bytes: 30 * MIB };
        assert!(!before.has_grown(&before));
        let table: [(Change, bool); 5] = [
            (|held| held.descriptors += 1, true),
            (|held| held.threads += 1, true),
            (|held| held.files += 1, true),
            (|held| held.memory_bytes += MORE_BYTES_MAX, false),
            (|held| held.memory_bytes += MORE_BYTES_MAX + 1, true),
        ];
        for (change, grown) in table {
            let mut after = before;
            change(&mut after);
            assert_eq!(after.has_grown(&before), grown, "{after}");
            assert_eq!(after.least(before), before);
        }
    }

    #[test]
    fn reports_do_not_count_as_files() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["reports/a.json", "vms/web1/record.json", "lock"] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        assert_eq!(files(dir.path()), 2);
    }
}
