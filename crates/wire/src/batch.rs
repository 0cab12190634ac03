//! A batch on a lane, and its acknowledgement.
//!
//! ```text
//! header   0 magic u16   2 encoding u8   3 form u8   4 block u16   6 bodies u16
//!          8 fills u16  10 zero u16     12 epoch u32  16 payload bytes u32
//! tables   bodies x page u32, then fills x { first u32, count u32, byte u8 },
//!          then in form 2 bodies x name [20]
//! payload  forms 0 and 2: the bodies' bytes, in the table's order, encoded as one
//!          form 1: their deltas (`page::Deltas`), encoded as one
//! ```
//! Forms 1 and 2 are used only if the destination has reported that it accepts them. All fields are
//! little-endian. An [`Ack`] counts the batches of this connection that are placed. So losing one
//! with a dead connection costs nothing: whatever was not acknowledged there is sent again on
//! another lane.

use content::{NAME_BYTES, Name};
use page::{BATCH_PAGES, Batch, BlockId, Epoch, Fill, PAGE_BYTES, PageIndex};

use crate::error::WireError;
use crate::read::{le16, le32, le64};

const MAGIC: u16 = 0xd7b1;
const ACK_MAGIC: u32 = 0xd7ac_0001;
const PAGE_ENTRY_BYTES: usize = 4;
const FILL_ENTRY_BYTES: usize = 9;
/// The forms of a batch's pages.
const BODIES: u8 = 0;
const DELTAS: u8 = 1;
const NAMED_BODIES: u8 = 2;

/// The most fill runs in one batch; the tap hands a batch on long before.
pub const FILLS_MAX: usize = 8192;

/// The header before a batch's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchHeader {
    /// How the payload is encoded, as `page::Encoding`'s code.
    pub encoding: u8,
    /// The block that its pages belong to.
    pub block: BlockId,
    /// Their epoch.
    pub epoch: Epoch,
    /// The number of pages sent as bytes.
    pub bodies: u16,
    /// The number of fill runs.
    pub fills: u16,
    /// Bytes of payload.
    pub payload_bytes: u32,
    /// Whether the pages are sent as deltas.
    pub deltas: bool,
    /// Whether the pages' names are sent with their bodies.
    pub has_names: bool,
}

/// The form and length of a batch's payload.
#[derive(Clone, Copy, Debug)]
pub struct Payload {
    /// As `page::Encoding`'s code.
    pub encoding: u8,
    /// Its encoded length.
    pub bytes: usize,
    /// Whether it holds deltas instead of bodies.
    pub deltas: bool,
}

impl BatchHeader {
    /// Its length on the wire.
    pub const BYTES: usize = 20;

