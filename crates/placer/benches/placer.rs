//! How fast pages are placed, in bytes of guest RAM a second.
//!
//! `decoded` and `fills` are the placer alone. `raw` receives over TCP on loopback. `read` next to
//! it reads the same bytes into one buffer, which is the fastest possible.

#![allow(missing_docs, reason = "criterion's macros make a public function")]

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use audit::Delivery;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use page::{BATCH_PAGES, BlockId, Epoch, Fill, PAGE_BYTES, PageIndex};
use placer::{BlockPlan, Feeder, Placement, Placer};
use ram::Mapping;

const BATCH_BYTES: usize = BATCH_PAGES * PAGE_BYTES;
/// Well beyond any cache.
const BATCHES: u32 = 512;
const RAM_PAGES: u32 = BATCHES * 128;
const RAM_BYTES: u64 = RAM_PAGES as u64 * PAGE_BYTES as u64;
const BLOCK: BlockId = BlockId(0);

/// A placer, its feeder, and a QEMU that reads and discards.
fn placer(is_mapped: bool) -> (Placer, Feeder) {
    let (ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
    thread::spawn(move || io::copy(&mut theirs, &mut io::sink()));
    let feeder = Feeder::start(ours, page::Pool::new(64 << 20)).expect("a thread");
    feeder.head(b"head", 1, true).expect("it reads");
    let placement = if is_mapped {
        let mapping = Mapping::own(RAM_BYTES);
        // Memory that is touched for the first time is four times slower.
        mapping.fill(0, RAM_BYTES, 1).expect("it is inside");
        Placement::Mapped(Arc::new(mapping))
    } else {
        Placement::Inline
    };
    let plan = BlockPlan { name: "ram0".to_owned(), bytes: RAM_BYTES, placement };
    let placer = Placer::new(vec![plan], feeder.handle()).expect("a block that can be");
    (placer, feeder)
}

fn pages_of(batch: u32) -> Vec<PageIndex> {
    let first = batch % BATCHES * 128;
    (first..first + 128).map(PageIndex).collect()
}

/// The time that `lanes` threads take for `batches` batches each.
fn run(lanes: u32, batches: u32, lane: impl Fn(u32, u32) + Sync) -> Duration {
    let begin = Barrier::new(lanes as usize + 1);
    thread::scope(|scope| {
        let running: Vec<_> = (0..lanes)
            .map(|number| {
                let (begin, lane) = (&begin, &lane);
                scope.spawn(move || {
                    begin.wait();
                    (0..batches).for_each(|batch| lane(number, batch));
                })
            })
            .collect();
        begin.wait();
        let began = Instant::now();
        for lane in running {
            lane.join().expect("no lane panics");
        }
        began.elapsed()
    })
}

fn decoded(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decoded");
    let bytes = vec![7; BATCH_BYTES];
    for (name, is_mapped) in [("mapped", true), ("inline", false)] {
        let (placer, _feeder) = placer(is_mapped);
        for lanes in [1, 2, 4, 8] {
            group.throughput(Throughput::Bytes(u64::from(lanes) * BATCH_BYTES as u64));
            group.bench_function(BenchmarkId::new(name, lanes), |bench| {
                bench.iter_custom(|batches| {
                    let batches = u32::try_from(batches).expect("few enough");
                    run(lanes, batches, |lane, batch| {
                        let pages = pages_of(lane * (BATCHES / lanes) + batch);
                        placer
                            .place_bodies(BLOCK, Epoch(0), &pages, &bytes, Delivery::Body)
                            .expect("placed");
                    })
                });
            });
        }
    }
    group.finish();
}

fn fills(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("fills");
    group.throughput(Throughput::Bytes(RAM_BYTES));
    let (placer, _feeder) = placer(true);
    let all = |byte| [Fill { first: PageIndex(0), count: RAM_PAGES, byte }];
    placer.place_fills(BLOCK, Epoch(0), &all(0)).expect("placed");
    group.bench_function("zeros over zeros", |bench| {
        bench.iter(|| placer.place_fills(BLOCK, Epoch(0), &all(0)).expect("placed"));
    });
    group.bench_function("zeros over content", |bench| {
        bench.iter_custom(|times| {
            let mut spent = Duration::ZERO;
            for _ in 0..times {
                placer.place_fills(BLOCK, Epoch(0), &all(1)).expect("placed");
                let began = Instant::now();
                placer.place_fills(BLOCK, Epoch(0), &all(0)).expect("placed");
                spent += began.elapsed();
            }
            spent
        });
    });
    group.finish();
}

/// A connection whose far end sends `batches` batches.
fn sending(batches: u64) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("it is bound");
    let mut sender = TcpStream::connect(address).expect("it listens");
    thread::spawn(move || {
        let bytes = vec![7; BATCH_BYTES];
        (0..batches).try_for_each(|_| sender.write_all(&bytes))
    });
    listener.accept().expect("it connected").0
}

fn raw(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("raw");
    group.throughput(Throughput::Bytes(BATCH_BYTES as u64));
    let (placer, _feeder) = placer(true);
    // Scattered pages don't merge into one address for the kernel.
    for (name, stride) in [("place", 1), ("place scattered", 2)] {
        group.bench_function(name, |bench| {
            bench.iter_custom(|batches| {
                let mut lane = sending(batches);
                let mut payload = vec![0; BATCH_BYTES];
                let began = Instant::now();
                for batch in 0..u32::try_from(batches).expect("few enough") {
                    let first = batch * stride % BATCHES * 128;
                    let pages: Vec<_> =
                        (0..128).map(|n| PageIndex((first + n * stride) % RAM_PAGES)).collect();
                    lane.read_exact(&mut payload).expect("it is sent");
                    placer
                        .place_bodies(BLOCK, Epoch(0), &pages, &payload, Delivery::Body)
                        .expect("placed");
                }
                began.elapsed()
            });
        });
    }
    group.bench_function("read", |bench| {
        bench.iter_custom(|batches| {
            let mut lane = sending(batches);
            let mut buffer = vec![0; BATCH_BYTES];
            let began = Instant::now();
            for _ in 0..batches {
                lane.read_exact(&mut buffer).expect("it is sent");
            }
            began.elapsed()
        });
    });
    group.finish();
}

criterion_group!(benches, decoded, fills, raw);
criterion_main!(benches);
