//! A pace that uses a whole CPU at any rate: between pages the writer computes, in proportion. So
//! it slows down as its CPU does: half a CPU halves its rate, which a writer that sleeps between
//! pages would hardly notice. It reads no clock while it works, and never catches up.

use core::hint::black_box;
use core::time::Duration;

use crate::PAGE_BYTES;
use crate::random::Random;

/// Work between two checks of the wanted rate.
const CHUNK: Duration = Duration::from_millis(1);
/// One measurement, and the number of each kind. One of the fast ones counts, since most others are
/// taken while the machine does something else.
const SLICE: Duration = Duration::from_millis(1);
const SLICES: usize = 200;
const FAST: usize = SLICES * 19 / 20;
/// Pages and rounds between two reads of the clock while measuring.
const PAGES_AT_ONCE: u32 = 16;
const ROUNDS_AT_ONCE: u32 = 10_000;

/// What a CPU does per second, measured when nothing else ran on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Burner {
    pages_per_s: f64,
    rounds_per_s: f64,
    /// Fractions of a page and of a round, carried to the next chunk.
    due_pages: f64,
    due_rounds: f64,
}

/// Work before the next check of the wanted rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Pages to write.
    pub pages: u32,
    /// Rounds to compute.
    pub rounds: u32,
}

impl Burner {
    /// Measures, by the clock `now`, how fast `write` writes a number of pages, and how fast the
    /// CPU computes rounds.
    pub fn calibrate(mut write: impl FnMut(u32), now: impl Fn() -> Duration) -> Self {
        let mut random = Random::new(1, 1);
        let pages_per_s = undisturbed(PAGES_AT_ONCE, &now, || write(PAGES_AT_ONCE));
        let compute = || compute(&mut random, ROUNDS_AT_ONCE);
        let rounds_per_s = undisturbed(ROUNDS_AT_ONCE, &now, compute);
        Self::new(pages_per_s, rounds_per_s)
    }

    fn new(pages_per_s: f64, rounds_per_s: f64) -> Self {
        Self { pages_per_s, rounds_per_s, due_pages: 0.0, due_rounds: 0.0 }
    }

    /// Bytes per second that it writes if it does nothing else.
    #[must_use]
    pub fn fastest(&self) -> u64 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes")]
        let bytes = (self.pages_per_s * PAGE_BYTES as f64) as u64;
        bytes
    }

    /// What to do next at `rate` bytes per second, which must not be zero: at least one page, and
    /// rounds for the rest of the time.
    pub fn chunk(&mut self, rate: u64) -> Chunk {
        let per_s = (rate as f64 / PAGE_BYTES as f64).min(self.pages_per_s);
        let due = (self.due_pages + per_s * CHUNK.as_secs_f64()).max(1.0);
        let pages = whole(due);
        self.due_pages = due - f64::from(pages);
        let idle_s = f64::from(pages) / per_s - f64::from(pages) / self.pages_per_s;
        let due = self.due_rounds + idle_s * self.rounds_per_s;
        let rounds = whole(due);
        self.due_rounds = due - f64::from(rounds);
        Chunk { pages, rounds }
    }
}

/// Units per second, with `count` units per `act`, while nothing else runs.
fn undisturbed(count: u32, now: impl Fn() -> Duration, mut act: impl FnMut()) -> f64 {
    let mut per_s = [0.0; SLICES];
    for per_s in &mut per_s {
        let began = now();
        let elapsed = || now().saturating_sub(began);
        let mut done = 0.0;
        while elapsed() < SLICE {
            act();
            done += f64::from(count);
        }
        *per_s = done / elapsed().as_secs_f64();
    }
    per_s.sort_unstable_by(f64::total_cmp);
    per_s[FAST]
}

fn whole(number: f64) -> u32 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
    let number = number as u32;
    number
}

/// Keeps the CPU busy. It is never inlined, so that there is one copy: TCG takes many times as long
/// for a loop that crosses a page of the program, so what was measured with one copy would not hold
/// for another.
#[inline(never)]
pub fn compute(random: &mut Random, rounds: u32) {
    for _ in 0..rounds {
        black_box(random.draw());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Pages, and seconds of CPU, of so many chunks at `rate`, on a CPU that writes 100,000 pages
    /// or computes 50 million rounds a second.
    fn second_of(rate: u64, chunks: u32) -> (f64, f64) {
        let mut burner = Burner::new(1e5, 5e7);
        let (mut pages, mut cpu_s) = (0.0, 0.0);
        for _ in 0..chunks {
            let chunk = burner.chunk(rate);
            pages += f64::from(chunk.pages);
            cpu_s += f64::from(chunk.pages) / 1e5 + f64::from(chunk.rounds) / 5e7;
        }
        (pages, cpu_s)
    }

    #[test]
    fn any_rate_takes_all_of_a_cpu() {
        for pages_per_s in [10, 1_500, 6_250, 99_000] {
            let (pages, cpu_s) = second_of(pages_per_s * PAGE_BYTES as u64, 500);
            let rate = pages / cpu_s;
            let wanted = pages_per_s as f64;
            assert!((rate / wanted - 1.0).abs() < 0.01, "{rate} for {pages_per_s}");
        }
    }

    #[test]
    fn the_cpu_caps_the_rate() {
        let (pages, cpu_s) = second_of(u64::MAX, 100);
        assert!((pages / cpu_s / 1e5 - 1.0).abs() < 0.01);
    }

    #[test]
    fn what_a_cpu_does_is_measured() {
        let mut written = 0;
        let began = Instant::now();
        let burner = Burner::calibrate(|pages| written += pages, || began.elapsed());
        assert!(written >= PAGES_AT_ONCE && burner.fastest() > 0);
        assert!(burner.rounds_per_s > 0.0, "{burner:?}");
    }
}
