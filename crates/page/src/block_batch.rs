//! A batch of disk blocks: one write of QEMU's mirror, or a part of it.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use crate::PAGE_BYTES;
use crate::pool::Pool;
use crate::slot::{BATCH_PAGES, Extent, SLOT_BYTES, Slot};

/// Most bytes of data in one block batch, the same as in a batch of pages.
/// QEMU's mirror writes 1 MiB at once, which becomes two batches.
pub const BLOCK_BYTES_MAX: usize = BATCH_PAGES * PAGE_BYTES;
const _: () = assert!(BLOCK_BYTES_MAX <= SLOT_BYTES);

/// Most extents in one block batch.
pub const EXTENTS_MAX: usize = 256;

/// Longest extent. The wire format uses the remaining bit for "zero".
pub const EXTENT_BYTES_MAX: u32 = (1 << 31) - 1;

/// The position of a disk in the list of disks that move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskId(pub u16);

/// An [`Extent`] with its place on the disk and its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<'b> {
    /// Where it starts on the disk.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// The data; none if it is all zero.
    pub data: Option<&'b [u8]>,
}

/// The sender of a block batch, notified of the batch's fate.
///
/// The lanes' threads call it and must not be delayed: neither method may block
/// for long or submit a batch.
pub trait BlockIssuer: Debug + Send + Sync {
    /// The destination has accepted the batch.
    fn acknowledged(&self, sequence: u64);

    /// The batch was dropped because the lanes failed.
    fn lost(&self, sequence: u64);
}

/// One stretch of one disk without gaps, with the pooled buffer of its data.
#[derive(Debug)]
pub struct BlockBatch {
    /// The disk it belongs to.
    pub disk: DiskId,
    /// Its number among the batches of its disk, in the order they were
    /// written: where two overlap, the higher number holds the disk's current
    /// content.
    pub sequence: u64,
    /// Where it starts on the disk.
    pub offset: u64,
    bytes: u64,
    data_bytes: usize,
    issuer: Option<Arc<dyn BlockIssuer>>,
    slot: Slot,
    pool: Arc<Pool>,
}

impl BlockBatch {
    pub(crate) fn new(slot: Slot, pool: Arc<Pool>) -> Self {
        Self {
            disk: DiskId::default(),
            sequence: 0,
            offset: 0,
            bytes: 0,
            data_bytes: 0,
            issuer: None,
            slot,
            pool,
        }
    }

    /// The extents, starting at the batch's offset.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.slot.extents
    }

    /// Bytes of the disk that the batch covers.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The range of the disk that the batch covers.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.bytes)
    }

    /// Whether it covers nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slot.extents.is_empty()
    }

    /// The data of all extents that are not zero, one after the other.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.slot.bytes[..self.data_bytes]
    }

    /// As [`BlockBatch::data`], for reading into once the extents are known.
    pub fn data_mut(&mut self) -> &mut [u8] {
        &mut self.slot.bytes[..self.data_bytes]
    }

    /// The free buffer after the data, for reading into before
    /// [`BlockBatch::push_data`].
    pub fn room_mut(&mut self) -> &mut [u8] {
        &mut self.slot.bytes[self.data_bytes..BLOCK_BYTES_MAX]
    }

    /// Adds a data extent that consists of the next `bytes` of the buffer.
    ///
    /// # Panics
    /// If the data don't fit or the extents are too many. Both come from the
    /// caller's own arithmetic, never from a peer.
    pub fn push_data(&mut self, bytes: usize) {
        assert!(bytes <= BLOCK_BYTES_MAX - self.data_bytes, "data lies inside its buffer");
        self.data_bytes += bytes;
        self.push(u32::try_from(bytes).expect("a buffer is below 2 GiB"), false);
    }

    /// Adds an extent of zeros.
    ///
    /// # Panics
    /// If the extent is longer than [`EXTENT_BYTES_MAX`], or as for
    /// [`BlockBatch::push_data`].
    pub fn push_zero(&mut self, bytes: u32) {
        self.push(bytes, true);
    }

    fn push(&mut self, bytes: u32, zero: bool) {
        self.bytes += u64::from(bytes);
        if let Some(last) = self.slot.extents.last_mut()
            && last.zero == zero
            && bytes <= EXTENT_BYTES_MAX - last.bytes
        {
            last.bytes += bytes;
            return;
        }
        assert!(bytes <= EXTENT_BYTES_MAX, "an extent has at most {EXTENT_BYTES_MAX} bytes");
        assert!(self.slot.extents.len() < EXTENTS_MAX, "a batch has {EXTENTS_MAX} extents");
        self.slot.extents.push(Extent { bytes, zero });
    }

    /// The extents with their offsets and data.
    pub fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        let (mut offset, mut data) = (self.offset, self.data());
        self.slot.extents.iter().map(move |extent| {
            let mut piece = Piece { offset, bytes: u64::from(extent.bytes), data: None };
            offset = offset.saturating_add(piece.bytes);
            if !extent.zero {
                let (own, rest) = data.split_at(extent.bytes as usize);
                piece.data = Some(own);
                data = rest;
            }
            piece
        })
    }

    /// Sets the issuer to notify of the batch's fate.
    pub fn notify(&mut self, issuer: Arc<dyn BlockIssuer>) {
        self.issuer = Some(issuer);
    }

    /// The destination has accepted the batch: returns the buffer, then
    /// notifies the issuer.
    ///
    /// A batch that is dropped without this counts as lost.
    pub fn acknowledged(mut self) {
        let (issuer, sequence) = (self.issuer.take(), self.sequence);
        drop(self);
        if let Some(issuer) = issuer {
            issuer.acknowledged(sequence);
        }
    }
}

