//! Work of the CPU that writes.

use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

use guest_pages::PAGE_BYTES;
use guest_pages::burn::{self, Burner};
use guest_pages::orders::Orders;
use guest_pages::pace::Pacer;
use guest_pages::random::Random;

use crate::{Next, Shared};

/// How long a writer that rests waits before it looks again.
const REST: Duration = Duration::from_millis(1);

/// Rewrites the working set, turn by turn.
pub struct Writing<'s, 'm> {
    shared: &'s Shared<'m>,
    pacer: Pacer,
    /// Set if it uses its whole CPU.
    burner: Option<(Burner, Random)>,
    write_max_pages: u64,
    last: Duration,
}

impl<'s, 'm> Writing<'s, 'm> {
    /// Writes as ordered, from `now` on. With `burn` it first measures what its CPU can do, while
    /// nothing else runs.
    #[must_use]
    pub fn new(orders: &Orders, shared: &'s Shared<'m>, now: impl Fn() -> Duration) -> Self {
        let pacer = Pacer::with_step(Duration::from_millis(orders.write_step_ms));
        let write = |pages| shared.writer.with(|writer| writer.write(pages as usize));
        let burner =
            orders.burn.then(|| (Burner::calibrate(write, &now), Random::new(orders.seed, 1)));
        let write_max_pages = match orders.write_max_bytes / PAGE_BYTES as u64 {
            0 => u64::MAX,
            pages => pages,
        };
        Self { shared, pacer, burner, write_max_pages, last: now() }
    }

    /// Writes what is due.
    pub fn turn(&mut self, now: Duration) -> Next {
        let rate = self.shared.rate.load(Relaxed);
        if rate != self.pacer.rate() {
            self.pacer.set_rate(rate);
        }
        let has_written_all = self.shared.written.load(Relaxed) >= self.write_max_pages;
        let rests = self.shared.rests.load(Relaxed) || has_written_all;
        let Some((burner, random)) = &mut self.burner else { return self.write_due(now, rests) };
        if rate == 0 || rests {
            return Next::At(now + REST);
        }
        let chunk = burner.chunk(rate);
        burn::compute(random, chunk.rounds);
        self.write(chunk.pages as usize);
        Next::Again
    }

    fn write_due(&mut self, now: Duration, rests: bool) -> Next {
        let due_at = self.last + self.pacer.step();
        if now < due_at {
            return Next::At(due_at);
        }
        let pages = self.pacer.pages_due(now.saturating_sub(self.last));
        self.last = now;
        if pages > 0 && !rests {
            self.write(pages);
        }
        Next::At(now + self.pacer.step())
    }

    fn write(&self, pages: usize) {
        let written = self.shared.writer.with(|writer| {
            writer.write(pages);
            writer.written()
        });
        self.shared.written.store(written, Relaxed);
    }

    /// Bytes per second that it writes if it does nothing else; 0 if unknown.
    #[must_use]
    pub fn fastest(&self) -> u64 {
        self.burner.as_ref().map_or(0, |(burner, _)| burner.fastest())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::tests::with_shared;

    #[test]
    fn what_is_due_is_written() {
        let orders = Orders {
            working_set_bytes: 8 << 12,
            rate: 1000 * 4096,
            write_max_bytes: 60 << 12,
            ..Orders::default()
        };
        with_shared(&orders, |_, shared| {
            let at = Duration::from_millis;
            let mut writing = Writing::new(&orders, shared, || at(100));
            let mut turn = |ms| writing.turn(at(ms));
            assert_eq!(turn(100), Next::At(at(101)));
            assert_eq!(turn(103), Next::At(at(104)));
            assert_eq!(shared.written.load(Relaxed), 3);
            shared.rests.store(true, Relaxed);
            assert_eq!(turn(108), Next::At(at(109)));
            shared.rests.store(false, Relaxed);
            assert_eq!(turn(110), Next::At(at(111)));
            assert_eq!(shared.written.load(Relaxed), 5);
            shared.rate.store(0, Relaxed);
            assert_eq!(turn(120), Next::At(at(160)));
            shared.rate.store(10_000 * 4096, Relaxed);
            for ms in [140, 150] {
                turn(ms);
            }
            // A single turn may write beyond the limit, once.
            assert_eq!(shared.written.load(Relaxed), 205);
        });
    }

    #[test]
    fn a_writer_that_uses_a_whole_cpu_waits_only_while_it_rests() {
        let working_set_bytes = 8 << 12;
        let orders = Orders { working_set_bytes, rate: 1 << 20, burn: true, ..Orders::default() };
        with_shared(&orders, |_, shared| {
            let began = Instant::now();
            let mut writing = Writing::new(&orders, shared, || began.elapsed());
            assert!(writing.fastest() > 0);
            assert_eq!(writing.turn(began.elapsed()), Next::Again);
            assert!(shared.written.load(Relaxed) > 0);
            shared.rate.store(0, Relaxed);
            assert_eq!(writing.turn(Duration::ZERO), Next::At(REST));
        });
    }
}
