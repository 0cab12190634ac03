//! Writes in, batches out, with a carrier that keeps them.

use std::sync::mpsc;
use std::thread;

use page::SLOT_BYTES;
use proptest::prelude::*;

use super::*;

const DISK_BYTES: u64 = 4 << 30;

#[derive(Debug, Default)]
struct Kept(Mutex<Vec<BlockBatch>>);

impl Carry for Kept {
    fn submit(&self, batch: BlockBatch) -> Result<(), LanesError> {
        self.0.lock().push(batch);
        Ok(())
    }
}

impl Kept {
    fn acknowledge_all(&self) {
        let kept = std::mem::take(&mut *self.0.lock());
        kept.into_iter().for_each(BlockBatch::acknowledged);
    }
}

fn source(kept: &Arc<Kept>, slots: usize) -> Arc<DiskSource> {
    let pool = Pool::new(slots * SLOT_BYTES);
    let carry = Arc::clone(kept) as Arc<dyn Carry>;
    Arc::new(DiskSource::new(DiskId(3), "vda", DISK_BYTES, pool, carry, |_| Ok(())))
}

fn write(source: &DiskSource, offset: u64, mut bytes: &[u8]) -> Result<(), SourceError> {
    source.write(offset, u32::try_from(bytes.len()).unwrap(), |into| {
        let (now, later) = bytes.split_at(into.len());
        into.copy_from_slice(now);
        bytes = later;
        Ok::<(), String>(())
    })
}

/// The content of a disk after the kept batches.
fn content(kept: &Kept, bytes: usize) -> Vec<u8> {
    let mut content = vec![0xee; bytes];
    for batch in &*kept.0.lock() {
        for piece in batch.pieces() {
            let at = usize::try_from(piece.offset).unwrap();
            let place = &mut content[at..at + usize::try_from(piece.bytes).unwrap()];
            match piece.data {
                Some(data) => place.copy_from_slice(data),
                None => place.fill(0),
            }
        }
    }
    content
}

#[test]
fn a_long_write_is_split_and_numbered() {
    let kept = Arc::new(Kept::default());
    let source = source(&kept, 8);
    let bytes = vec![7; BLOCK_BYTES_MAX + 512];
    write(&source, 1024, &bytes).unwrap();
    source.write_zeroes(1 << 30, 3 << 30).unwrap();
    let seen: Vec<_> = kept
        .0
        .lock()
        .iter()
        .map(|batch| (batch.disk.0, batch.sequence, batch.range(), batch.data().len()))
        .collect();
    let half = 1024 + BLOCK_BYTES_MAX as u64;
    assert_eq!(
        seen,
        [
            (3, 0, 1024..half, BLOCK_BYTES_MAX),
            (3, 1, half..half + 512, 512),
            (3, 2, 1 << 30..2 << 30, 0),
            (3, 3, 2 << 30..3 << 30, 0),
            (3, 4, 3 << 30..4 << 30, 0),
        ]
    );
    let counts = source.counts();
    assert_eq!(counts.data_bytes, bytes.len() as u64);
    assert_eq!((counts.zero_bytes, counts.batches), (3 << 30, 5));
    kept.acknowledge_all();
}

#[test]
fn writes_outside_the_disk_are_refused_and_unread_ones_use_no_number() {
    let kept = Arc::new(Kept::default());
    let source = source(&kept, 8);
    for (offset, bytes) in [(DISK_BYTES, 1), (DISK_BYTES - 511, 512), (u64::MAX, 2)] {
        let refused = source.write_zeroes(offset, bytes);
        assert!(matches!(refused, Err(SourceError::Outside { .. })));
    }
    let cut = source.write(0, 4096, |_| Err("hung up"));
    assert!(matches!(cut, Err(SourceError::Read { .. })), "{cut:?}");
    assert_eq!(source.counts().batches, 0, "no number is used up");
    source.flush().unwrap();
}

#[test]
fn a_flush_waits_for_what_was_written_before_it() {
    let kept = Arc::new(Kept::default());
    let source = source(&kept, 8);
    write(&source, 0, &[1; 4096]).unwrap();
    write(&source, 4096, &[1; 4096]).unwrap();
    let (said, received) = mpsc::channel();
    let flusher = thread::spawn({
        let source = Arc::clone(&source);
        move || said.send(source.flush()).unwrap()
    });
    // Acknowledges the second batch and not the first.
    let second = kept.0.lock().pop().unwrap();
    second.acknowledged();
    thread::yield_now();
    assert!(received.try_recv().is_err());
    kept.acknowledge_all();
    received.recv().unwrap().unwrap();
    flusher.join().unwrap();
}

#[test]
fn losing_a_batch_fails_waiting_and_later_calls() {
    let kept = Arc::new(Kept::default());
    let source = source(&kept, 8);
    write(&source, 0, &[1; 4096]).unwrap();
    let flusher = thread::spawn({
        let source = Arc::clone(&source);
        move || source.flush()
    });
    kept.0.lock().clear();
    assert!(matches!(flusher.join().unwrap(), Err(SourceError::Lost { .. })));
    assert!(matches!(write(&source, 0, &[1; 512]), Err(SourceError::Lost { .. })));
}

#[test]
fn writes_wait_for_a_batch_that_is_too_far_behind() {
    let kept = Arc::new(Kept::default());
    let source = source(&kept, 8);
    write(&source, 0, &[1; 512]).unwrap();
    let late = kept.0.lock().pop().unwrap();
    for _ in 1..SEQUENCES_AHEAD_MAX {
        source.write_zeroes(0, 512).unwrap();
        kept.acknowledge_all();
    }
    let writer = thread::spawn({
        let source = Arc::clone(&source);
        move || source.write_zeroes(0, 512)
    });
    thread::yield_now();
    assert_eq!(source.counts().batches, SEQUENCES_AHEAD_MAX);
    late.acknowledged();
    writer.join().unwrap().unwrap();
    assert_eq!(source.counts().batches, SEQUENCES_AHEAD_MAX + 1);

    write(&source, 0, &[1; 512]).unwrap();
    source.end();
    assert!(matches!(source.flush(), Err(SourceError::Over)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn batches_make_what_was_written(
        offset in 0..100_u64,
        stretches in prop::collection::vec((1..200_usize, any::<bool>()), 1..20),
    ) {
        let kept = Arc::new(Kept::default());
        let source = source(&kept, 64);
        let mut bytes = Vec::new();
        for (sectors, zero) in stretches {
            bytes.resize(bytes.len() + sectors * 512, if zero { 0 } else { 5 });
        }
        let offset = offset * 512;
        write(&source, offset, &bytes).unwrap();
        let offset = usize::try_from(offset).unwrap();
        let mut wanted = vec![0xee; offset];
        wanted.extend_from_slice(&bytes);
        prop_assert!(content(&kept, wanted.len()) == wanted);
        let counts = source.counts();
        prop_assert_eq!(counts.data_bytes + counts.zero_bytes, bytes.len() as u64);
    }
}