    /// Parses a peer's bytes. Whether the block exists is up to the placer.
    ///
    /// # Errors
    /// If a count is above its cap, or the fields contradict each other.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, WireError> {
        if le16(bytes, 0) != MAGIC {
            return Err(WireError::Unknown {
                what: "kind of frame",
                value: u64::from(le16(bytes, 0)),
            });
        }
        let header = Self {
            encoding: bytes[2],
            deltas: bytes[3] == DELTAS,
            has_names: bytes[3] == NAMED_BODIES,
            block: BlockId(le16(bytes, 4)),
            bodies: le16(bytes, 6),
            fills: le16(bytes, 8),
            epoch: Epoch(le32(bytes, 12)),
            payload_bytes: le32(bytes, 16),
        };
        if bytes[3] > NAMED_BODIES {
            return Err(WireError::Unknown { what: "form of pages", value: bytes[3].into() });
        }
        let cap = |what, value: u64, max: usize| {
            if value > max as u64 {
                return Err(WireError::TooLarge { what, value, max: max as u64 });
            }
            Ok(())
        };
        cap("a number of pages", u64::from(header.bodies), BATCH_PAGES)?;
        cap("a number of fill runs", u64::from(header.fills), FILLS_MAX)?;
        let raw_bytes = usize::from(header.bodies) * PAGE_BYTES;
        cap("a payload", u64::from(header.payload_bytes), raw_bytes)?;
        if header.bodies > 0 && header.payload_bytes == 0 {
            return Err(WireError::Contradiction("pages without a payload"));
        }
        Ok(header)
    }

    fn write(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC.to_le_bytes());
        let form = match (self.deltas, self.has_names) {
            (true, _) => DELTAS,
            (false, true) => NAMED_BODIES,
            (false, false) => BODIES,
        };
        out.extend_from_slice(&[self.encoding, form]);
        out.extend_from_slice(&self.block.0.to_le_bytes());
        out.extend_from_slice(&self.bodies.to_le_bytes());
        out.extend_from_slice(&self.fills.to_le_bytes());
        out.extend_from_slice(&[0, 0]);
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
        out.extend_from_slice(&self.payload_bytes.to_le_bytes());
    }

    /// Bytes of the tables that follow.
    #[must_use]
    pub fn tables_bytes(self) -> usize {
        Tables::bytes(self.bodies, self.fills) + self.names_bytes()
    }

    fn names_bytes(self) -> usize {
        if self.has_names { usize::from(self.bodies) * NAME_BYTES } else { 0 }
    }

    /// Writes the header and the tables of `batch` after what `out` holds, with `names` of its
    /// bodies, or none.
    ///
    /// # Panics
    /// If the batch has more fill runs than [`FILLS_MAX`], which is an error of the tap, or some of
    /// its bodies have names and others don't, or no bodies: our own error.
    pub fn write_for(batch: &Batch, names: &[Name], payload: Payload, out: &mut Vec<u8>) {
        assert!(batch.fills().len() <= FILLS_MAX, "the tap hands on before {FILLS_MAX} runs");
        let has_names = !names.is_empty();
        let is_alike = names.len() == batch.bodies().len() && !payload.deltas;
        assert!(!has_names || is_alike, "each body has a name, or none");
        let header = Self {
            encoding: payload.encoding,
            deltas: payload.deltas,
            has_names,
            block: batch.block,
            epoch: batch.epoch,
            bodies: u16::try_from(batch.bodies().len()).expect("at most BATCH_PAGES"),
            fills: u16::try_from(batch.fills().len()).expect("at most FILLS_MAX"),
            payload_bytes: u32::try_from(payload.bytes).expect("at most BATCH_PAGES pages"),
        };
        header.write(out);
        Tables::write(batch.bodies().iter().map(|body| body.page), batch.fills(), out);
        for name in names {
            out.extend_from_slice(&name.0);
        }
    }
}

/// The tables of one batch at a time, in vectors that are reused.
#[derive(Debug, Default)]
pub struct Tables {
    /// The pages sent as bytes, in the payload's order.
    pub pages: Vec<PageIndex>,
    /// The fill runs.
    pub fills: Vec<Fill>,
    /// The pages' names, or none.
    pub names: Vec<Name>,
}

impl Tables {
    /// Reads the tables that `header` announces. `bytes` are exactly [`BatchHeader::tables_bytes`]
    /// bytes; checking addresses is up to the placer.
    ///
    /// # Errors
    /// If the length is wrong.
    pub fn parse(&mut self, header: BatchHeader, bytes: &[u8]) -> Result<(), WireError> {
        if bytes.len() != header.tables_bytes() {
            return Err(WireError::Contradiction("tables of another length than announced"));
        }
        let (pages, names) = bytes.split_at(bytes.len() - header.names_bytes());
        Self::read(header.bodies, pages, &mut self.pages, &mut self.fills);
        Self::read_names(names, &mut self.names);
        Ok(())
    }

    /// The length of tables.
    pub(crate) fn bytes(pages: u16, fills: u16) -> usize {
        usize::from(pages) * PAGE_ENTRY_BYTES + usize::from(fills) * FILL_ENTRY_BYTES
    }

    pub(crate) fn write(pages: impl Iterator<Item = PageIndex>, fills: &[Fill], out: &mut Vec<u8>) {
        for page in pages {
            out.extend_from_slice(&page.0.to_le_bytes());
        }
        for fill in fills {
            out.extend_from_slice(&fill.first.0.to_le_bytes());
            out.extend_from_slice(&fill.count.to_le_bytes());
            out.push(fill.byte);
        }
    }

    /// Reads tables with `count` pages from all of `bytes`.
    pub(crate) fn read(
        count: u16,
        bytes: &[u8],
        pages: &mut Vec<PageIndex>,
        fills: &mut Vec<Fill>,
    ) {
        let (table, rest) = bytes.split_at(usize::from(count) * PAGE_ENTRY_BYTES);
        pages.clear();
        pages.extend(table.chunks_exact(PAGE_ENTRY_BYTES).map(|entry| PageIndex(le32(entry, 0))));
        fills.clear();
        fills.extend(rest.chunks_exact(FILL_ENTRY_BYTES).map(|entry| Fill {
            first: PageIndex(le32(entry, 0)),
            count: le32(entry, 4),
            byte: entry[8],
        }));
    }

