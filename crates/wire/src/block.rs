//! A batch of disk blocks on a lane. It is acknowledged like a batch of pages.
//!
//! ```text
//! header   0 magic u16   2 encoding u8   3 zero u8   4 disk u16   6 extents u16
//!          8 sequence u64               16 payload bytes u32
//! table    offset u64, then extents x u32: bit 31 zero or data, the rest its bytes
//! payload  the bytes of the extents with data, one after the other, encoded as one
//! ```
//! All fields are little-endian. The extents are contiguous from `offset` on. The header is as long
//! as that of a batch of pages, so that it can be read before its kind is known.

use page::{BLOCK_BYTES_MAX, BlockBatch, DiskId, EXTENT_BYTES_MAX, EXTENTS_MAX};

use crate::batch::BatchHeader;
use crate::error::WireError;
use crate::named::{self, NamedHeader};
use crate::read::{le16, le32, le64};

const MAGIC: u16 = 0xd7b2;
const OFFSET_BYTES: usize = 8;
const EXTENT_ENTRY_BYTES: usize = 4;
const ZERO_FLAG: u32 = 1 << 31;
const _: () = assert!(EXTENT_BYTES_MAX == ZERO_FLAG - 1);

/// A disk ends before this: file offsets are signed.
const DISK_BYTES_MAX: u64 = i64::MAX as u64;

/// How far a disk's sequence numbers may be ahead of the first one that is not acknowledged, which
/// limits the destination's memory for them.
pub const SEQUENCES_AHEAD_MAX: u64 = 1 << 16;

/// The header before a block batch's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHeader {
    /// How the payload is encoded, as `page::Encoding`'s code.
    pub encoding: u8,
    /// The disk that it belongs to.
    pub disk: DiskId,
    /// The number of extents.
    pub extents: u16,
    /// Its number among the batches of its disk.
    pub sequence: u64,
    /// Bytes of payload.
    pub payload_bytes: u32,
}

impl BlockHeader {
    /// Its length on the wire.
    pub const BYTES: usize = BatchHeader::BYTES;

    fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, WireError> {
        let header = Self {
            encoding: bytes[2],
            disk: DiskId(le16(bytes, 4)),
            extents: le16(bytes, 6),
            sequence: le64(bytes, 8),
            payload_bytes: le32(bytes, 16),
        };
        if header.extents == 0 {
            return Err(WireError::Contradiction("disk blocks without an extent"));
        }
        cap("a number of extents", u64::from(header.extents), EXTENTS_MAX as u64)?;
        cap("a payload", u64::from(header.payload_bytes), BLOCK_BYTES_MAX as u64)?;
        Ok(header)
    }

    /// Bytes of the table that follows.
    #[must_use]
    pub fn table_bytes(self) -> usize {
        OFFSET_BYTES + usize::from(self.extents) * EXTENT_ENTRY_BYTES
    }