impl Drop for BlockBatch {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.slot));
        if let Some(issuer) = self.issuer.take() {
            issuer.lost(self.sequence);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use super::*;

    #[derive(Debug, Default)]
    struct Notified {
        acknowledged: AtomicU64,
        lost: AtomicU64,
    }

    impl BlockIssuer for Notified {
        fn acknowledged(&self, sequence: u64) {
            self.acknowledged.fetch_add(sequence, Relaxed);
        }

        fn lost(&self, sequence: u64) {
            self.lost.fetch_add(sequence, Relaxed);
        }
    }

    #[test]
    fn extents_follow_each_other_and_data_has_no_gaps() {
        let pool = Pool::new(SLOT_BYTES);
        let mut batch = pool.take_blocks().unwrap();
        batch.offset = 1 << 40;
        batch.room_mut()[..512].fill(1);
        batch.push_data(512);
        batch.push_zero(16 << 20);
        batch.push_zero(16 << 20);
        batch.room_mut()[..1024].fill(2);
        batch.push_data(1024);
        assert_eq!(batch.extents().len(), 3, "what is alike becomes one");
        assert_eq!(batch.range(), 1 << 40..(1 << 40) + 1536 + (32 << 20));
        let pieces: Vec<_> = batch.pieces().collect();
        assert_eq!(pieces[0].data, Some(&[1; 512][..]));
        assert_eq!(pieces[1], Piece { offset: (1 << 40) + 512, bytes: 32 << 20, data: None });
        assert_eq!(pieces[2].data, Some(&[2; 1024][..]));
        assert_eq!(pieces[2].offset + 1024, batch.range().end);
        drop(batch);
        assert!(pool.take_blocks().unwrap().is_empty(), "a batch comes back empty");
    }

    #[test]
    fn an_issuer_is_notified_of_the_fate_of_each_batch() {
        let notified = Arc::new(Notified::default());
        let pool = Pool::new(4 * SLOT_BYTES);
        let issue = |sequence| {
            let mut batch = pool.take_blocks().unwrap();
            batch.sequence = sequence;
            batch.notify(Arc::clone(&notified) as Arc<dyn BlockIssuer>);
            batch
        };
        issue(1).acknowledged();
        drop(issue(20));
        issue(300).acknowledged();
        assert_eq!((notified.acknowledged.load(Relaxed), notified.lost.load(Relaxed)), (301, 20));
        assert_eq!(pool.out_bytes(), 0);
    }
}
