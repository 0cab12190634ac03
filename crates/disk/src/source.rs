//! The source's end of one disk: writes become batches.

use std::error::Error;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use page::{BLOCK_BYTES_MAX, BlockBatch, BlockIssuer, DiskId, EXTENTS_MAX, Pool, PoolClosed};
use parking_lot::{Condvar, Mutex};
use transport::{Lanes, LanesError};
use wire::SEQUENCES_AHEAD_MAX;

use crate::sequences::Sequences;
use crate::zeros::{ZERO_RUN_MIN, first_run};

/// Most runs that one part of a write can have.
const RUNS_MAX: usize = 2 * (BLOCK_BYTES_MAX / ZERO_RUN_MIN) + 1;
const _: () = assert!(RUNS_MAX < EXTENTS_MAX);

/// Longest stretch of zeros in one batch. It is sent without data, so this only
/// bounds the size of one request at the destination.
const ZEROES_BYTES_MAX: u32 = 1 << 30;

/// Why a write or a flush failed.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// QEMU's request is wrong.
    #[error("QEMU wrote {bytes} bytes at {offset} of disk {disk}, which has {disk_bytes} bytes")]
    Outside {
        /// Its name.
        disk: String,
        /// Where.
        offset: u64,
        /// How much.
        bytes: u64,
        /// Its size.
        disk_bytes: u64,
    },
    /// The data of a write could not be read from QEMU.
    #[error("QEMU did not send what it writes to disk {disk}: {source}")]
    Read {
        /// Its name.
        disk: String,
        /// The reader's error.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The destination can't be reached.
    #[error(transparent)]
    Lanes(#[from] LanesError),
    /// The lanes failed with writes of this disk in flight.
    #[error("what was written to disk {disk} did not all reach the destination")]
    Lost {
        /// Its name.
        disk: String,
    },
    /// The destination can't make the disk durable.
    #[error("disk {disk} cannot be flushed at the destination: {why}")]
    Flush {
        /// Its name.
        disk: String,
        /// The destination's message.
        why: String,
    },
    /// The migration ended.
    #[error("the migration ended")]
    Over,
}

impl From<PoolClosed> for SourceError {
    fn from(_: PoolClosed) -> Self {
        Self::Over
    }
}

/// Sends batches to the destination.
pub trait Carry: Debug + Send + Sync {
    /// Takes over a batch to send. Doesn't block: the pool bounds how many there are.
    ///
    /// # Errors
    /// If the batch can't be sent; it is dropped.
    fn submit(&self, batch: BlockBatch) -> Result<(), LanesError>;
}

impl<X: Debug + Send> Carry for Lanes<X> {
    fn submit(&self, batch: BlockBatch) -> Result<(), LanesError> {
        Self::submit(self, batch)
    }
}

/// What was written so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceCounts {
    /// Bytes sent as data.
    pub data_bytes: u64,
    /// Bytes sent as stretches of zeros.
    pub zero_bytes: u64,
    /// Batches that carry them.
    pub batches: u64,
}

type FlushThere = Box<dyn Fn(DiskId) -> Result<(), String> + Send + Sync>;

/// One disk at the source. Any thread may write; overlapping writes that several
/// threads issue at the same time have no order.
pub struct DiskSource {
    disk: DiskId,
    name: String,
    bytes: u64,
    pool: Arc<Pool>,
    carry: Arc<dyn Carry>,
    flush_there: FlushThere,
    issued: Arc<Issued>,
    data_bytes: AtomicU64,
    zero_bytes: AtomicU64,
}

