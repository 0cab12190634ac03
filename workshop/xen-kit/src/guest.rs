//! A domain's `/init`. The kernel's command line has `load=MIB,PAGES`: how much memory it fills,
//! and how many pages it rewrites a second. Each page follows from its number and from how often it
//! was written, which is kept elsewhere in memory.
//!
//! It prints a line each second: `guest SECOND written PAGES checks COUNT wrong PAGES gap MS`. All
//! numbers but the gap are sums since the start. The gap is the longest time in which it did not
//! run, of those that ended in this second.

use std::env;
use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use guest_pages::PAGE_BYTES;
use guest_pages::random::Random;

const MIB: usize = 1 << 20;
const LOAD: (usize, u64) = (16, 100);
const STEP: Duration = Duration::from_millis(5);
/// How often all pages are checked.
const CHECK_EVERY: Duration = Duration::from_secs(5);
/// Longest work between two looks at the clock.
const PAGES_PER_STEP: usize = 32;
/// What the content of half of the pages repeats: such pages shrink.
const REPEATED: u8 = 0x6d;

/// The memory.
struct Area {
    bytes: Vec<u8>,
    versions: Vec<u32>,
    /// A page that is compared.
    expected: Vec<u8>,
}

fn fill(bytes: &mut [u8], page: usize, version: u32) {
    let random_bytes = if page.is_multiple_of(2) { bytes.len() } else { bytes.len() / 4 };
    let (random, rest) = bytes.split_at_mut(random_bytes);
    Random::new(page as u64, version.into()).fill(random);
    rest.fill(REPEATED);
}

impl Area {
    fn new(pages: usize) -> Self {
        let mut area = Self {
            bytes: vec![0; pages * PAGE_BYTES],
            versions: vec![0; pages],
            expected: vec![0; PAGE_BYTES],
        };
        for (page, bytes) in area.bytes.chunks_exact_mut(PAGE_BYTES).enumerate() {
            fill(bytes, page, 0);
        }
        area
    }

    fn pages(&self) -> usize {
        self.versions.len()
    }

    fn write(&mut self, page: usize) {
        self.versions[page] += 1;
        let start = page * PAGE_BYTES;
        fill(&mut self.bytes[start..start + PAGE_BYTES], page, self.versions[page]);
    }

    fn is_right(&mut self, page: usize) -> bool {
        fill(&mut self.expected, page, self.versions[page]);
        let start = page * PAGE_BYTES;
        self.bytes[start..start + PAGE_BYTES] == self.expected[..]
    }
}

/// A check of all pages, a few at a time.
#[derive(Default)]
struct Check {
    next: usize,
    started: Duration,
    count: u64,
    wrong: u64,
}

impl Check {
    /// Goes on with a check, or begins one when it is time.
    fn step(&mut self, area: &mut Area, now: Duration) {
        if self.next == 0 {
            if now < self.started + CHECK_EVERY {
                return;
            }
            self.started = now;
        }
        let end = area.pages().min(self.next + PAGES_PER_STEP);
        for page in self.next..end {
            if !area.is_right(page) {
                self.wrong += 1;
                println!("guest page {page} is not version {}", area.versions[page]);
            }
        }
        self.next = end;
        if end == area.pages() {
            self.next = 0;
            self.count += 1;
        }
    }
}

/// `MIB,PAGES`.
fn parse(load: &str) -> Option<(usize, u64)> {
    let (mib, pages) = load.split_once(',')?;
    Some((mib.parse().ok().filter(|mib| *mib > 0)?, pages.parse().ok()?))
}

/// Runs for ever.
pub(crate) fn run() -> ! {
    let load = env::var("load").ok().and_then(|load| parse(&load));
    let (mib, pages_per_s) = load.unwrap_or(LOAD);
    let mut area = Area::new(mib * MIB / PAGE_BYTES);
    println!("guest filled {} pages", area.pages());
    let (mut random, mut check) = (Random::new(1, 1), Check::default());
    let (start, mut last) = (Instant::now(), Duration::ZERO);
    let (mut printed, mut written, mut gap) = (Duration::ZERO, 0_u64, Duration::ZERO);
    loop {
        thread::sleep(STEP);
        let now = start.elapsed();
        gap = gap.max(now - last);
        last = now;
        let due = u128::from(pages_per_s) * now.as_millis() / 1000;
        for _ in 0..PAGES_PER_STEP {
            if u128::from(written) >= due {
                break;
            }
            area.write(random.below(area.pages()));
            written += 1;
        }
        check.step(&mut area, now);
        if now - printed >= Duration::from_secs(1) {
            let (seconds, gap_ms) = (now.as_secs(), gap.as_millis());
            let Check { count, wrong, .. } = check;
            println!("guest {seconds} written {written} checks {count} wrong {wrong} gap {gap_ms}");
            let _ = io::stdout().flush();
            (printed, gap) = (now, Duration::ZERO);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_finds_what_was_not_written() {
        let mut area = Area::new(70);
        area.write(3);
        let mut check = Check::default();
        let now = CHECK_EVERY;
        let all = |check: &mut Check, area: &mut Area, now| {
            for _ in 0..3 {
                check.step(area, now);
            }
        };
        all(&mut check, &mut area, now);
        assert_eq!((check.count, check.wrong, check.next), (1, 0, 0));
        check.step(&mut area, now);
        assert_eq!(check.next, 0, "it is not time yet");
        area.bytes[64 * PAGE_BYTES] ^= 1;
        all(&mut check, &mut area, now * 2);
        assert_eq!((check.count, check.wrong), (2, 1));
    }

    #[test]
    fn a_load_is_memory_and_a_rate() {
        assert_eq!(parse("64,200"), Some((64, 200)));
        for wrong in ["", "64", "0,1", "a,1", "1,"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
