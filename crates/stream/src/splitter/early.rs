//! Sections that devices write before RAM has ended.
//!
//! They have no length, so only those whose format is known can be skipped. Each goes
//! to the destination unchanged, before or after RAM as in the source's stream.

use super::{HEAD_BYTES_MAX, Halt, Position, Splitter};
use crate::cursor::{Cursor, Short};
use crate::record::{SECTION_BYTES, VIRTIO_MEM_BYTES_MAX, WORD_BYTES, kind};
use crate::{StreamError, Unsplittable};

/// Dirty bitmaps of disks (capability `dirty-bitmaps`): a START section after RAM's,
/// and PART sections that are empty until the VM has stopped.
const DIRTY_BITMAP: &[u8] = b"dirty-bitmap";
/// A virtio-mem device's plugged blocks; the device's path precedes this name. Up to
/// QEMU 10 the section follows RAM's START, in 11.1 it precedes it.
const VIRTIO_MEM: &[u8] = b"/virtio-mem-device-early";
const VIRTIO_MEM_VERSION: u32 = 1;

/// The first bytes of dirty bitmap records.
mod bitmap {
    pub(super) const EOS: u8 = 0x01;
    pub(super) const BITMAP_NAME: u8 = 0x04;
    pub(super) const DEVICE_NAME: u8 = 0x08;
    pub(super) const START: u8 = 0x10;
    /// The bitmap's granularity and flags.
    pub(super) const START_BYTES: usize = 5;
}

impl Splitter {
    /// Parses a START or FULL section that is not RAM's, up to its footer.
    pub(super) fn early_section(&mut self, rest: &[u8]) -> Result<usize, Halt> {
        let mut cursor = Cursor::new(rest);
        let kind = cursor.u8()?;
        let section = cursor.u32()?;
        let name = cursor.name()?;
        let (_instance, version) = (cursor.u32()?, cursor.u32()?);
        match kind {
            kind::START if name == DIRTY_BITMAP => {
                bitmap_starts(&mut cursor)?;
                self.bitmap_section = Some(section);
            }
            kind::FULL if name.ends_with(VIRTIO_MEM) && version == VIRTIO_MEM_VERSION => {
                let bytes = virtio_mem_bytes(cursor.clone())?;
                if bytes > VIRTIO_MEM_BYTES_MAX {
                    return Err(unknown_section(name));
                }
                cursor.take(bytes)?;
            }
            _ => return Err(unknown_section(name)),
        }
        let record = &rest[..cursor.at()];
        self.pass_by(record)?;
        self.place = Position::EarlyFooter { section, is_dropped: false };
        Ok(record.len())
    }

    /// Parses a PART section of the dirty bitmaps before RAM has ended. It is dropped,
    /// because it is empty and a held QEMU writes thousands a second.
    pub(super) fn bitmap_part(&mut self, rest: &[u8], section: u32) -> Result<usize, Halt> {
        let flags = Cursor::new(&rest[SECTION_BYTES..]).u8();
        let flags = flags.map_err(|Short(need)| Short(SECTION_BYTES + need))?;
        if flags != bitmap::EOS {
            return Err(Unsplittable::Bitmaps { flags }.into());
        }
        let record = &rest[..=SECTION_BYTES];
        self.keep_whole(record)?;
        self.place = Position::EarlyFooter { section, is_dropped: true };
        Ok(record.len())
    }

    /// Parses the footer after such a section, or notes its absence.
    pub(super) fn early_footer(
        &mut self,
        rest: &[u8],
        section: u32,
        is_dropped: bool,
    ) -> Result<usize, Halt> {
        let mut cursor = Cursor::new(rest);
        if cursor.u8()? != kind::FOOTER {
            self.place = Position::Between;
            return Ok(0);
        }
        if cursor.u32()? != section {
            return Err(StreamError::Footer { section }.into());
        }
        let record = &rest[..cursor.at()];
        if is_dropped {
            self.keep_whole(record)?;
        } else {
            self.pass_by(record)?;
        }
        self.place = Position::Between;
        Ok(record.len())
    }

    /// Adds a record to the head if that was not sent yet, otherwise to the tail.
    fn pass_by(&mut self, record: &[u8]) -> Result<(), StreamError> {
        if !self.head_sent {
            self.keep_whole(record)?;
            return self.keep_head(record);
        }
        if self.tail.len() + record.len() > HEAD_BYTES_MAX {
            return Err(StreamError::HeadTooLong);
        }
        self.tail.extend_from_slice(record);
        Ok(())
    }
}

/// Parses the announced bitmaps: the disk, name and granularity of each.
fn bitmap_starts(cursor: &mut Cursor<'_>) -> Result<(), Halt> {
    loop {
        let flags = cursor.u8()?;
        if flags == bitmap::EOS {
            return Ok(());
        }
        if flags & !(bitmap::BITMAP_NAME | bitmap::DEVICE_NAME) != bitmap::START {
            return Err(Unsplittable::Bitmaps { flags }.into());
        }
        for name in [bitmap::DEVICE_NAME, bitmap::BITMAP_NAME] {
            if flags & name != 0 {
                cursor.name()?;
            }
        }
        cursor.take(bitmap::START_BYTES)?;
    }
}

/// The length of the device's data: where its memory is, and a bit for each of its
/// blocks.
fn virtio_mem_bytes(mut cursor: Cursor<'_>) -> Result<usize, Short> {
    let begin = cursor.at();
    let (_address, region_bytes, block_bytes) = (cursor.u64()?, cursor.u64()?, cursor.u64()?);
    let (_node, _plugged_bytes) = (cursor.u32()?, cursor.u64()?);
    let blocks = region_bytes.checked_div(block_bytes).unwrap_or(u64::MAX);
    let bitmap = usize::try_from(blocks.div_ceil(u64::from(u64::BITS))).unwrap_or(usize::MAX);
    Ok(bitmap.saturating_mul(WORD_BYTES).saturating_add(cursor.at() - begin))
}

fn unknown_section(name: &[u8]) -> Halt {
    Unsplittable::Section { name: String::from_utf8_lossy(name).into_owned() }.into()
}
