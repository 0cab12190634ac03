//! The source's whole cost of recording pages for the audit, in bytes of guest RAM a second. `copy`
//! shows memory speed for comparison. `totals` is what either end computes for the audit during the
//! downtime.

#![allow(missing_docs, reason = "criterion's macros make a public function")]

use audit::{Hash, Ledger};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use page::{BATCH_PAGES, Batch, BlockId, Epoch, PAGE_BYTES, PageIndex, Pool};

const RAM_PAGES: u32 = 1 << 18;
/// 4 GiB.
const LARGE_PAGES: u32 = 1 << 20;
const BATCH_BYTES: usize = BATCH_PAGES * PAGE_BYTES;

fn batch(first: u32, is_zero: bool) -> Batch {
    let mut batch = Pool::new(1 << 20).take().expect("room for one");
    batch.epoch = Epoch(1);
    for nth in 0..BATCH_PAGES {
        let page = PageIndex(first + u32::try_from(nth).expect("few"));
        if is_zero {
            batch.push_fill(page, 0);
        } else {
            let at = nth * PAGE_BYTES;
            batch.buffer_mut()[at..at + 8].copy_from_slice(&nth.to_le_bytes());
            batch.push_body(page, at);
        }
    }
    batch
}

fn ledger(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ledger");
    group.throughput(Throughput::Bytes(BATCH_BYTES as u64));
    let hashes = if Hash::fastest() == Hash::default() {
        vec![Hash::default()]
    } else {
        vec![Hash::default(), Hash::fastest()]
    };
    for hash in hashes {
        let ledger = Ledger::new(hash, [u64::from(RAM_PAGES)]).expect("memory");
        for (name, is_zero) in [("bodies", false), ("zeros", true)] {
            let batch = batch(0, is_zero);
            group.bench_function(format!("{name}, {}", hash.name()), |bench| {
                bench.iter(|| {
                    ledger.bodies_handed_over(&batch, batch.bodies(), batch.epoch);
                    ledger.fills_handed_over(&batch, batch.epoch);
                });
            });
        }
        assert!(ledger.block(BlockId(0)).is_some());
    }
    let (from, mut to) = (vec![1_u8; BATCH_BYTES], vec![0; BATCH_BYTES]);
    group.bench_function("copy", |bench| {
        bench.iter(|| std::hint::black_box(&mut to).copy_from_slice(&from));
    });
    group.finish();
    let ledger = Ledger::new(Hash::fastest(), [u64::from(LARGE_PAGES)]).expect("memory");
    for first in (0..LARGE_PAGES).step_by(BATCH_PAGES * BATCH_PAGES) {
        let batch = batch(first, false);
        ledger.bodies_handed_over(&batch, batch.bodies(), batch.epoch);
    }
    criterion.bench_function("totals of 4 GiB", |bench| bench.iter(|| ledger.totals()));
}

criterion_group!(benches, ledger);
criterion_main!(benches);