    /// Writes the header and the table of `batch` after what `out` holds.
    pub fn write_for(batch: &BlockBatch, encoding: u8, payload_bytes: usize, out: &mut Vec<u8>) {
        let extents = u16::try_from(batch.extents().len()).expect("at most EXTENTS_MAX");
        let payload_bytes = u32::try_from(payload_bytes).expect("at most BLOCK_BYTES_MAX");
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&[encoding, 0]);
        out.extend_from_slice(&batch.disk.0.to_le_bytes());
        out.extend_from_slice(&extents.to_le_bytes());
        out.extend_from_slice(&batch.sequence.to_le_bytes());
        out.extend_from_slice(&payload_bytes.to_le_bytes());
        out.extend_from_slice(&batch.offset.to_le_bytes());
        for extent in batch.extents() {
            let flag = if extent.zero { ZERO_FLAG } else { 0 };
            out.extend_from_slice(&(extent.bytes | flag).to_le_bytes());
        }
    }

    /// Fills an empty `batch` with what the header and its table say; its data is to be read next.
    /// Whether the disk exists and is long enough is up to the sink.
    ///
    /// # Errors
    /// If the table contradicts the header, itself, or the caps. The batch is
    /// of no use then.
    pub fn fill(self, table: &[u8], batch: &mut BlockBatch) -> Result<(), WireError> {
        if table.len() != self.table_bytes() {
            return Err(WireError::Contradiction("a table of another length than announced"));
        }
        let (offset, extents) = table.split_at(OFFSET_BYTES);
        batch.disk = self.disk;
        batch.sequence = self.sequence;
        batch.offset = le64(offset, 0);
        let room_bytes = DISK_BYTES_MAX.saturating_sub(batch.offset);
        for entry in extents.chunks_exact(EXTENT_ENTRY_BYTES) {
            let entry = le32(entry, 0);
            let bytes = entry & !ZERO_FLAG;
            if bytes == 0 {
                return Err(WireError::Contradiction("an extent of nothing"));
            }
            cap("the end of an extent", batch.bytes() + u64::from(bytes), room_bytes)?;
            if entry & ZERO_FLAG != 0 {
                batch.push_zero(bytes);
            } else {
                cap("extents with data", u64::from(bytes), batch.room_mut().len() as u64)?;
                batch.push_data(bytes as usize);
            }
        }
        let data_bytes = batch.data().len();
        cap("a payload", u64::from(self.payload_bytes), data_bytes as u64)?;
        if data_bytes > 0 && self.payload_bytes == 0 {
            return Err(WireError::Contradiction("disk blocks without a payload"));
        }
        Ok(())
    }
}

fn cap(what: &'static str, value: u64, max: u64) -> Result<(), WireError> {
    if value > max {
        return Err(WireError::TooLarge { what, value, max });
    }
    Ok(())
}

/// The header of the next batch on a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneHeader {
    /// A batch of pages.
    Pages(BatchHeader),
    /// A batch of disk blocks.
    Blocks(BlockHeader),
    /// A batch of pages by name.
    Named(NamedHeader),
}

impl LaneHeader {
    /// The length of each kind on the wire.
    pub const BYTES: usize = BatchHeader::BYTES;

    /// Parses a peer's bytes.
    ///
    /// # Errors
    /// If it is not a header, or a field is above its cap.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, WireError> {
        match le16(bytes, 0) {
            MAGIC => BlockHeader::parse(bytes).map(Self::Blocks),
            named::MAGIC => NamedHeader::parse(bytes).map(Self::Named),
            _ => BatchHeader::parse(bytes).map(Self::Pages),
        }
    }

    /// The length of its batch on the lane.
    #[must_use]
    pub fn batch_bytes(self) -> u64 {
        let (tables_bytes, payload_bytes) = match self {
            Self::Pages(header) => (header.tables_bytes(), header.payload_bytes),
            Self::Blocks(header) => (header.table_bytes(), header.payload_bytes),
            Self::Named(header) => (header.tables_bytes(), 0),
        };
        (Self::BYTES + tables_bytes) as u64 + u64::from(payload_bytes)
    }
}

