//! The thread that writes one disk.

use std::ops::Range;
use std::sync::Arc;

use page::Piece;

use super::finished::Counted;
use super::shared::{Job, Operation, Shared, UnderWay};
use super::write_blocks::Done;

/// Most writes of a disk in flight: enough for any storage, and few enough for a
/// linear search.
const UNDER_WAY_MAX: usize = 64;

/// Writes what is queued for disk `number`, until the sink ends.
pub(super) fn run(shared: &Arc<Shared>, number: usize) {
    while let Some(job) = next(shared, number) {
        data_threads::point();
        let goes_on = match job {
            Job::Write { batch, parts } => write(shared, number, batch, parts),
            Job::Flush { ticket } => flush(shared, number, ticket),
        };
        if !goes_on {
            return;
        }
    }
}

fn next(shared: &Shared, number: usize) -> Option<Job> {
    let mut state = shared.state.lock();
    loop {
        if state.end.is_some() {
            return None;
        }
        if let Some(job) = state.lines.get_mut(number)?.jobs.pop_front() {
            return Some(job);
        }
        shared.changed.wait(&mut state);
    }
}

/// Returns whether the sink still continues.
fn write(
    shared: &Arc<Shared>,
    number: usize,
    batch: Counted,
    parts: Option<Vec<Range<u64>>>,
) -> bool {
    let Some(disk) = shared.disks.get(number) else { return false };
    let batch = Arc::new(batch);
    let parts = parts.unwrap_or_else(|| vec![batch.range()]);
    for piece in batch.pieces() {
        let piece_end = piece.offset.saturating_add(piece.bytes);
        let first = parts.partition_point(|part| part.end <= piece.offset);
        for part in parts[first..].iter().take_while(|part| part.start < piece_end) {
            let range = part.start.max(piece.offset)..part.end.min(piece_end);
            if !lock_range(shared, number, &range) {
                return false;
            }
            let what = Operation::Write { range: range.clone(), is_zero: piece.data.is_none() };
            let batch = Some(Arc::clone(&batch));
            let done = Done::new(shared, UnderWay { disk: number, what, batch });
            match bytes_of(&piece, &range) {
                Some(data) => disk.writer.write(range.start, data, done),
                None => disk.writer.write_zeroes(range.start, range.end - range.start, done),
            }
        }
    }
    true
}

/// The bytes of a range within a piece, if they are not zero.
fn bytes_of<'b>(piece: &Piece<'b>, range: &Range<u64>) -> Option<&'b [u8]> {
    let into_piece = |offset: u64| usize::try_from(offset - piece.offset).unwrap_or(usize::MAX);
    piece.data.map(|data| &data[into_piece(range.start)..into_piece(range.end)])
}

/// Waits until no write in flight overlaps `range` and fewer than the maximum are in flight;
/// then adds `range` to them. Only this thread adds ranges, so they start in the order of its
/// queue. Returns whether the sink still continues.
fn lock_range(shared: &Shared, number: usize, range: &Range<u64>) -> bool {
    let mut state = shared.state.lock();
    loop {
        if state.end.is_some() {
            return false;
        }
        let Some(line) = state.lines.get_mut(number) else { return false };
        let overlaps = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        if line.under_way.len() < UNDER_WAY_MAX && !line.under_way.iter().any(overlaps) {
            line.under_way.push(range.clone());
            return true;
        }
        shared.changed.wait(&mut state);
    }
}

/// Waits for the writes in flight first, since a flush covers only completed writes.
fn flush(shared: &Arc<Shared>, number: usize, ticket: u64) -> bool {
    let Some(disk) = shared.disks.get(number) else { return false };
    let mut state = shared.state.lock();
    loop {
        if state.end.is_some() {
            return false;
        }
        if state.lines.get(number).is_none_or(|line| line.under_way.is_empty()) {
            break;
        }
        shared.changed.wait(&mut state);
    }
    drop(state);
    let what = Operation::Flush { ticket };
    disk.writer.flush(Done::new(shared, UnderWay { disk: number, what, batch: None }));
    true
}
