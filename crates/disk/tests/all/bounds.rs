//! A sink that stalls or fails: bounds hold, nothing hangs, the reason is reported.

#![allow(clippy::cast_possible_truncation, reason = "sizes of a test")]

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;

use disk::{Carry, DiskSink, DiskSource, SinkDisk, SinkError, WriteBlocks, WriteFailure};
use page::{BLOCK_BYTES_MAX, DiskId, Encoding, Pool, SLOT_BYTES};
use transport::{BlockSink, Lanes, TakeError};

use crate::ends::{Destination, MemoryDisk};

const DISK_BYTES: usize = 64 << 20;
const SOURCE_SLOTS: usize = 6;
const SINK_SLOTS: usize = 3;

struct Ends {
    source: Arc<DiskSource>,
    source_pool: Arc<Pool>,
    sink_pool: Arc<Pool>,
    lanes: Arc<Lanes>,
    failed: Receiver<SinkError>,
    destination: Destination,
}

fn start(memory: &Arc<MemoryDisk>) -> Ends {
    let (tell, failed) = mpsc::channel();
    let sink_pool = Pool::new(SINK_SLOTS * SLOT_BYTES);
    let disk = SinkDisk {
        name: "root".to_owned(),
        bytes: DISK_BYTES as u64,
        writer: Arc::clone(memory) as Arc<dyn WriteBlocks>,
    };
    let sink = DiskSink::start(vec![disk], Arc::clone(&sink_pool), None, move |error| {
        tell.send(error.clone()).unwrap();
    });
    let destination = Destination::start(sink.unwrap(), |_| None);
    let lanes = destination.lanes(2, Encoding::Raw);
    let source_pool = Pool::new(SOURCE_SLOTS * SLOT_BYTES);
    let sink = Arc::clone(&destination.sink);
    let source = DiskSource::new(
        DiskId(0),
        "root",
        DISK_BYTES as u64,
        Arc::clone(&source_pool),
        Arc::clone(&lanes) as Arc<dyn Carry>,
        move |disk| sink.flush(disk).map_err(|error| error.to_string()),
    );
    Ends { source: Arc::new(source), source_pool, sink_pool, lanes, failed, destination }
}

fn write_all(source: &DiskSource) -> Result<(), disk::SourceError> {
    for (nth, at) in (0..DISK_BYTES).step_by(BLOCK_BYTES_MAX).enumerate() {
        source.write(at as u64, BLOCK_BYTES_MAX as u32, |into| {
            into.fill(nth as u8 | 1);
            Ok::<(), String>(())
        })?;
    }
    source.flush()
}

#[test]
fn a_stalled_disk_stops_the_source_within_the_pools() {
    let memory = MemoryDisk::start(DISK_BYTES, 1);
    memory.stall(true);
    let ends = start(&memory);
    let writer = thread::spawn({
        let source = Arc::clone(&ends.source);
        move || write_all(&source)
    });
    // Both pools fill up and stay full: nothing is written.
    while ends.source_pool.out_bytes() < SOURCE_SLOTS * SLOT_BYTES
        || ends.sink_pool.out_bytes() < SINK_SLOTS * SLOT_BYTES
    {
        thread::yield_now();
    }
    let issued = ends.source.counts().data_bytes;
    assert!(issued <= ((SOURCE_SLOTS + SINK_SLOTS) * BLOCK_BYTES_MAX) as u64, "{issued}");
    memory.stall(false);
    writer.join().unwrap().unwrap();
    let image = memory.durable();
    assert!(image.chunks(BLOCK_BYTES_MAX).enumerate().all(|(nth, part)| part[9] == nth as u8 | 1));
    assert_eq!(ends.source_pool.high_water_bytes(), SOURCE_SLOTS * SLOT_BYTES);
    assert_eq!(ends.sink_pool.high_water_bytes(), SINK_SLOTS * SLOT_BYTES);
    assert!(ends.destination.reasons.lock().is_empty());
    ends.lanes.finish();
    assert_eq!((ends.source_pool.out_bytes(), ends.sink_pool.out_bytes()), (0, 0));
}