    /// Reads names from all of `bytes`.
    pub(crate) fn read_names(bytes: &[u8], names: &mut Vec<Name>) {
        names.clear();
        names.extend(bytes.as_chunks().0.iter().map(|name| Name(*name)));
    }
}

/// Acknowledges the batches of this connection that are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// Their number, counted from the connection's start.
    pub placed: u64,
}

impl Ack {
    /// Its length on the wire.
    pub const BYTES: usize = 12;

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&ACK_MAGIC.to_le_bytes());
        bytes[4..].copy_from_slice(&self.placed.to_le_bytes());
        bytes
    }

    /// Parses a peer's bytes.
    ///
    /// # Errors
    /// If they are not an acknowledgement.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, WireError> {
        match le32(bytes, 0) {
            ACK_MAGIC => Ok(Self { placed: le64(bytes, 4) }),
            other => Err(WireError::Unknown { what: "acknowledgement", value: u64::from(other) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use page::{Pool, SLOT_BYTES};
    use proptest::prelude::*;

    use super::*;

    fn name(nth: u32) -> Name {
        let mut name = Name([7; NAME_BYTES]);
        name.0[..4].copy_from_slice(&nth.to_le_bytes());
        name
    }

    proptest! {
        #[test]
        fn a_batch_round_trips(
            block: u16, epoch: u32, encoding: u8, form in BODIES..=NAMED_BODIES,
            pages in prop::collection::vec(any::<u32>(), 0..=BATCH_PAGES),
            fills in prop::collection::vec((any::<u32>(), any::<u8>()), 0..300),
        ) {
            let mut batch = Pool::new(SLOT_BYTES).take().unwrap();
            batch.block = BlockId(block);
            batch.epoch = Epoch(epoch);
            for (nth, page) in pages.iter().enumerate() {
                batch.push_body(PageIndex(*page), nth * PAGE_BYTES);
            }
            for (page, byte) in &fills {
                batch.push_fill(PageIndex(*page), *byte);
            }
            let mut bytes = Vec::new();
            let deltas = form == DELTAS;
            let payload = Payload { encoding, bytes: pages.len() * PAGE_BYTES, deltas };
            let mut names: Vec<Name> = pages.iter().map(|page| name(*page)).collect();
            names.truncate(if form == NAMED_BODIES { pages.len() } else { 0 });
            BatchHeader::write_for(&batch, &names, payload, &mut bytes);
            let (head, rest) = bytes.split_first_chunk::<{ BatchHeader::BYTES }>().unwrap();
            let header = BatchHeader::parse(head).unwrap();
            prop_assert_eq!((header.block, header.epoch), (batch.block, batch.epoch));
            prop_assert_eq!((header.encoding, header.deltas), (encoding, deltas));
            let mut tables = Tables::default();
            tables.parse(header, rest).unwrap();
            prop_assert_eq!(tables.pages, pages.into_iter().map(PageIndex).collect::<Vec<_>>());
            prop_assert_eq!(tables.fills.as_slice(), batch.fills());
            prop_assert_eq!(tables.names, names);
        }

        #[test]
        fn any_bytes_are_a_header_or_an_error(bytes: [u8; BatchHeader::BYTES]) {
            let mut bytes = bytes;
            bytes[..2].copy_from_slice(&MAGIC.to_le_bytes());
            if let Ok(header) = BatchHeader::parse(&bytes) {
                prop_assert!(usize::from(header.bodies) <= BATCH_PAGES);
                prop_assert!(usize::from(header.fills) <= FILLS_MAX);
                prop_assert!(header.payload_bytes as usize <= BATCH_PAGES * PAGE_BYTES);
            }
        }
    }

    #[test]
    fn an_ack_round_trips_and_garbage_is_refused() {
        let ack = Ack { placed: u64::MAX - 1 };
        assert_eq!(Ack::parse(&ack.to_bytes()).unwrap(), ack);
        assert!(Ack::parse(&[0; Ack::BYTES]).is_err());
    }
}
