//! A batch whose pages are sent by name, and the destination's answer.
//!
//! ```text
//! header   0 magic u16   2 flags u8   3 zero u8   4 block u16   6 pages u16
//!          8 fills u16  10 zero u16  12 epoch u32  16 ticket u32
//! tables   pages x page u32, then fills x { first u32, count u32, byte u8 },
//!          then pages x name [20], then, if flag 2 is set, pages x place u64
//!
//! answer   0 magic u32   4 placed u64  12 wanted u128  28 later u128
//! ```
//! All fields are little-endian. `wanted` and `later` have a bit for each page, in the table's
//! order. Requested pages are sent as bytes next, in a batch of their own. For pages of `later`, a
//! message on the control connection follows when they have arrived, or if they are requested after
//! all. All others are placed. A place is where a disk of the VM should have the same content: the
//! disk's number in the upper 16 bits, the sector of 512 bytes in the others; all ones mean none.

use content::{NAME_BYTES, Name};
use page::{BATCH_PAGES, BlockId, Epoch, Fill, PageIndex, PageSet};

use crate::batch::{FILLS_MAX, Tables};
use crate::error::WireError;
use crate::read::{le16, le32, le64};

pub(crate) const MAGIC: u16 = 0xd7b3;
const ANSWER_MAGIC: u32 = 0xd7ac_0002;
const MAY_WAIT: u8 = 1;
const HAS_PLACES: u8 = 2;
const PLACE_BYTES: usize = 8;
const SECTOR_BITS: u32 = 48;

/// Where a disk of the VM should have a page's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiskLocation {
    /// The disk, by its number among those that are read.
    pub disk: u16,
    /// Its first sector, of 512 bytes; below 2^48.
    pub sector: u64,
}

impl DiskLocation {
    const SECTORS: u64 = 1 << SECTOR_BITS;

    fn code(place: Option<Self>) -> u64 {
        let place = place.filter(|place| place.sector < Self::SECTORS);
        place.map_or(u64::MAX, |place| u64::from(place.disk) << SECTOR_BITS | place.sector)
    }

    fn of(code: u64) -> Option<Self> {
        let disk = u16::try_from(code >> SECTOR_BITS).unwrap_or(u16::MAX);
        (code != u64::MAX).then_some(Self { disk, sector: code % Self::SECTORS })
    }
}

/// The content of a batch of names.
#[derive(Clone, Copy, Debug)]
pub struct Names<'n> {
    /// The block that its pages belong to.
    pub block: BlockId,
    /// Their epoch.
    pub epoch: Epoch,
    /// The number by which the destination refers to it later.
    pub ticket: u32,
    /// Whether the source can read the pages' bodies again.
    pub may_wait: bool,
    /// A name for each page.
    pub names: &'n [Name],
    /// A place for each page, or none at all.
    pub places: &'n [Option<DiskLocation>],
    /// Fill runs.
    pub fills: &'n [Fill],
}

impl Names<'_> {
    /// Writes header and tables for these pages after what `out` holds.
    ///
    /// # Panics
    /// If the numbers of names or places don't match that of pages, or exceed a batch's limit: our
    /// own error.
    pub fn write(&self, pages: impl ExactSizeIterator<Item = PageIndex>, out: &mut Vec<u8>) {
        let Self { names, places, fills, .. } = self;
        assert_eq!(pages.len(), names.len(), "each page has a name");
        assert!(places.is_empty() || places.len() == names.len(), "each has a place, or none");
        assert!(fills.len() <= FILLS_MAX, "the tap hands on before {FILLS_MAX} runs");
        let has_places = if places.is_empty() { 0 } else { HAS_PLACES };
        let may_wait = if self.may_wait { MAY_WAIT } else { 0 };
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&[may_wait | has_places, 0]);
        out.extend_from_slice(&self.block.0.to_le_bytes());
        let count = |length: usize| u16::try_from(length).expect("capped").to_le_bytes();
        out.extend_from_slice(&count(names.len()));
        out.extend_from_slice(&count(fills.len()));
        out.extend_from_slice(&[0, 0]);
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
        out.extend_from_slice(&self.ticket.to_le_bytes());
        Tables::write(pages, fills, out);
        for name in *names {
            out.extend_from_slice(&name.0);
        }
        for place in *places {
            out.extend_from_slice(&DiskLocation::code(*place).to_le_bytes());
        }
    }
}

