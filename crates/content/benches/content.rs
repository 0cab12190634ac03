//! The cost of naming pages, of looking names up, and of copying the pages that they name.

#![allow(missing_docs, reason = "criterion's macros make a public function")]

use std::hint::black_box;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use content::{Domain, Holder, Index, Key, Member, Name, Scanner};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use page::{BATCH_PAGES, PAGE_BYTES};
use ram::Mapping;

/// Pages with memory: beyond any cache.
const PAGES: u64 = 1 << 16;
/// Names in the table: those of a 4 GiB VM, beyond any cache, too.
const NAMES: u64 = 1 << 20;

struct Ram(Mapping);

impl Holder for Ram {
    fn read(&self, page: u64, into: &mut [u8]) -> bool {
        self.0.read(page * PAGE_BYTES as u64, into).is_ok()
    }

    fn read_many(&self, pages: &[u64], into: &mut [u8]) -> usize {
        let offsets = pages.iter().map(|page| page * PAGE_BYTES as u64);
        if self.0.gather(offsets, into).is_ok() { pages.len() } else { 0 }
    }
}

fn key() -> Key {
    Key::new(b"secret", &Domain::default())
}

fn page(content: u64) -> Vec<u8> {
    (0..PAGE_BYTES as u64 / 8)
        .flat_map(|word| (content << 32 | word).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect()
}

/// Names of arbitrary content.
fn names(from: u64) -> Vec<Name> {
    (from..from + NAMES).map(|content| key().name(&content.to_le_bytes())).collect()
}

fn named(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("name");
    let bytes: Vec<u8> = (0..BATCH_PAGES as u64).flat_map(page).collect();
    let key = key();
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    group.bench_function("a batch of pages", |bencher| {
        bencher.iter(|| {
            bytes.chunks(PAGE_BYTES).for_each(|page| {
                black_box(key.name(page));
            });
        });
    });
}

/// As above, of pages that a scanner has named and that have not changed since.
fn named_before(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("name");
    let bytes: Vec<u8> = (0..BATCH_PAGES as u64).flat_map(page).collect();
    let mapping = Mapping::own(bytes.len() as u64);
    mapping.write(0, &bytes).expect("within");
    let index = Index::new(NAMES);
    index.set_common(key());
    let pages = BATCH_PAGES as u64;
    let member = index.join(Arc::new(Ram(mapping)), key(), pages).expect("the first member");
    let scanner = Scanner::start(&index, 1.0, |_| {}).expect("a thread");
    while member.scanned().rounds == 0 {
        thread::sleep(Duration::from_millis(1));
    }
    drop(scanner);
    let names = member.earlier_names();
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    group.bench_function("a batch of pages that have names", |bencher| {
        bencher.iter(|| {
            let mut names = names.read();
            for (page, bytes) in (0..).zip(bytes.chunks(PAGE_BYTES)) {
                black_box(names.name(page, bytes)).expect("it was named");
            }
        });
    });
}

/// A table of names whose content no member has.
fn table(names: &[Name]) -> (Arc<Index>, Member) {
    let index = Index::new(NAMES);
    let ram = Arc::new(Ram(Mapping::own(PAGE_BYTES as u64)));
    let member = index.join(ram, key(), NAMES).expect("the first member");
    note(&member, names);
    (index, member)
}

fn note(member: &Member, names: &[Name]) {
    let mut batch = Vec::with_capacity(BATCH_PAGES);
    for (page, name) in (0..).zip(names) {
        batch.push((page, *name));
        if batch.len() == BATCH_PAGES {
            member.note(&batch);
            batch.clear();
        }
    }
}

fn noted(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("note");
    let (these, others) = (names(0), names(NAMES));
    let (_index, member) = table(&these);
    group.sample_size(10).throughput(Throughput::Elements(NAMES));
    group.bench_function("as before", |bencher| bencher.iter(|| note(&member, &these)));
    group.throughput(Throughput::Elements(2 * NAMES));
    group.bench_function("changed", |bencher| {
        bencher.iter(|| {
            note(&member, &others);
            note(&member, &these);
        });
    });
}

fn looked_up(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("look up");
    let (there, missing) = (names(0), names(NAMES));
    let (index, _member) = table(&there);
    group.sample_size(10);
    for (what, names) in [("there", &there), ("missing", &missing)] {
        for threads in [1, 2, 4] {
            group.throughput(Throughput::Elements(NAMES * threads));
            group.bench_function(BenchmarkId::new(what, threads), |bencher| {
                bencher.iter_custom(|rounds| {
                    let began = Instant::now();
                    thread::scope(|scope| {
                        for _ in 0..threads {
                            scope.spawn(|| {
                                for _ in 0..rounds {
                                    black_box(names.iter().filter(|name| index.has(name)).count());
                                }
                            });
                        }
                    });
                    began.elapsed()
                });
            });
        }
    }
}

fn found(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("find");
    let mapping = Mapping::own(PAGES * PAGE_BYTES as u64);
    let mut there = Vec::new();
    for nth in 0..PAGES {
        let bytes = page(nth);
        mapping.write(nth * PAGE_BYTES as u64, &bytes).expect("within");
        there.push(key().name(&bytes));
    }
    let index = Index::new(PAGES);
    let member = index.join(Arc::new(Ram(mapping)), key(), PAGES).expect("the first member");
    note(&member, &there);
    let missing = names(NAMES);
    let mut into = vec![0; BATCH_PAGES * PAGE_BYTES];
    let (mut found, key) = (Vec::with_capacity(BATCH_PAGES), key());
    group.throughput(Throughput::Elements(BATCH_PAGES as u64));
    for (what, names) in [("there", &there), ("missing", &missing)] {
        let mut batches = names.chunks_exact(BATCH_PAGES).cycle();
        group.bench_function(what, |bencher| {
            bencher.iter(|| {
                let names = batches.next().expect("it has no end");
                black_box(index.find(names, &key, &mut into, &mut found))
            });
        });
    }
}

criterion_group!(benches, named, named_before, noted, looked_up, found);
criterion_main!(benches);
