//! The range lock against the simpler ways to keep writers of guest RAM apart.
//!
//! Threads take batches of 128 pages each from their own part of a RAM, as
//! lanes do within a pass, and every sixteenth from anywhere. `nothing` shows
//! what the lock itself costs; `copy` holds it for the copy of a batch.

#![allow(missing_docs, reason = "criterion's macros make a public function")]
#![allow(clippy::cast_possible_truncation, reason = "pages and threads counted here are few")]

use std::hint::black_box;
use std::ops::Range;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use parking_lot::{Mutex, RwLock};
use rangelock::RangeLock;

const PAGE_BYTES: usize = 4096;
const BATCH_PAGES: u64 = 128;
const PAGES: u64 = 1 << 18;
const THREADS: [u64; 4] = [1, 2, 4, 8];

/// A way to have a range of pages for oneself while `work` runs.
trait Exclusion: Sync {
    fn with(&self, pages: Range<u64>, work: &mut dyn FnMut());
}

impl Exclusion for RangeLock {
    fn with(&self, pages: Range<u64>, work: &mut dyn FnMut()) {
        let _guard = self.lock(pages);
        work();
    }
}

impl Exclusion for Mutex<()> {
    fn with(&self, _pages: Range<u64>, work: &mut dyn FnMut()) {
        let _guard = self.lock();
        work();
    }
}

impl Exclusion for RwLock<()> {
    fn with(&self, _pages: Range<u64>, work: &mut dyn FnMut()) {
        let _guard = self.write();
        work();
    }
}

/// One for each page, taken in ascending order.
struct PerPage(Vec<Mutex<()>>);

impl Exclusion for PerPage {
    fn with(&self, pages: Range<u64>, work: &mut dyn FnMut()) {
        let mutexes = pages.clone().map(|page| &self.0[page as usize % self.0.len()]);
        mutexes.clone().for_each(|mutex| std::mem::forget(mutex.lock()));
        work();
        for mutex in mutexes {
            // SAFETY: locked just above by this thread, and its guard forgotten.
            unsafe { mutex.force_unlock() };
        }
    }
}

/// The time that `threads` threads take for `batches` batches each.
fn run(exclusion: &dyn Exclusion, threads: u64, batches: u64, copies: bool) -> Duration {
    let start = Barrier::new(threads as usize + 1);
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|thread| {
                let start = &start;
                scope.spawn(move || {
                    let bytes = if copies { BATCH_PAGES as usize * PAGE_BYTES } else { 0 };
                    let (from, mut to) = (vec![1_u8; bytes], vec![0_u8; bytes]);
                    let part = PAGES / threads;
                    start.wait();
                    for batch in 0..batches {
                        let own = thread * part + batch * BATCH_PAGES % part;
                        let anywhere = (batch * 7_919 + thread) * BATCH_PAGES % PAGES;
                        let first = if batch % 16 == 15 { anywhere } else { own };
                        exclusion.with(first..first + BATCH_PAGES, &mut || {
                            to.copy_from_slice(black_box(&from));
                            black_box(&mut to);
                        });
                    }
                })
            })
            .collect();
        start.wait();
        let began = Instant::now();
        for thread in running {
            thread.join().expect("no writer panics");
        }
        began.elapsed()
    })
}

fn exclusion(criterion: &mut Criterion) {
    let contenders: [(&str, Box<dyn Exclusion>); 4] = [
        ("rangelock", Box::new(RangeLock::new())),
        ("mutex", Box::new(Mutex::new(()))),
        ("rwlock", Box::new(RwLock::new(()))),
        ("mutex-per-page", Box::new(PerPage((0..PAGES).map(|_| Mutex::new(())).collect()))),
    ];
    for (work, copies) in [("nothing", false), ("copy", true)] {
        let mut group = criterion.benchmark_group(work);
        group.sample_size(20).measurement_time(Duration::from_secs(2));
        for threads in THREADS {
            if copies {
                group.throughput(Throughput::Bytes(threads * BATCH_PAGES * PAGE_BYTES as u64));
            } else {
                group.throughput(Throughput::Elements(threads));
            }
            for (name, exclusion) in &contenders {
                group.bench_function(BenchmarkId::new(*name, threads), |bench| {
                    bench.iter_custom(|batches| run(&**exclusion, threads, batches, copies));
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, exclusion);
criterion_main!(benches);
