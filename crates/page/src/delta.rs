//! Deltas of pages: for each page, the parts that have changed since a version that the
//! destination has.
//!
//! ```text
//! table   pages x { changed u32, base u32 }
//! parts   of each page those whose bit is set in `changed`, in order, 128 bytes each
//! ```
//! All little-endian. With all bits set it is the whole page, and `base` is
//! meaningless.

use crate::{BATCH_PAGES, Buffer, DecodeError, Epoch, PAGE_BYTES};

/// Parts of a page.
pub const PARTS: usize = 32;
/// Bytes of a part.
pub const PART_BYTES: usize = PAGE_BYTES / PARTS;
const ENTRY_BYTES: usize = 8;
const WHOLE: u32 = u32::MAX;

/// The changed parts of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delta<'b> {
    changed: u32,
    base: Epoch,
    parts: &'b [u8],
}

impl Delta<'_> {
    /// The version that the delta applies to; none if it is the whole page.
    #[must_use]
    pub fn base(&self) -> Option<Epoch> {
        (self.changed != WHOLE).then_some(self.base)
    }

    /// Turns the base's bytes into those of the new version. A whole page needs no
    /// base.
    ///
    /// # Panics
    /// If `page` is not one page long.
    pub fn apply(&self, page: &mut [u8]) {
        assert_eq!(page.len(), PAGE_BYTES, "a page");
        let places = page.chunks_exact_mut(PART_BYTES).enumerate();
        let changed = places.filter(|(nth, _)| self.changed >> nth & 1 == 1);
        for ((_, place), part) in changed.zip(self.parts.chunks_exact(PART_BYTES)) {
            place.copy_from_slice(part);
        }
    }
}

/// The deltas of a batch, as received.
#[derive(Clone, Copy, Debug)]
pub struct Deltas<'b> {
    table: &'b [u8],
    parts: &'b [u8],
}

impl<'b> Deltas<'b> {
    /// Parses the deltas of `pages` pages.
    ///
    /// # Errors
    /// If the bytes are not exactly those deltas.
    pub fn parse(pages: usize, bytes: &'b [u8]) -> Result<Self, DecodeError> {
        let wrong = DecodeError::Deltas { bytes: bytes.len(), pages };
        if pages > BATCH_PAGES {
            return Err(DecodeError::TooManyBodies { bodies: pages });
        }
        let split = bytes.split_at_checked(pages * ENTRY_BYTES);
        let Some((table, parts)) = split else { return Err(wrong) };
        let deltas = Self { table, parts };
        let parts_bytes: usize = deltas.entries().map(|(changed, _)| bytes_of(changed)).sum();
        if parts_bytes == parts.len() { Ok(deltas) } else { Err(wrong) }
    }

    /// The deltas, one per page.
    pub fn iter(self) -> impl ExactSizeIterator<Item = Delta<'b>> {
        let mut rest = self.parts;
        self.entries().map(move |(changed, base)| {
            let (parts, after) = rest.split_at(bytes_of(changed));
            rest = after;
            Delta { changed, base, parts }
        })
    }

    fn entries(self) -> impl ExactSizeIterator<Item = (u32, Epoch)> + use<'b> {
        self.table.chunks_exact(ENTRY_BYTES).map(|entry| {
            let word = |at| u32::from_le_bytes(*entry[at..].first_chunk().expect("8 bytes"));
            (word(0), Epoch(word(4)))
        })
    }
}

fn bytes_of(changed: u32) -> usize {
    changed.count_ones() as usize * PART_BYTES
}

/// Writes the deltas of a batch's pages, one after the other.
#[derive(Debug, Default)]
pub struct DeltaWriter {
    buffer: Buffer,
    /// Bytes of the buffer that are in use.
    filled: usize,
    pages: usize,
}

impl DeltaWriter {
    /// Starts a batch of `pages` pages and discards the previous one.
    pub fn begin(&mut self, pages: usize) {
        self.filled = pages * ENTRY_BYTES;
        self.buffer.room(self.filled + pages * PAGE_BYTES)[..self.filled].fill(0);
        self.pages = 0;
    }

    /// Adds the next page: the parts set in the bit mask, which differ from the base;
    /// with no base, all parts.
    pub fn push(&mut self, page: &[u8], base: Option<(Epoch, u32)>) {
        let (base, changed) = base.unwrap_or((Epoch(0), WHOLE));
        let entry = &mut self.buffer[self.pages * ENTRY_BYTES..][..ENTRY_BYTES];
        entry[..4].copy_from_slice(&changed.to_le_bytes());
        entry[4..].copy_from_slice(&base.0.to_le_bytes());
        self.pages += 1;
        for (nth, part) in page.chunks_exact(PART_BYTES).enumerate() {
            if changed >> nth & 1 == 1 {
                self.buffer[self.filled..][..PART_BYTES].copy_from_slice(part);
                self.filled += PART_BYTES;
            }
        }
    }

    /// The encoded deltas.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..self.filled]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn written_deltas_turn_the_base_into_the_new_version(
            pages in prop::collection::vec((any::<u32>(), prop::option::of(any::<u32>())), 0..9),
        ) {
            let mut writer = DeltaWriter::default();
            writer.begin(3);
            writer.push(&[9; PAGE_BYTES], None);
            writer.begin(pages.len());
            for (nth, (changed, base)) in pages.iter().enumerate() {
                let new = [u8::try_from(nth + 1).unwrap(); PAGE_BYTES];
                writer.push(&new, base.map(|base| (Epoch(base), *changed)));
            }
            let deltas = Deltas::parse(pages.len(), writer.bytes()).unwrap();
            prop_assert_eq!(deltas.iter().len(), pages.len());
            for (nth, ((changed, base), delta)) in pages.iter().zip(deltas.iter()).enumerate() {
                let changed = base.map_or(WHOLE, |_| *changed);
                let base = base.filter(|_| changed != WHOLE);
                prop_assert_eq!(delta.base(), base.map(Epoch));
                let mut page = [0; PAGE_BYTES];
                delta.apply(&mut page);
                for (part, bytes) in page.chunks_exact(PART_BYTES).enumerate() {
                    let is_new = changed >> part & 1 == 1;
                    let byte = if is_new { u8::try_from(nth + 1).unwrap() } else { 0 };
                    prop_assert!(bytes.iter().all(|found| *found == byte));
                }
            }
        }

        #[test]
        fn any_bytes_are_deltas_or_an_error(
            pages in 0..BATCH_PAGES + 2,
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
        ) {
            if let Ok(deltas) = Deltas::parse(pages, &bytes) {
                let mut page = [0; PAGE_BYTES];
                deltas.iter().for_each(|delta| delta.apply(&mut page));
            }
        }
    }

    #[test]
    fn neither_too_little_nor_too_much_is_read() {
        let mut writer = DeltaWriter::default();
        writer.begin(2);
        writer.push(&[1; PAGE_BYTES], Some((Epoch(4), 0b101)));
        writer.push(&[2; PAGE_BYTES], Some((Epoch(4), 0)));
        let bytes = writer.bytes();
        assert_eq!(bytes.len(), 16 + 2 * PART_BYTES);
        assert!(Deltas::parse(2, bytes).is_ok());
        for cut in [0, 15, 16, bytes.len() - 1] {
            assert!(Deltas::parse(2, &bytes[..cut]).is_err(), "{cut}");
        }
        assert!(Deltas::parse(1, bytes).is_err() && Deltas::parse(3, bytes).is_err());
        assert!(Deltas::parse(BATCH_PAGES + 1, bytes).is_err());
    }
}
