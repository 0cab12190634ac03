//! The packets on a multifd channel.
//!
//! A channel starts with one [`Init`]. Then come packets: a head of
//! [`HEAD_BYTES`], which always has room for [`PACKET_PAGES`] offsets, and the
//! bytes of its normal pages, one after the other.
//!
//! ```text
//! head:  magic version flags alloc | normal size | number | zero ... | name[256] | offset[128]
//! at:        0       4     8    12 |    16    20 |     24 |   32     |        64 |        320
//! ```

use page::{BlockId, PAGE_BYTES, PageIndex};

use crate::{Blocks, StreamError};

/// The magic number of an init and of every packet.
pub const MAGIC: u32 = 0x1122_3344;
/// Bytes of a channel's first message.
pub const INIT_BYTES: usize = 64;
/// Most pages of a packet.
pub const PACKET_PAGES: usize = 128;
/// Bytes of a packet's head, the same for all packets: a packet that carries only SYNC may
/// claim room for 0 pages and still has the whole table.
pub const HEAD_BYTES: usize = OFFSETS_AT + 8 * PACKET_PAGES;

const VERSION: u32 = 1;
const NAME_AT: usize = 64;
const NAME_BYTES: usize = 256;
const OFFSETS_AT: usize = NAME_AT + NAME_BYTES;
const _: () = assert!(HEAD_BYTES == 1344);

const FLAG_SYNC: u32 = 1;
const FLAGS_COMPRESSION: u32 = 0b11_1110;
const FLAG_DEVICE_STATE: u32 = 1 << 6;

/// An error on a multifd channel. QEMU at the source, or another process that wrote to its
/// socket, is to blame; the source VM can continue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MultifdError {
    /// Not a multifd channel, or one that is out of sync.
    #[error("a multifd packet starts with {magic:#010x}, version {version}")]
    NotAPacket {
        /// The first four bytes.
        magic: u32,
        /// The four after them.
        version: u32,
    },
    /// Pages compressed by QEMU.
    #[error(
        "QEMU compresses multifd pages (flags {flags:#x}); set multifd-compression to none and \
         migrate again"
    )]
    Compressed {
        /// The packet's flags.
        flags: u32,
    },
    /// A device's state is sent on multifd channels.
    #[error("a device sends its state over multifd (VFIO); migrate with the classic stream")]
    DeviceState,
    /// Flags that are newer than QEMU 10.
    #[error(
        "a multifd packet has the flags {flags:#x}, which are not known; migrate with the classic \
         stream"
    )]
    Flags {
        /// The packet's flags.
        flags: u32,
    },
    /// More pages than a packet has room for.
    #[error(
        "a multifd packet claims {normal} normal and {zero} zero pages, beyond {}",
        PACKET_PAGES
    )]
    TooManyPages {
        /// Pages with bodies.
        normal: u32,
        /// Zero pages.
        zero: u32,
    },
    /// Bodies that are not one page each.
    #[error("a multifd packet carries {bytes} bytes for {normal} pages of {} bytes", PAGE_BYTES)]
    PageSize {
        /// Pages with bodies.
        normal: u32,
        /// Bytes that follow the head.
        bytes: u32,
    },
    /// A block or an offset that was not announced.
    #[error(transparent)]
    Page(#[from] StreamError),
}

/// A channel's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Init {
    /// The VM's UUID, all zeros if it has none.
    pub uuid: [u8; 16],
    /// The channel's number, from 0.
    pub id: u8,
}

impl Init {
    /// Parses it.
    ///
    /// # Errors
    /// [`MultifdError::NotAPacket`].
    pub fn parse(bytes: &[u8; INIT_BYTES]) -> Result<Self, MultifdError> {
        check_start(bytes)?;
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[8..24]);
        Ok(Self { uuid, id: bytes[24] })
    }

    /// Writes it.
    pub fn write(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&VERSION.to_be_bytes());
        out.extend_from_slice(&self.uuid);
        out.push(self.id);
        out.resize(start + INIT_BYTES, 0);
    }
}

/// A packet's head, checked as far as possible without the block list.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    bytes: &'a [u8; HEAD_BYTES],
    normal: usize,
    zero: usize,
    sync: bool,
}

