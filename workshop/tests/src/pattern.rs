//! A pattern in a guest's memory or on its disk, and the search for it in agents.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use lab_guest::random::Random;

use crate::{Side, World, until};

/// Bytes that nothing else has.
const PATTERN: [u8; 32] = *b"\xa7content of a guest, not of ours";
const PAGE: usize = 4096;
/// Bytes from one to the next in pages with noise.
const STEP: usize = 256;
/// How often any page has it. Where it is less often, a hash function has left a piece of a page
/// on the stack of its thread.
const PAGE_LEAST: usize = PAGE / STEP;
/// Bytes of an agent's memory read at a time.
const PIECE: usize = 1 << 20;
/// Present in memory, in an entry of `/proc/PID/pagemap`.
const PRESENT: u64 = 1 << 63;

/// Pages full of it: every other one has nothing else and compresses well, the rest have noise in
/// between and don't.
#[must_use]
pub fn pages(pages: usize) -> Vec<u8> {
    let mut random = Random::new(7, 7);
    let mut bytes = Vec::with_capacity(pages * PAGE);
    while bytes.len() < pages * PAGE {
        bytes.extend_from_slice(&PATTERN);
        let is_noise = bytes.len() / PAGE % 2 == 1;
        for _ in 0..if is_noise { (STEP - PATTERN.len()) / 8 } else { 0 } {
            bytes.extend_from_slice(&random.draw().to_le_bytes());
        }
    }
    bytes
}

/// Asserts that a process has it in its memory.
///
/// # Panics
/// If it does not.
pub fn assert_in(pid: u32) {
    assert!(!find(pid).is_empty(), "process {pid} does not have the pattern");
}

/// Asserts that no agent has a page of it in its memory, as soon as all of the last migration has ended.
///
/// # Panics
/// If one has.
pub fn assert_in_no_agent(world: &World, after: &str) {
    for side in [Side::A, Side::B] {
        let pid = world.agent(side).pid();
        let mut found = Vec::new();
        until(&format!("{after}: nothing of the guest is left at {}", side.name()), || {
            found = find(pid);
            if !found.is_empty() {
                println!("{after}, {}: {found:?}", side.name());
            }
            found.is_empty()
        });
    }
}

/// Where a process has pages of it: lines of its map of memory, and how often.
fn find(pid: u32) -> Vec<(String, usize)> {
    let open = |name: &str| File::open(format!("/proc/{pid}/{name}")).unwrap();
    let (memory, pages) = (open("mem"), open("pagemap"));
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let private = maps.lines().filter(|line| line.contains(" rw-p ")).filter_map(|line| {
        let (from, to) = line.split(' ').next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some((line, number(from)?..number(to)?))
    });
    let often = |range: Range<u64>| {
        let present = present(&pages, range);
        present.into_iter().map(|range| count(&memory, range)).sum::<usize>()
    };
    let each = private.map(|(line, range)| (line.to_owned(), often(range)));
    each.filter(|(_, count)| *count >= PAGE_LEAST).collect()
}

/// The parts of a range that are in memory.
fn present(pages: &File, range: Range<u64>) -> Vec<Range<u64>> {
    let page = PAGE as u64;
    let mut parts: Vec<Range<u64>> = Vec::new();
    let mut entries = vec![0; usize::try_from((range.end - range.start) / page).unwrap() * 8];
    // It may have been unmapped meanwhile.
    let read = pages.read_at(&mut entries, range.start / page * 8).unwrap_or(0);
    for (nth, entry) in entries[..read].as_chunks::<8>().0.iter().enumerate() {
        if u64::from_le_bytes(*entry) & PRESENT == 0 {
            continue;
        }
        let from = range.start + nth as u64 * page;
        match parts.last_mut() {
            Some(last) if last.end == from => last.end += page,
            _ => parts.push(from..from + page),
        }
    }
    parts
}

/// How often it is there. Tests are compiled without optimisation, and memory is large, so not each
/// byte is looked at: of all words, as many bytes apart, exactly one lies within each copy.
fn count_in(all: &[u8]) -> usize {
    const WORD: usize = 8;
    const APART: usize = PATTERN.len() - WORD + 1;
    let words = (0..all.len().saturating_sub(WORD - 1)).step_by(APART);
    let copies = words.filter(|at| {
        if !IN_PATTERN[usize::from(all[*at])] {
            return false;
        }
        let word = &all[*at..at + WORD];
        let within = PATTERN.windows(WORD).position(|its| its == word);
        let start = within.and_then(|within| at.checked_sub(within));
        start.is_some_and(|start| all[start..].starts_with(&PATTERN))
    });
    copies.count()
}

/// Which bytes it has.
const IN_PATTERN: [bool; 256] = {
    let (mut is, mut nth) = ([false; 256], 0);
    while nth < PATTERN.len() {
        is[PATTERN[nth] as usize] = true;
        nth += 1;
    }
    is
};

/// How often a range has it.
fn count(memory: &File, range: Range<u64>) -> usize {
    let (mut bytes, mut kept, mut found) = (vec![0; PIECE + PATTERN.len()], 0, 0);
    let mut at = range.start;
    while at < range.end {
        let next = usize::try_from(range.end - at).unwrap().min(PIECE);
        let Ok(read) = memory.read_at(&mut bytes[kept..kept + next], at) else { break };
        if read == 0 {
            break;
        }
        let all = &bytes[..kept + read];
        found += count_in(all);
        // It may begin here and end in the next piece.
        let rest = all.len().saturating_sub(PATTERN.len() - 1);
        kept = all.len() - rest;
        bytes.copy_within(rest..rest + kept, 0);
        at += read as u64;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_copy_counts_once_wherever_it_lies() {
        for before in 0..100 {
            let mut all = vec![PATTERN[1]; before];
            for copies in 1..4 {
                all.extend_from_slice(&PATTERN);
                assert_eq!(count_in(&all), copies, "{before} bytes before");
            }
            all.extend_from_slice(&PATTERN[..31]);
            assert_eq!(count_in(&all), 3);
            assert_eq!(count_in(&all[before + 1..]), 2);
        }
        assert_eq!(count_in(&pages(2)), 4096 / 32 + 4096 / 256);
        assert_eq!(count_in(&PATTERN[..7]), 0);
    }
}
