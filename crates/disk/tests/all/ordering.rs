//! Overlapping writes over lanes that reorder and fail give the destination's
//! disk the content that they give it one after the other.

#![allow(clippy::cast_possible_truncation, reason = "sizes of a test")]

use std::sync::Arc;

use disk::{Carry, DiskSink, DiskSource, SinkDisk, WriteBlocks};
use page::{BlockBatch, DiskId, Encoding, Pool, SLOT_BYTES};
use parking_lot::Mutex;
use proptest::prelude::*;
use transport::{BlockSink, Lanes, LanesError};

use crate::ends::{Destination, Dice, MemoryDisk};

const DISK_BYTES: usize = 3 << 20;
const DISKS: u64 = 2;
const WRITES: usize = 300;
const SOURCE_SLOTS: usize = 12;
const SINK_SLOTS: usize = 5;
/// Batches that the source may send before the first is written.
const ROOM: u64 = 3;

fn start_sink(memory: &[Arc<MemoryDisk>], slots: usize) -> DiskSink {
    let disks = memory
        .iter()
        .enumerate()
        .map(|(nth, disk)| SinkDisk {
            name: format!("vd{nth}"),
            bytes: DISK_BYTES as u64,
            writer: Arc::clone(disk) as Arc<dyn WriteBlocks>,
        })
        .collect();
    DiskSink::start(disks, Pool::new(slots * SLOT_BYTES), None, |error| panic!("{error}")).unwrap()
}

/// Writes random data to a random range of the source and of the model.
fn write_something(dice: &mut Dice, source: &DiskSource, model: &mut [u8], nth: usize) {
    let sectors = model.len() as u64 / 512;
    let start = dice.below(sectors);
    // Most writes are small; some are longer than a batch holds.
    let longest = if dice.below(4) == 0 { 1500 } else { 40 };
    let length = 1 + dice.below(longest);
    let end = (start + length).min(sectors);
    let range = start as usize * 512..end as usize * 512;
    let bytes = (range.end - range.start) as u32;
    if dice.below(4) == 0 {
        source.write_zeroes(range.start as u64, bytes.into()).unwrap();
        model[range].fill(0);
        return;
    }
    let mut content = vec![nth as u8; bytes as usize];
    content.iter_mut().step_by(16).for_each(|byte| *byte = dice.below(256) as u8);
    if dice.below(3) == 0 {
        let zeros = content.len() / 3..content.len() / 3 * 2;
        content[zeros].fill(0);
    }
    let mut left = &content[..];
    let read = |into: &mut [u8]| {
        let (now, later) = left.split_at(into.len());
        into.copy_from_slice(now);
        left = later;
        Ok::<(), String>(())
    };
    source.write(range.start as u64, bytes, read).unwrap();
    model[range].copy_from_slice(&content);
}

struct Outcome {
    deaths: u32,
    superseded_bytes: u64,
    repeated: u64,
}

/// One thread per disk writes at random. An occasional flush must make everything
/// durable that was written before it.
fn write_at_random(seed: u64, lanes: usize, encoding: Encoding, cuts: u64) -> Outcome {
    let memory: Vec<_> =
        (0..DISKS).map(|nth| MemoryDisk::start(DISK_BYTES, seed * 7 + nth)).collect();
    let cut =
        move |nth: u64| (nth < cuts).then_some((seed * (nth + 1) * 77_773 % 3_000_000) as usize);
    let destination = Destination::start(start_sink(&memory, SINK_SLOTS), cut);
    let carrier = destination.lanes(lanes, encoding);
    let teller = destination.tell_room(&carrier, ROOM);
    let pool = Pool::new(SOURCE_SLOTS * SLOT_BYTES);
    let sources: Vec<_> = (0..DISKS as u16)
        .map(|nth| {
            let sink = Arc::clone(&destination.sink);
            DiskSource::new(
                DiskId(nth),
                &format!("vd{nth}"),
                DISK_BYTES as u64,
                Arc::clone(&pool),
                Arc::clone(&carrier) as Arc<dyn Carry>,
                move |disk| sink.flush(disk).map_err(|error| error.to_string()),
            )
        })
        .collect();
    std::thread::scope(|scope| {
        for (nth, (source, memory)) in sources.iter().zip(&memory).enumerate() {
            scope.spawn(move || {
                let mut dice = Dice(seed * 31 + nth as u64);
                let mut model = vec![0xee; DISK_BYTES];
                for nth in 0..WRITES {
                    write_something(&mut dice, source, &mut model, nth);
                    if dice.below(60) == 0 || nth == WRITES - 1 {
                        source.flush().unwrap();
                        assert!(memory.durable() == model, "seed {seed}, after write {nth}");
                    }
                }
                assert!(memory.image() == model, "seed {seed}");
            });
        }
    });
    carrier.wait_drained().unwrap();
    assert_eq!(pool.out_bytes(), 0, "every buffer is back");
    assert!(pool.high_water_bytes() <= SOURCE_SLOTS * SLOT_BYTES);
    let batches = sources.iter().map(|source| source.counts().batches).sum();
    assert_eq!(destination.sink.wait_finished(batches), Some(batches), "each counts once");
    let counts = destination.sink.counts();
    destination.sink.close();
    teller.join().unwrap();
    let delivered = carrier.delivered();
    let issued: Vec<_> = sources.iter().map(DiskSource::counts).collect();
    assert_eq!(delivered.block_bytes, issued.iter().map(|one| one.data_bytes).sum::<u64>());
    assert_eq!(delivered.block_zero_bytes, issued.iter().map(|one| one.zero_bytes).sum::<u64>());
    let done: u64 =
        counts.iter().map(|one| one.data_bytes + one.zero_bytes + one.superseded_bytes).sum();
    assert_eq!(done, delivered.block_bytes + delivered.block_zero_bytes);
    Outcome {
        deaths: carrier
            .meters()
            .map(|(_, meter)| meter.deaths.load(std::sync::atomic::Ordering::SeqCst))
            .sum(),
        superseded_bytes: counts.iter().map(|one| one.superseded_bytes).sum(),
        repeated: counts.iter().map(|one| one.repeated).sum(),
    }
}