#[cfg(test)]
mod tests {
    use page::{Pool, SLOT_BYTES};
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8], batch: &mut BlockBatch) -> Result<BlockHeader, WireError> {
        let (head, rest) = bytes.split_first_chunk().unwrap();
        match LaneHeader::parse(head)? {
            LaneHeader::Blocks(header) => header.fill(rest, batch).map(|()| header),
            LaneHeader::Pages(_) | LaneHeader::Named(_) => panic!("blocks were written"),
        }
    }

    proptest! {
        #[test]
        fn blocks_round_trip(
            disk: u16, sequence: u64, encoding: u8, offset in 0..DISK_BYTES_MAX / 2,
            extents in prop::collection::vec((1..20_000_u32, any::<bool>()), 1..40),
        ) {
            let pool = Pool::new(2 * SLOT_BYTES);
            let mut sent = pool.take_blocks().unwrap();
            (sent.disk, sent.sequence, sent.offset) = (DiskId(disk), sequence, offset);
            for (bytes, zero) in extents {
                if zero {
                    sent.push_zero(bytes * 1000);
                } else if bytes as usize <= sent.room_mut().len() {
                    sent.push_data(bytes as usize);
                }
            }
            prop_assume!(!sent.is_empty());
            let mut bytes = Vec::new();
            BlockHeader::write_for(&sent, encoding, sent.data().len(), &mut bytes);
            let mut came = pool.take_blocks().unwrap();
            let header = read(&bytes, &mut came).unwrap();
            prop_assert_eq!(header.encoding, encoding);
            prop_assert_eq!(header.payload_bytes as usize, sent.data().len());
            prop_assert_eq!((came.disk, came.sequence), (sent.disk, sent.sequence));
            prop_assert_eq!(came.range(), sent.range());
            prop_assert_eq!(came.extents(), sent.extents());
        }

        #[test]
        fn any_bytes_are_blocks_within_the_caps_or_an_error(
            head: [u8; BlockHeader::BYTES],
            extents in 0..8_u8,
            table in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let mut bytes = head.to_vec();
            bytes[..2].copy_from_slice(&MAGIC.to_le_bytes());
            bytes[6..8].copy_from_slice(&[extents, 0]);
            bytes[18..20].fill(0);
            bytes.extend_from_slice(&table);
            bytes.resize(BlockHeader::BYTES + OFFSET_BYTES + usize::from(extents) * 4, 1);
            let mut batch = Pool::new(SLOT_BYTES).take_blocks().unwrap();
            if let Ok(header) = read(&bytes, &mut batch) {
                prop_assert!(header.payload_bytes as usize <= batch.data().len());
                prop_assert!(batch.range().end <= DISK_BYTES_MAX);
                prop_assert!(batch.bytes() > 0);
            }
        }
    }

    #[test]
    fn blocks_above_a_cap_or_with_contradictions_are_refused() {
        let pool = Pool::new(SLOT_BYTES);
        let written = |offset: u64, payload_bytes: usize, entries: &[u32]| {
            let mut bytes = Vec::new();
            let mut batch = pool.take_blocks().unwrap();
            batch.offset = offset;
            BlockHeader::write_for(&batch, 0, payload_bytes, &mut bytes);
            bytes[6..8].copy_from_slice(&u16::try_from(entries.len()).unwrap().to_le_bytes());
            bytes.extend(entries.iter().flat_map(|entry| entry.to_le_bytes()));
            bytes
        };
        let half = u32::try_from(BLOCK_BYTES_MAX / 2).unwrap();
        let zero = ZERO_FLAG | 4096;
        let refused = [
            written(0, 0, &[]),
            written(0, 0, &[0]),
            written(0, 0, &[ZERO_FLAG]),
            written(0, 0, &[512]),
            written(0, 513, &[512]),
            written(0, 1, &[zero]),
            written(0, BLOCK_BYTES_MAX + 1, &[half]),
            written(0, 9, &[half, half, 1]),
            written(0, 0, &[zero; EXTENTS_MAX + 1]),
            written(DISK_BYTES_MAX, 0, &[zero]),
            written(u64::MAX, 0, &[zero]),
            written(DISK_BYTES_MAX - u64::from(u32::MAX), 0, &[u32::MAX, u32::MAX, u32::MAX]),
        ];
        for bytes in refused {
            let mut batch = pool.take_blocks().unwrap();
            assert!(read(&bytes, &mut batch).is_err(), "{bytes:02x?}");
        }
        for bytes in [
            written(0, 9, &[half, zero, half]),
            written(DISK_BYTES_MAX - 4096, 0, &[zero]),
            written(7, 512, &[512]),
        ] {
            let mut batch = pool.take_blocks().unwrap();
            read(&bytes, &mut batch).unwrap();
        }
    }
}