impl<'a> Packet<'a> {
    /// Parses a packet's head.
    ///
    /// # Errors
    /// All of [`MultifdError`] but [`MultifdError::Page`].
    pub fn parse(bytes: &'a [u8; HEAD_BYTES]) -> Result<Self, MultifdError> {
        check_start(bytes)?;
        let flags = word(bytes, 8);
        if flags & FLAG_DEVICE_STATE != 0 {
            return Err(MultifdError::DeviceState);
        }
        if flags & FLAGS_COMPRESSION != 0 {
            return Err(MultifdError::Compressed { flags });
        }
        if flags & !FLAG_SYNC != 0 {
            return Err(MultifdError::Flags { flags });
        }
        let (normal, body_bytes, zero) = (word(bytes, 16), word(bytes, 20), word(bytes, 32));
        if u64::from(normal) + u64::from(zero) > PACKET_PAGES as u64 {
            return Err(MultifdError::TooManyPages { normal, zero });
        }
        // Without normal pages the field holds a previous packet's value.
        if normal != 0 && u64::from(body_bytes) != u64::from(normal) * PAGE_BYTES as u64 {
            return Err(MultifdError::PageSize { normal, bytes: body_bytes });
        }
        Ok(Self {
            bytes,
            normal: normal as usize,
            zero: zero as usize,
            sync: flags & FLAG_SYNC != 0,
        })
    }

    /// Whether the channel's epoch ends with this packet.
    #[must_use]
    pub fn sync(&self) -> bool {
        self.sync
    }

    /// The number of page bodies that follow the head.
    #[must_use]
    pub fn normal(&self) -> usize {
        self.normal
    }

    /// Whether the packet has no pages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.normal + self.zero == 0
    }

    /// The packet's pages, all checked against the block list; none if there are none.
    ///
    /// # Errors
    /// [`MultifdError::Page`].
    pub fn pages(&self, blocks: &Blocks) -> Result<Option<Pages<'a>>, MultifdError> {
        if self.is_empty() {
            return Ok(None);
        }
        let name = &self.bytes[NAME_AT..NAME_AT + NAME_BYTES];
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let block = blocks.find(name).ok_or_else(|| StreamError::UnknownBlock {
            name: String::from_utf8_lossy(name).into_owned(),
        })?;
        let (normal, rest) = self.bytes[OFFSETS_AT..].split_at(8 * self.normal);
        let zero = &rest[..8 * self.zero];
        for offset in offsets(normal).chain(offsets(zero)) {
            blocks.page(block, offset)?;
        }
        Ok(Some(Pages { block, normal, zero }))
    }
}

/// The checked pages of a packet.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// The block that all pages belong to.
    pub block: BlockId,
    normal: &'a [u8],
    zero: &'a [u8],
}

impl<'a> Pages<'a> {
    /// The pages whose bodies follow the head, in order.
    pub fn normal(&self) -> impl ExactSizeIterator<Item = PageIndex> + use<'a> {
        offsets(self.normal).map(index)
    }

    /// The pages that are zero.
    pub fn zero(&self) -> impl ExactSizeIterator<Item = PageIndex> + use<'a> {
        offsets(self.zero).map(index)
    }
}

/// The page of an offset that [`Packet::pages`] has checked.
fn index(offset: u64) -> PageIndex {
    PageIndex::from_offset(offset).unwrap_or_default()
}

fn offsets(bytes: &[u8]) -> impl ExactSizeIterator<Item = u64> + use<'_> {
    bytes.chunks_exact(8).map(|chunk| {
        let mut offset = [0; 8];
        offset.copy_from_slice(chunk);
        u64::from_be_bytes(offset)
    })
}