impl DiskSource {
    /// A disk called `name`, of `bytes`, which is number `disk` in the list that the
    /// destination has. Its batches come from `pool`, which bounds what is in flight.
    /// `flush_there` has the destination flush it.
    #[must_use]
    pub fn new(
        disk: DiskId,
        name: &str,
        bytes: u64,
        pool: Arc<Pool>,
        carry: Arc<dyn Carry>,
        flush_there: impl Fn(DiskId) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            disk,
            name: name.to_owned(),
            bytes,
            pool,
            carry,
            flush_there: Box::new(flush_there),
            issued: Arc::default(),
            data_bytes: AtomicU64::new(0),
            zero_bytes: AtomicU64::new(0),
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Writes `bytes` at `offset`; `read` fills buffers with the data, one after
    /// the other. Blocks while the pool is exhausted. When this returns, the write may be
    /// reported to QEMU as complete.
    ///
    /// # Errors
    /// If the write lies outside of the disk, its data can't be read, or the
    /// destination can't be reached.
    pub fn write<E: Into<Box<dyn Error + Send + Sync>>>(
        &self,
        offset: u64,
        bytes: u32,
        mut read: impl FnMut(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), SourceError> {
        let end = self.end_of(offset, bytes.into())?;
        let mut at = offset;
        while at < end {
            let mut batch = self.begin(at)?;
            while at < end
                && !batch.room_mut().is_empty()
                && batch.extents().len() <= EXTENTS_MAX - RUNS_MAX
            {
                let left = usize::try_from(end - at).unwrap_or(usize::MAX);
                let part_bytes = batch.room_mut().len().min(left);
                read(&mut batch.room_mut()[..part_bytes]).map_err(|error| SourceError::Read {
                    disk: self.name.clone(),
                    source: error.into(),
                })?;
                fill(&mut batch, part_bytes);
                at += part_bytes as u64;
            }
            self.submit(batch)?;
        }
        Ok(())
    }

    /// Writes zeroes. Otherwise as [`DiskSource::write`].
    ///
    /// # Errors
    /// As for [`DiskSource::write`].
    pub fn write_zeroes(&self, offset: u64, bytes: u64) -> Result<(), SourceError> {
        let end = self.end_of(offset, bytes)?;
        let mut at = offset;
        while at < end {
            let part_bytes = u32::try_from(end - at).unwrap_or(u32::MAX).min(ZEROES_BYTES_MAX);
            let mut batch = self.begin(at)?;
            batch.push_zero(part_bytes);
            self.submit(batch)?;
            at += u64::from(part_bytes);
        }
        Ok(())
    }

    /// Makes everything durable that was written before: waits until the
    /// destination has acknowledged it, then until it has flushed it. A destination that
    /// has given up acknowledges nothing: a caller that learns of it must stop the lanes,
    /// or call [`DiskSource::end`].
    ///
    /// # Errors
    /// If not all of it reaches the destination, or it can't be flushed there.
    pub fn flush(&self) -> Result<(), SourceError> {
        self.issued.wait_acknowledged(&self.name)?;
        (self.flush_there)(self.disk)
            .map_err(|why| SourceError::Flush { disk: self.name.clone(), why })
    }

    /// What was written so far.
    #[must_use]
    pub fn counts(&self) -> SourceCounts {
        SourceCounts {
            data_bytes: self.data_bytes.load(Relaxed),
            zero_bytes: self.zero_bytes.load(Relaxed),
            batches: self.issued.state.lock().next,
        }
    }

    /// Ends the source with its migration: waiting writes and flushes wake, and no more
    /// are accepted. Writes that wait for the pool wake when it is closed.
    pub fn end(&self) {
        self.issued.end(End::Over);
    }

    fn end_of(&self, offset: u64, bytes: u64) -> Result<u64, SourceError> {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.bytes);
        end.ok_or_else(|| SourceError::Outside {
            disk: self.name.clone(),
            offset,
            bytes,
            disk_bytes: self.bytes,
        })
    }

    fn begin(&self, offset: u64) -> Result<BlockBatch, SourceError> {
        let mut batch = self.pool.take_blocks()?;
        batch.disk = self.disk;
        batch.offset = offset;
        Ok(batch)
    }

    fn submit(&self, mut batch: BlockBatch) -> Result<(), SourceError> {
        let data_bytes = batch.data().len() as u64;
        self.data_bytes.fetch_add(data_bytes, Relaxed);
        self.zero_bytes.fetch_add(batch.bytes() - data_bytes, Relaxed);
        batch.sequence = self.issued.next_sequence(&self.name)?;
        batch.notify(Arc::clone(&self.issued) as Arc<dyn BlockIssuer>);
        Ok(self.carry.submit(batch)?)
    }
}

/// Makes extents of the first `bytes` of the batch's room. Data is moved to the
/// front over zeros, which need no room.
fn fill(batch: &mut BlockBatch, bytes: usize) {
    let (mut skipped, mut left) = (0, bytes);
    while left > 0 {
        let offset = batch.range().end;
        let (run_bytes, zero) = first_run(offset, &batch.room_mut()[skipped..skipped + left]);
        left -= run_bytes;
        if zero {
            batch.push_zero(u32::try_from(run_bytes).expect("a part is below 4 GiB"));
            skipped += run_bytes;
        } else {
            batch.room_mut().copy_within(skipped..skipped + run_bytes, 0);
            batch.push_data(run_bytes);
        }
    }
}

/// The sequence numbers of one disk's batches, and which are acknowledged.
#[derive(Debug, Default)]
struct Issued {
    state: Mutex<State>,
    /// Notified when `low` of the acknowledged numbers rises, and at the end.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    acknowledged: Sequences,
    end: Option<End>,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Lost,
    Over,
}

impl End {
    fn error(self, disk: &str) -> SourceError {
        match self {
            Self::Lost => SourceError::Lost { disk: disk.to_owned() },
            Self::Over => SourceError::Over,
        }
    }
}

impl Issued {
    /// The next number. Waits while a batch too far behind it is in flight: the
    /// destination keeps track of `SEQUENCES_AHEAD_MAX` numbers only.
    fn next_sequence(&self, disk: &str) -> Result<u64, SourceError> {
        let mut state = self.state.lock();
        loop {
            if let Some(end) = state.end {
                return Err(end.error(disk));
            }
            if state.next - state.acknowledged.low() < SEQUENCES_AHEAD_MAX {
                state.next += 1;
                return Ok(state.next - 1);
            }
            self.changed.wait(&mut state);
        }
    }

    /// Waits until all batches issued so far are acknowledged.
    fn wait_acknowledged(&self, disk: &str) -> Result<(), SourceError> {
        let mut state = self.state.lock();
        let all = state.next;
        loop {
            if let Some(end) = state.end {
                return Err(end.error(disk));
            }
            if state.acknowledged.low() >= all {
                return Ok(());
            }
            self.changed.wait(&mut state);
        }
    }

    fn end(&self, end: End) {
        self.state.lock().end.get_or_insert(end);
        self.changed.notify_all();
    }
}

impl BlockIssuer for Issued {
    fn acknowledged(&self, sequence: u64) {
        let mut state = self.state.lock();
        let low = state.acknowledged.low();
        state.acknowledged.add(sequence);
        let moved = state.acknowledged.low() > low;
        drop(state);
        if moved {
            self.changed.notify_all();
        }
    }

    fn lost(&self, _sequence: u64) {
        self.end(End::Lost);
    }
}

#[cfg(test)]
mod tests;
