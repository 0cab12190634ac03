//! Threads that write batches into one guest's RAM, under three kinds of lock.

use std::hint::black_box;
use std::ops::Range;

use parking_lot::Mutex;
use ram::Mapping;
use rangelock::RangeLock;

use crate::{
    BATCH_BYTES, BATCH_PAGES, PAGE_BYTES, RAM_BYTES, RAM_PAGES, ROUNDS, THREADS, gb_per_s, median,
    run,
};

/// Ranges that other threads hold meanwhile. A block has at most one for each lane, and one for each
/// thread that reads content from elsewhere.
const HELD: [usize; 5] = [0, 2, 8, 32, 128];
const HELD_MAX: usize = HELD[HELD.len() - 1];
const _: () = assert!(HELD_MAX * BATCH_PAGES <= RAM_PAGES);

/// Exclusive access to a range of pages while `work` runs.
trait Exclusion: Sync {
    fn with(&self, pages: Range<usize>, work: &mut dyn FnMut());
}

impl Exclusion for RangeLock {
    fn with(&self, pages: Range<usize>, work: &mut dyn FnMut()) {
        let _guard = self.lock(pages.start as u64..pages.end as u64);
        work();
    }
}

impl Exclusion for Mutex<()> {
    fn with(&self, _pages: Range<usize>, work: &mut dyn FnMut()) {
        let _guard = self.lock();
        work();
    }
}

/// A mutex per page, locked in ascending order.
struct PerPage(Vec<Mutex<()>>);

#[expect(unsafe_code, reason = "guards of many mutexes would need an allocation")]
impl Exclusion for PerPage {
    fn with(&self, pages: Range<usize>, work: &mut dyn FnMut()) {
        let mutexes = &self.0[pages];
        mutexes.iter().for_each(|mutex| std::mem::forget(mutex.lock()));
        work();
        for mutex in mutexes {
            // SAFETY: locked just above by this thread, and its guard forgotten.
            unsafe { mutex.force_unlock() };
        }
    }
}

pub(crate) fn print() {
    let ram = Mapping::own(RAM_BYTES as u64);
    ram.fill(0, RAM_BYTES as u64, 1).expect("there is so much memory");
    let contenders: [(&str, Box<dyn Exclusion>); 3] = [
        ("a mutex per page", Box::new(PerPage((0..RAM_PAGES).map(|_| Mutex::new(())).collect()))),
        ("one mutex", Box::new(Mutex::new(()))),
        ("range lock", Box::new(RangeLock::new())),
    ];
    println!("### Placing: batches written into the RAM of one guest\n");
    let names = contenders.each_ref().map(|(name, _)| *name);
    println!("| threads | {} |", names.map(|name| format!("{name}: ns, GB/s")).join(" | "));
    println!("| --- | --- | --- | --- |");
    for threads in THREADS {
        let mut locking = contenders.each_ref().map(|_| Vec::new());
        let mut placing = contenders.each_ref().map(|_| Vec::new());
        for _ in 0..ROUNDS {
            for (nth, (_, exclusion)) in contenders.iter().enumerate() {
                let (passed, batches, _) = run(threads, || {
                    |first| {
                        exclusion.with(first..first + BATCH_PAGES, &mut || {
                            black_box(first);
                        });
                    }
                });
                locking[nth].push(passed.as_secs_f64() * 1e9 / batches as f64);
                let (passed, batches, _) = run(threads, || {
                    let content = vec![7; BATCH_BYTES];
                    let ram = &ram;
                    move |first| {
                        exclusion.with(first..first + BATCH_PAGES, &mut || {
                            let at = (first * PAGE_BYTES) as u64;
                            ram.write(at, &content).expect("it is inside");
                        });
                    }
                });
                placing[nth].push(gb_per_s(passed, batches));
            }
        }
        let cells = locking
            .into_iter()
            .zip(placing)
            .map(|(locking, placing)| format!("{:.0}, {:.2}", median(locking), median(placing)));
        println!("| {threads} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
    println!(
        "\nns: the time between two batches of all threads together, if there is nothing to do \
         under the lock. GB/s: what all threads write.\n"
    );
}

/// The time that one thread takes while others hold ranges.
pub(crate) fn print_held() {
    let lock = &RangeLock::new();
    println!("### Ranges that others hold: ns to lock and unlock one more\n");
    println!("| held | range lock |");
    println!("| --- | --- |");
    for held in HELD {
        let mut locking = Vec::new();
        for _ in 0..ROUNDS {
            beside(lock, held, &mut || {
                let (passed, batches, _) = run(1, || {
                    |first| {
                        lock.with(first..first + BATCH_PAGES / 2, &mut || {
                            black_box(first);
                        });
                    }
                });
                locking.push(passed.as_secs_f64() * 1e9 / batches as f64);
            });
        }
        println!("| {held} | {:.0} |", median(locking));
    }
    println!("\nThe held ranges are spread over the RAM, between those that are locked.\n");
}

/// Does `work` while `held` ranges are locked: second halves of batches.
fn beside(exclusion: &dyn Exclusion, held: usize, work: &mut dyn FnMut()) {
    let Some(rest) = held.checked_sub(1) else { return work() };
    let batch = rest * (RAM_PAGES / HELD_MAX);
    let range = batch + BATCH_PAGES / 2..batch + BATCH_PAGES;
    exclusion.with(range, &mut || beside(exclusion, rest, work));
}