/// Appends a packet's head as QEMU writes it; the bodies of the `normal` pages must follow.
///
/// At most [`PACKET_PAGES`] pages and 255 bytes of name fit. The rest is left out, but the
/// counts include it.
pub fn write_head(
    out: &mut Vec<u8>,
    block: &str,
    normal: &[PageIndex],
    zero: &[PageIndex],
    sync: bool,
) {
    let start = out.len();
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let alloc = if normal.is_empty() && zero.is_empty() { 0 } else { PACKET_PAGES };
    let words = [
        MAGIC,
        VERSION,
        u32::from(sync),
        count(alloc),
        count(normal.len()),
        count(normal.len() * PAGE_BYTES),
        0,
        0,
        count(zero.len()),
    ];
    for word in words {
        out.extend_from_slice(&word.to_be_bytes());
    }
    out.resize(start + NAME_AT, 0);
    out.extend(block.bytes().take(NAME_BYTES - 1));
    out.resize(start + OFFSETS_AT, 0);
    for page in normal.iter().chain(zero).take(PACKET_PAGES) {
        out.extend_from_slice(&page.offset().to_be_bytes());
    }
    out.resize(start + HEAD_BYTES, 0);
}

fn check_start<const N: usize>(bytes: &[u8; N]) -> Result<(), MultifdError> {
    let (magic, version) = (word(bytes, 0), word(bytes, 4));
    if (magic, version) != (MAGIC, VERSION) {
        return Err(MultifdError::NotAPacket { magic, version });
    }
    Ok(())
}

/// The big-endian number at a fixed offset of a fixed-size head.
fn word<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Block;

    fn blocks() -> Blocks {
        Blocks::new([Block { name: "pc.ram".to_owned(), bytes: 1 << 20 }]).unwrap()
    }

    fn head(block: &str, normal: &[u32], zero: &[u32], sync: bool) -> Box<[u8; HEAD_BYTES]> {
        let index = |pages: &[u32]| pages.iter().copied().map(PageIndex).collect::<Vec<_>>();
        let mut out = Vec::new();
        write_head(&mut out, block, &index(normal), &index(zero), sync);
        out.into_boxed_slice().try_into().unwrap()
    }

    #[test]
    fn reads_what_it_writes() {
        let bytes = head("pc.ram", &[3, 255], &[7], true);
        let packet = Packet::parse(&bytes).unwrap();
        assert!(packet.sync() && !packet.is_empty());
        let pages = packet.pages(&blocks()).unwrap().unwrap();
        assert_eq!(pages.block, BlockId(0));
        assert!(pages.normal().eq([PageIndex(3), PageIndex(255)]));
        assert!(pages.zero().eq([PageIndex(7)]));

        let mut out = Vec::new();
        Init { uuid: [5; 16], id: 3 }.write(&mut out);
        let init: &[u8; INIT_BYTES] = out.as_slice().try_into().unwrap();
        assert_eq!(Init::parse(init), Ok(Init { uuid: [5; 16], id: 3 }));
    }

    #[test]
    fn a_bare_sync_needs_no_block() {
        let mut bytes = head("", &[], &[], true);
        bytes[20..24].copy_from_slice(&4096u32.to_be_bytes());
        let packet = Packet::parse(&bytes).unwrap();
        assert!(packet.sync());
        assert!(packet.pages(&Blocks::default()).unwrap().is_none());
    }

    #[test]
    fn refuses_malformed_packets() {
        type Change = fn(&mut [u8; HEAD_BYTES]);
        let changes: [(Change, MultifdError); 6] = [
            (|head| head[0] = 0, MultifdError::NotAPacket { magic: 0x0022_3344, version: 1 }),
            (|head| head[11] = 4, MultifdError::Compressed { flags: 4 }),
            (|head| head[11] = 64, MultifdError::DeviceState),
            (|head| head[10] = 1, MultifdError::Flags { flags: 256 }),
            (|head| head[32] = 0xff, MultifdError::TooManyPages { normal: 1, zero: 0xff00_0000 }),
            (|head| head[21] = 1, MultifdError::PageSize { normal: 1, bytes: 0x1_1000 }),
        ];
        for (change, expected) in changes {
            let mut bytes = head("pc.ram", &[1], &[], false);
            change(&mut bytes);
            assert_eq!(Packet::parse(&bytes).unwrap_err(), expected);
        }
        for bytes in [head("pc.rom", &[1], &[], false), head("pc.ram", &[1], &[256], false)] {
            assert!(Packet::parse(&bytes).unwrap().pages(&blocks()).is_err());
        }
    }
}
