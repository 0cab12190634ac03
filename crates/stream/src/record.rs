//! The numbers of QEMU's migration stream.

use page::PAGE_BYTES;

/// `QEVM`, the first four bytes of a main stream.
pub const MAGIC: u32 = 0x5145_564d;
/// The only version of the stream since 2009.
pub const VERSION: u32 = 3;

/// Kinds of records between sections.
pub(crate) mod kind {
    pub(crate) const EOF: u8 = 0x00;
    pub(crate) const START: u8 = 0x01;
    pub(crate) const PART: u8 = 0x02;
    pub(crate) const END: u8 = 0x03;
    pub(crate) const FULL: u8 = 0x04;
    pub(crate) const SUBSECTION: u8 = 0x05;
    pub(crate) const CONFIGURATION: u8 = 0x07;
    pub(crate) const COMMAND: u8 = 0x08;
    pub(crate) const FOOTER: u8 = 0x7e;
}

/// Commands that the splitter distinguishes.
pub(crate) mod command {
    pub(crate) const OPEN_RETURN_PATH: u16 = 1;
    pub(crate) const PING: u16 = 2;
    pub(crate) const POSTCOPY_ADVISE: u16 = 3;
    pub(crate) const POSTCOPY_RAM_DISCARD: u16 = 6;
    pub(crate) const PACKAGED: u16 = 7;
    pub(crate) const ENABLE_COLO: u16 = 8;
    pub(crate) const POSTCOPY_RESUME: u16 = 9;
    pub(crate) const RECV_BITMAP: u16 = 10;
    pub(crate) const SWITCHOVER_START: u16 = 11;
}

/// Flags in the low bits of a `ram` record's first word.
pub(crate) mod flag {
    pub(crate) const ZERO: u64 = 0x02;
    pub(crate) const MEM_SIZE: u64 = 0x04;
    pub(crate) const PAGE: u64 = 0x08;
    pub(crate) const EOS: u64 = 0x10;
    pub(crate) const CONTINUE: u64 = 0x20;
    pub(crate) const XBZRLE: u64 = 0x40;
    pub(crate) const HOOK: u64 = 0x80;
    pub(crate) const COMPRESS_PAGE: u64 = 0x100;
    pub(crate) const MULTIFD_FLUSH: u64 = 0x200;
}

/// The flag bits of a `ram` record's first word; the other bits are the page's
/// offset.
pub(crate) const FLAGS_MASK: u64 = PAGE_BYTES as u64 - 1;

/// Bytes of the first word of a `ram` record.
pub(crate) const WORD_BYTES: usize = 8;

/// Bytes of a PART's or END's header, and of a footer: kind and section id.
pub(crate) const SECTION_BYTES: usize = 5;

/// The name of RAM's section.
pub(crate) const RAM: &[u8] = b"ram";

/// Most bytes of a virtio-mem device's data before RAM has ended: 4 TiB in blocks of
/// 2 MiB.
pub(crate) const VIRTIO_MEM_BYTES_MAX: usize = 256 << 10;

/// Bytes of the longest record: a virtio-mem device's, with its section header. A
/// reader's buffer must hold that much.
pub const RECORD_BYTES_MAX: usize = VIRTIO_MEM_BYTES_MAX + 1024;
/// A record that carries a page: word, block name, body.
const _: () = assert!(WORD_BYTES + 1 + 255 + PAGE_BYTES <= RECORD_BYTES_MAX);
