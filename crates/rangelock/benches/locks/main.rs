//! The benefit of a range lock where PMigrate had one, as Markdown tables.
//!
//! PMigrate locked ranges of an address space, because its threads mapped and
//! unmapped guest memory batch by batch (its Table 9 and Figure 6). Droveway
//! locks ranges of guest RAM, because its threads write it. `placing` compares
//! locks for the second case; `mapping` shows the cost of the first on today's
//! kernel, and the cost without mapping.

#![allow(clippy::cast_possible_truncation, reason = "batches and threads counted here are few")]

mod mapping;
mod placing;

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

const PAGE_BYTES: usize = 4096;
/// The pages of a Droveway batch.
const BATCH_PAGES: usize = 128;
const BATCH_BYTES: usize = BATCH_PAGES * PAGE_BYTES;
/// Guest RAM, larger than any cache.
const RAM_PAGES: usize = 1 << 16;
const RAM_BYTES: usize = RAM_PAGES * PAGE_BYTES;
const THREADS: [usize; 4] = [1, 2, 4, 8];
/// Contenders alternate, so that disturbances affect all of them.
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(200);

fn main() {
    let cores = thread::available_parallelism().map_or(0, usize::from);
    println!("{cores} cores; batches of {BATCH_PAGES} pages; medians of {ROUNDS} rounds\n");
    placing::print();
    placing::print_held();
    mapping::print();
}

/// The first page of batch `nth` of thread `number`: in the thread's own part,
/// as lanes do within a pass, but every sixteenth batch anywhere.
fn first_page(number: usize, threads: usize, nth: usize) -> usize {
    let part = RAM_PAGES / threads;
    let own = number * part + nth * BATCH_PAGES % part;
    let anywhere = (nth * 7_919 + number) * BATCH_PAGES % RAM_PAGES;
    if nth % 16 == 15 { anywhere } else { own }
}

/// Runs threads for one round. Each makes its own `work`, which processes the
/// batch at the given first page. Returns the elapsed time, the number of
/// batches, and the works.
fn run<W: FnMut(usize) + Send>(
    threads: usize,
    make: impl Fn() -> W + Sync,
) -> (Duration, usize, Vec<W>) {
    let start = Barrier::new(threads + 1);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|number| {
                let (start, over, make) = (&start, &over, &make);
                scope.spawn(move || {
                    let mut work = make();
                    start.wait();
                    let mut batches = 0;
                    while !over.load(Relaxed) {
                        work(first_page(number, threads, batches));
                        batches += 1;
                    }
                    (batches, work)
                })
            })
            .collect();
        start.wait();
        let began = Instant::now();
        thread::sleep(ROUND);
        over.store(true, Relaxed);
        let done: Vec<_> =
            running.into_iter().map(|one| one.join().expect("no thread panics")).collect();
        let passed = began.elapsed();
        let batches = done.iter().map(|(batches, _)| batches).sum();
        (passed, batches, done.into_iter().map(|(_, work)| work).collect())
    })
}

fn gb_per_s(passed: Duration, batches: usize) -> f64 {
    (batches * BATCH_BYTES) as f64 / passed.as_secs_f64() / 1e9
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}