/// The header before the tables of a batch of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedHeader {
    /// The block that its pages belong to.
    pub block: BlockId,
    /// Their epoch.
    pub epoch: Epoch,
    /// The number of pages sent by name.
    pub pages: u16,
    /// The number of fill runs.
    pub fills: u16,
    /// The number by which the destination refers to the batch later.
    pub ticket: u32,
    /// Whether the source can read the pages' bodies again, so that the destination may wait for
    /// content in flight from another provider.
    pub may_wait: bool,
    /// Whether places follow the names.
    pub has_places: bool,
}

impl NamedHeader {
    /// Its length on the wire.
    pub const BYTES: usize = 20;

    /// Parses a peer's bytes. Whether the block exists is up to the placer.
    ///
    /// # Errors
    /// If a count is above its cap.
    pub(crate) fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, WireError> {
        let header = Self {
            may_wait: bytes[2] & MAY_WAIT != 0,
            has_places: bytes[2] & HAS_PLACES != 0,
            block: BlockId(le16(bytes, 4)),
            pages: le16(bytes, 6),
            fills: le16(bytes, 8),
            epoch: Epoch(le32(bytes, 12)),
            ticket: le32(bytes, 16),
        };
        let cap = |what, value: u16, max: usize| {
            let (value, max) = (u64::from(value), max as u64);
            if value > max { Err(WireError::TooLarge { what, value, max }) } else { Ok(()) }
        };
        cap("a number of named pages", header.pages, BATCH_PAGES)?;
        cap("a number of fill runs", header.fills, FILLS_MAX)?;
        Ok(header)
    }

    /// Bytes of the tables that follow.
    #[must_use]
    pub fn tables_bytes(self) -> usize {
        let place_bytes = if self.has_places { PLACE_BYTES } else { 0 };
        self.page_bytes() + usize::from(self.pages) * (NAME_BYTES + place_bytes)
    }

    fn page_bytes(self) -> usize {
        Tables::bytes(self.pages, self.fills)
    }
}

/// The tables of one batch of names at a time, in vectors that are reused.
#[derive(Debug, Default)]
pub struct NamedTables {
    /// The pages sent by name.
    pub pages: Vec<PageIndex>,
    /// Their names.
    pub names: Vec<Name>,
    /// Where disks should have their content: one place for each page, or none at all.
    pub places: Vec<Option<DiskLocation>>,
    /// The fill runs.
    pub fills: Vec<Fill>,
}

impl NamedTables {
    /// Reads the tables that `header` announces. `bytes` are exactly [`NamedHeader::tables_bytes`]
    /// bytes; checking addresses is up to the placer.
    ///
    /// # Errors
    /// If the length is wrong.
    pub fn parse(&mut self, header: NamedHeader, bytes: &[u8]) -> Result<(), WireError> {
        if bytes.len() != header.tables_bytes() {
            return Err(WireError::Contradiction("tables of another length than announced"));
        }
        let (pages, rest) = bytes.split_at(header.page_bytes());
        let (names, places) = rest.split_at(usize::from(header.pages) * NAME_BYTES);
        Tables::read(header.pages, pages, &mut self.pages, &mut self.fills);
        Tables::read_names(names, &mut self.names);
        let places = places.as_chunks::<PLACE_BYTES>().0.iter();
        self.places.clear();
        self.places.extend(places.map(|place| DiskLocation::of(u64::from_le_bytes(*place))));
        Ok(())
    }
}

/// The fate of the pages of a batch of names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The number of batches of this connection that were handled, including this one.
    pub placed: u64,
    /// Pages to be sent as bytes.
    pub requested: PageSet,
    /// Pages in flight from another provider.
    pub later: PageSet,
}

impl Answer {
    /// Its length on the wire.
    pub const BYTES: usize = 44;

