//! Benchmarks of encoding a batch and of the zero test, in bytes of guest RAM
//! per second.

#![allow(missing_docs, reason = "criterion's macros make a public function")]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use page::{
    BATCH_PAGES, Batch, Decoder, Encoder, Encoding, PAGE_BYTES, PageIndex, Pool, SLOT_BYTES,
    is_zero,
};

const BYTES: usize = BATCH_PAGES * PAGE_BYTES;

struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn random() -> Vec<u8> {
    let mut noise = Noise(1);
    (0..BYTES / 8).flat_map(|_| noise.next().to_le_bytes()).collect()
}

/// Heap-like: three out of four words are zero.
fn zero_heavy() -> Vec<u8> {
    let mut noise = Noise(2);
    (0..BYTES / 8)
        .flat_map(|_| {
            let word = noise.next();
            if word.is_multiple_of(4) { word.to_le_bytes() } else { [0; 8] }
        })
        .collect()
}

/// Kernel-like: pointers into a small range, flags, short counts and names.
fn kernel_like() -> Vec<u8> {
    let mut noise = Noise(3);
    (0..BYTES / 32)
        .flat_map(|_| {
            let word = noise.next();
            let pointer = 0xffff_8880_0000_0000 | (word & 0x0fff_ffc0);
            let mut object = [0; 32];
            object[..8].copy_from_slice(&pointer.to_le_bytes());
            object[8..10].copy_from_slice(&(word >> 40).to_le_bytes()[..2]);
            object[12] = 1 << (word >> 61);
            object[16..24].copy_from_slice(b"kworker/");
            object[24..32].copy_from_slice(&(pointer + 0x40).to_le_bytes());
            object
        })
        .collect()
}

fn text_like() -> Vec<u8> {
    const WORDS: [&str; 8] =
        ["the ", "herd ", "goes ", "along ", "a ", "road ", "between ", "two fields, "];
    let mut noise = Noise(4);
    let mut text = Vec::with_capacity(BYTES + 16);
    while text.len() < BYTES {
        text.extend_from_slice(WORDS[(noise.next() >> 61) as usize].as_bytes());
    }
    text.truncate(BYTES);
    text
}

fn batch_of(pool: &Arc<Pool>, content: &[u8]) -> Batch {
    let mut batch = pool.take().expect("the pool is open");
    batch.buffer_mut()[..BYTES].copy_from_slice(content);
    for (page, at) in (0..).zip((0..BYTES).step_by(PAGE_BYTES)) {
        batch.push_body(PageIndex(page), at);
    }
    batch
}

fn encodings(criterion: &mut Criterion) {
    let contents = [
        ("random", random()),
        ("zero-heavy", zero_heavy()),
        ("kernel-like", kernel_like()),
        ("text-like", text_like()),
    ];
    let pool = Pool::new(SLOT_BYTES);
    let mut group = criterion.benchmark_group("encode");
    group.throughput(Throughput::Bytes(BYTES as u64));
    let mut encoder = Encoder::new();
    for (name, content) in &contents {
        let batch = batch_of(&pool, content);
        for encoding in [Encoding::Lz4, Encoding::Zstd] {
            let id = BenchmarkId::new(format!("{encoding:?}"), name);
            let encoded = encoder.encode(encoding, &batch);
            println!("{name} as {:?}: {} of {BYTES} bytes", encoded.encoding, encoded.bytes.len());
            group.bench_function(id, |bench| {
                bench.iter(|| black_box(encoder.encode(encoding, &batch).bytes.len()));
            });
        }
    }
    group.finish();

    let mut group = criterion.benchmark_group("decode");
    group.throughput(Throughput::Bytes(BYTES as u64));
    let mut decoder = Decoder::default();
    for (name, content) in &contents[1..] {
        let batch = batch_of(&pool, content);
        for encoding in [Encoding::Lz4, Encoding::Zstd] {
            let packed = encoder.encode(encoding, &batch).bytes.to_vec();
            group.bench_function(BenchmarkId::new(format!("{encoding:?}"), name), |bench| {
                bench.iter(|| {
                    let bodies = decoder.decode(encoding, &packed, BATCH_PAGES);
                    black_box(bodies.map(<[u8]>::len)).expect("it was encoded here")
                });
            });
        }
    }
    group.finish();
}

fn zeros(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("zero");
    group.throughput(Throughput::Bytes(BYTES as u64));
    for (name, content) in [("zero", vec![0; BYTES]), ("random", random())] {
        group.bench_function(BenchmarkId::new("is_zero", name), |bench| {
            bench.iter(|| {
                black_box(&content).chunks_exact(PAGE_BYTES).filter(|page| is_zero(page)).count()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, encodings, zeros);
criterion_main!(benches);