#[test]
fn lanes_that_stay_deliver_each_batch_once() {
    for (lanes, encoding) in [(1, Encoding::Raw), (2, Encoding::Lz4), (8, Encoding::Zstd)] {
        let outcome = write_at_random(lanes as u64, lanes, encoding, 0);
        assert_eq!((outcome.deaths, outcome.repeated), (0, 0));
        // One lane doesn't reorder.
        assert!(lanes > 1 || outcome.superseded_bytes == 0);
    }
}

#[test]
fn lanes_that_are_cut_anywhere_leave_the_disk_as_it_was_written() {
    let (mut superseded_bytes, mut repeated) = (0, 0);
    for seed in 1..13 {
        let encoding = [Encoding::Raw, Encoding::Raw, Encoding::Zstd][seed as usize % 3];
        let outcome = write_at_random(seed, 1 + (seed % 4) as usize, encoding, 8);
        assert!(outcome.deaths > 0);
        superseded_bytes += outcome.superseded_bytes;
        repeated += outcome.repeated;
    }
    assert!(superseded_bytes > 0, "something was overtaken");
    assert!(repeated > 0, "something came twice");
}

/// Keeps batches, for the test to deliver them in another order and then to
/// acknowledge them.
#[derive(Debug, Default)]
struct Shuffle(Mutex<Vec<BlockBatch>>);

impl Carry for Shuffle {
    fn submit(&self, batch: BlockBatch) -> Result<(), LanesError> {
        self.0.lock().push(batch);
        Ok(())
    }
}

fn hand_on(batch: &BlockBatch, sink: &DiskSink) {
    let mut copy = sink.room().unwrap();
    (copy.disk, copy.sequence, copy.offset) = (batch.disk, batch.sequence, batch.offset);
    for piece in batch.pieces() {
        match piece.data {
            Some(data) => {
                copy.room_mut()[..data.len()].copy_from_slice(data);
                copy.push_data(data.len());
            }
            None => copy.push_zero(piece.bytes as u32),
        }
    }
    sink.take(copy).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Worse orders than lanes give: batches arrive in any order, some twice, at a
    /// disk that completes operations in any order.
    #[test]
    fn any_order_and_any_repetition_make_the_same_disk(
        seed in 1..u64::MAX / 64,
        order in prop::collection::vec(any::<prop::sample::Index>(), 120),
    ) {
        let memory = [MemoryDisk::start(DISK_BYTES, seed)];
        let sink = start_sink(&memory, 3);
        let shuffle = Arc::new(Shuffle::default());
        let source = DiskSource::new(
            DiskId(0),
            "vd0",
            DISK_BYTES as u64,
            Pool::new(200 * SLOT_BYTES),
            Arc::clone(&shuffle) as Arc<dyn Carry>,
            |_| Ok(()),
        );
        let (mut dice, mut model) = (Dice(seed), vec![0xee; DISK_BYTES]);
        for nth in 0..60 {
            write_something(&mut dice, &source, &mut model, nth);
        }
        let batches = std::mem::take(&mut *shuffle.0.lock());
        for nth in order.iter().map(|index| index.index(batches.len())).chain(0..batches.len()) {
            hand_on(&batches[nth], &sink);
        }
        sink.flush_all().unwrap();
        prop_assert!(memory[0].durable() == model);
        batches.into_iter().for_each(BlockBatch::acknowledged);
        source.flush().unwrap();
    }
}

/// The engine passes `Lanes` as a `dyn Carry`.
const _: fn(&Lanes) -> &dyn Carry = |lanes| lanes;