    /// Whether an answer starts with these bytes.
    #[must_use]
    pub fn begins(bytes: &[u8; 4]) -> bool {
        u32::from_le_bytes(*bytes) == ANSWER_MAGIC
    }

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&ANSWER_MAGIC.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.placed.to_le_bytes());
        bytes[12..28].copy_from_slice(&self.requested.bits().to_le_bytes());
        bytes[28..].copy_from_slice(&self.later.bits().to_le_bytes());
        bytes
    }

    /// Parses a peer's bytes.
    ///
    /// # Errors
    /// If it is not an answer, or a page is both wanted and deferred.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, WireError> {
        if le32(bytes, 0) != ANSWER_MAGIC {
            let value = u64::from(le32(bytes, 0));
            return Err(WireError::Unknown { what: "answer", value });
        }
        let bits = |at| u128::from(le64(bytes, at)) | u128::from(le64(bytes, at + 8)) << 64;
        let set = |at| PageSet::from_bits(bits(at));
        let answer = Self { placed: le64(bytes, 4), requested: set(12), later: set(28) };
        if !(answer.requested & answer.later).is_empty() {
            return Err(WireError::Contradiction("a page that is wanted and comes later"));
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use page::{PAGE_BYTES, Pool, SLOT_BYTES};
    use proptest::prelude::*;

    use super::*;
    use crate::block::LaneHeader;

    proptest! {
        #[test]
        fn a_batch_of_names_round_trips(
            block: u16, epoch: u32, ticket: u32, may_wait: bool,
            pages in prop::collection::vec((any::<u32>(), any::<[u8; NAME_BYTES]>()), 0..=BATCH_PAGES),
            disk: u16, sectors: bool,
            fills in prop::collection::vec((any::<u32>(), any::<u8>()), 0..300),
        ) {
            let mut batch = Pool::new(SLOT_BYTES).take().unwrap();
            (batch.block, batch.epoch) = (BlockId(block), Epoch(epoch));
            for (nth, (page, _)) in pages.iter().enumerate() {
                batch.push_body(PageIndex(*page), nth * PAGE_BYTES);
            }
            for (page, byte) in &fills {
                batch.push_fill(PageIndex(*page), *byte);
            }
            let names: Vec<Name> = pages.iter().map(|(_, name)| Name(*name)).collect();
            let mut bytes = Vec::new();
            let place = |page: u32| {
                let place = DiskLocation { disk, sector: u64::from(page) << 15 };
                (!page.is_multiple_of(3) && disk != u16::MAX).then_some(place)
            };
            let places: Vec<_> =
                pages.iter().filter(|_| sectors).map(|(page, _)| place(*page)).collect();
            let named = Names {
                block: batch.block,
                epoch: batch.epoch,
                ticket,
                may_wait,
                names: &names,
                places: &places,
                fills: batch.fills(),
            };
            named.write(batch.bodies().iter().map(|body| body.page), &mut bytes);
            let (head, rest) = bytes.split_first_chunk().unwrap();
            let LaneHeader::Named(header) = LaneHeader::parse(head).unwrap() else { panic!() };
            prop_assert_eq!((header.block, header.epoch), (batch.block, batch.epoch));
            prop_assert_eq!((header.ticket, header.may_wait), (ticket, may_wait));
            let mut tables = NamedTables::default();
            tables.parse(header, rest).unwrap();
            prop_assert_eq!(&tables.names, &names);
            prop_assert_eq!(&tables.places, &places);
            let indices: Vec<_> = pages.iter().map(|(page, _)| PageIndex(*page)).collect();
            prop_assert_eq!(&tables.pages, &indices);
            prop_assert_eq!(tables.fills.as_slice(), batch.fills());
            prop_assert!(tables.parse(header, &rest[..rest.len() / 2]).is_err() || rest.is_empty());
        }

        #[test]
        fn an_answer_comes_back_as_it_went(placed: u64, wanted: u128, later: u128) {
            let answer = |wanted, later| {
                let [wanted, later] = [wanted, later].map(PageSet::from_bits);
                Answer { placed, requested: wanted, later }
            };
            let good = answer(wanted, later & !wanted);
            prop_assert_eq!(Answer::parse(&good.to_bytes()).unwrap(), good);
            let both = answer(wanted | 1, later | 1);
            prop_assert!(Answer::parse(&both.to_bytes()).is_err());
        }
    }

    #[test]
    fn garbage_is_not_an_answer() {
        assert!(Answer::parse(&[0; Answer::BYTES]).is_err());
        assert!(!Answer::begins(&[0; 4]));
        assert!(Answer::begins(Answer::default().to_bytes().first_chunk().unwrap()));
    }
}