/// The source knows how much room the sink has: it keeps batches that have none,
/// so no lane waits at the sink.
#[test]
fn batches_without_room_are_not_sent() {
    const ROOM: usize = SINK_SLOTS - 1;
    let memory = MemoryDisk::start(DISK_BYTES, 5);
    memory.stall(true);
    let ends = start(&memory);
    let teller = ends.destination.tell_room(&ends.lanes, ROOM as u64);
    let writer = thread::spawn({
        let source = Arc::clone(&ends.source);
        move || write_all(&source)
    });
    // All batches sent are acknowledged, and the rest waits at the source.
    while ends.source_pool.out_bytes() < SOURCE_SLOTS * SLOT_BYTES
        || ends.lanes.delivered().blocks_held < SOURCE_SLOTS as u64
    {
        thread::yield_now();
    }
    assert_eq!(ends.sink_pool.out_bytes(), ROOM * SLOT_BYTES);
    assert_eq!(ends.destination.sink.counts()[0].data_bytes, 0);
    memory.stall(false);
    writer.join().unwrap().unwrap();
    let image = memory.durable();
    assert!(image.chunks(BLOCK_BYTES_MAX).enumerate().all(|(nth, part)| part[9] == nth as u8 | 1));
    assert_eq!(ends.sink_pool.high_water_bytes(), ROOM * SLOT_BYTES);
    let batches = ends.source.counts().batches;
    assert_eq!(ends.destination.sink.wait_finished(batches), Some(batches));
    ends.destination.sink.close();
    assert_eq!(ends.destination.sink.wait_finished(0), None);
    teller.join().unwrap();
}

#[test]
fn a_full_disk_ends_the_migration_with_its_reason() {
    let memory = MemoryDisk::start(DISK_BYTES, 2);
    memory.fail_after(20, WriteFailure::NoSpace);
    let ends = start(&memory);
    let writers: Vec<_> = (0..3)
        .map(|_| {
            let source = Arc::clone(&ends.source);
            thread::spawn(move || write_all(&source))
        })
        .collect();
    let error = ends.failed.recv().unwrap();
    assert_eq!(error.to_string(), "disk root: no space left at the destination");
    // As the source does when the destination reports the failure.
    ends.lanes.stop();
    ends.source_pool.close();
    for writer in writers {
        writer.join().unwrap().unwrap_err();
    }
    assert!(ends.source.flush().is_err(), "no flush succeeds after a loss");
    assert_eq!(ends.destination.sink.failure(), Some(error.clone()));
    assert_eq!(ends.destination.sink.flush_all(), Err(error.clone()));
    let refused = ends.destination.sink.room().unwrap_err();
    assert_eq!(refused, TakeError::Disk(error.to_string()));
    let reasons = Arc::clone(&ends.destination.reasons);
    drop(ends.destination);
    assert!(reasons.lock().iter().all(|reason| *reason == error.to_string()));
    assert_eq!(ends.source_pool.out_bytes(), 0);
}

#[test]
fn closing_the_sink_wakes_waiting_calls() {
    let memory = MemoryDisk::start(DISK_BYTES, 3);
    memory.stall(true);
    let ends = start(&memory);
    let sink = Arc::clone(&ends.destination.sink);
    let flusher = thread::spawn(move || sink.flush_all());
    let writer = thread::spawn({
        let source = Arc::clone(&ends.source);
        move || write_all(&source)
    });
    while ends.sink_pool.out_bytes() < SINK_SLOTS * SLOT_BYTES {
        thread::yield_now();
    }
    ends.destination.sink.stop();
    assert_eq!(flusher.join().unwrap(), Err(SinkError::Closed));
    ends.lanes.stop();
    ends.source_pool.close();
    writer.join().unwrap().unwrap_err();
    assert!(ends.failed.try_recv().is_err(), "to be closed is no failure");
    drop(ends.destination);
    assert_eq!(ends.sink_pool.out_bytes(), 0);
}

#[test]
fn batches_that_fit_no_disk_are_the_source_s_fault() {
    let memory = MemoryDisk::start(DISK_BYTES, 4);
    let ends = start(&memory);
    let sink = &ends.destination.sink;
    let batch = |disk, sequence, offset, bytes| {
        let mut batch = sink.room().unwrap();
        (batch.disk, batch.sequence, batch.offset) = (DiskId(disk), sequence, offset);
        if bytes > 0 {
            batch.push_zero(bytes);
        }
        batch
    };
    for wrong in [batch(1, 0, 0, 512), batch(0, 0, 0, 0), batch(0, 0, DISK_BYTES as u64, 512)] {
        let refused = sink.take(wrong).unwrap_err();
        assert!(matches!(refused, TakeError::Peer(_)), "{refused}");
    }
    let ahead = sink.take(batch(0, wire::SEQUENCES_AHEAD_MAX, 0, 512)).unwrap_err();
    assert!(matches!(ahead, TakeError::Peer(_)), "{ahead}");
    assert!(matches!(sink.flush(DiskId(1)), Err(SinkError::Unknown { number: 1 })));
    assert!(sink.flush(DiskId(0)).is_ok());
}
