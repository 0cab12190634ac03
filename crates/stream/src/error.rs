//! Why a stream can't be split, and what is wrong with it.

/// A sound stream that the splitter does not know how to take apart. QEMU at
/// the destination may well know: it can be passed on whole, as long as no page
/// was taken out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsplittable {
    /// A device other than RAM writes in setup or while RAM is sent. Sections
    /// have no length, so only that device's code knows where its data ends.
    #[error("the device {name:?} writes into the stream before RAM has ended")]
    Section {
        /// The section's name.
        name: String,
    },
    /// A section of which no START was seen.
    #[error("section {section} continues before RAM has ended")]
    SectionId {
        /// The section's number.
        section: u32,
    },
    /// The migration has turned to postcopy.
    #[error("the migration turns to postcopy (command {command})")]
    Postcopy {
        /// The command that shows it.
        command: u16,
    },
    /// Bits of dirty bitmaps before the VM has stopped.
    #[error("dirty bitmaps have records with the flags {flags:#x} before RAM has ended")]
    Bitmaps {
        /// All flags of the record.
        flags: u8,
    },
    /// A capability that changes the block list or the records.
    #[error("QEMU's capability {name:?} is on")]
    Capability {
        /// QEMU's name of the capability.
        name: String,
    },
    /// A part of the configuration record that came after QEMU 10.
    #[error("the stream's configuration has a part {name:?}, which is not known")]
    Configuration {
        /// The subsection's name.
        name: String,
    },
    /// Pages of another size than 4 KiB.
    #[error("the stream counts in pages of 2^{bits} bytes")]
    PageBits {
        /// The page size as a power of two.
        bits: u32,
    },
    /// A command whose consequences for the stream are not known.
    #[error("the stream has the command {command}, which is not known")]
    Command {
        /// The command's number.
        command: u16,
    },
    /// XBZRLE records are differences to the version that was sent before.
    #[error("pages are sent as differences (capability xbzrle)")]
    Xbzrle,
    /// Pages compressed by QEMU itself.
    #[error("pages are compressed by QEMU (capability compress)")]
    Compressed,
    /// RDMA's records.
    #[error("the stream carries RDMA hooks")]
    Hook,
    /// A RAM record with flags that came after QEMU 10.
    #[error("a RAM record has the flags {flags:#x}, which are not known")]
    Flags {
        /// All flags of the record.
        flags: u64,
    },
    /// The stream ended without RAM.
    #[error("the stream has no RAM section")]
    NoRam,
}

/// What is wrong with a main stream. QEMU at the source, or whoever wrote to
/// its socket, is to blame; the source VM can go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The first bytes are not QEMU's.
    #[error("not a migration stream of QEMU: it begins with {magic:#010x}, version {version}")]
    NotAStream {
        /// The first four bytes.
        magic: u32,
        /// The four after them.
        version: u32,
    },
    /// The stream stopped where more had to come: QEMU died or cancelled.
    #[error("QEMU's stream ended early, {place}")]
    EndedEarly {
        /// Between or within what.
        place: &'static str,
    },
    /// A byte that begins no record.
    #[error("unknown record {kind:#04x} in QEMU's stream")]
    UnknownRecord {
        /// The byte.
        kind: u8,
    },
    /// A record where the stream's order does not allow one.
    #[error("record {kind:#04x} out of place in QEMU's stream")]
    OutOfPlace {
        /// The record's first byte.
        kind: u8,
    },
    /// A section's footer is missing or another section's.
    #[error("the footer after RAM's section {section} is missing or wrong")]
    Footer {
        /// RAM's section.
        section: u32,
    },
    /// Footers came, or did not come, against what the configuration record
    /// made the splitter tell the destination.
    #[error("QEMU's section footers are switched {}, against its machine type; migrate with the classic stream", if *.sent { "on" } else { "off" })]
    Footers {
        /// Whether QEMU sends footers.
        sent: bool,
    },
    /// More before RAM's pages than any VM has.
    #[error("the stream's head exceeds {} bytes", crate::HEAD_BYTES_MAX)]
    HeadTooLong,
    /// A length in the configuration record that no QEMU writes.
    #[error("the configuration record's machine name has {bytes} bytes")]
    MachineName {
        /// The length it claims.
        bytes: u32,
    },
    /// A count in the configuration record that no QEMU writes.
    #[error("the configuration record lists {count} capabilities")]
    CapabilityCount {
        /// The count it claims.
        count: u32,
    },
    /// More blocks than can be numbered.
    #[error("QEMU announced more than {} RAM blocks", crate::BLOCKS_MAX)]
    TooManyBlocks,
    /// A block name that is empty, too long or not text.
    #[error("QEMU announced a RAM block with the unusable name {name:?}")]
    BlockName {
        /// The name, as text as far as it is.
        name: String,
    },
    /// A block length that is no number of pages, or beyond 16 TiB.
    #[error("RAM block {name:?} can't have {bytes} bytes")]
    BlockLength {
        /// The block.
        name: String,
        /// The length it claims.
        bytes: u64,
    },
    /// Two blocks of one name.
    #[error("QEMU announced the RAM block {name:?} twice")]
    BlockTwice {
        /// The block.
        name: String,
    },
    /// The blocks' lengths do not add up to the announced total.
    #[error("RAM blocks exceed the announced total by {excess_bytes} bytes")]
    Total {
        /// How far beyond.
        excess_bytes: u64,
    },
    /// RAM setup without a block list, or with two.
    #[error("RAM setup has {count} block lists instead of one")]
    BlockLists {
        /// How many there are.
        count: u32,
    },
    /// A page of a block that was not announced.
    #[error("a page belongs to the RAM block {name:?}, which was not announced")]
    UnknownBlock {
        /// The name, as text as far as it is.
        name: String,
    },
    /// A record that means "the block before" when there was none.
    #[error("a page belongs to the block of the page before it, and there is none")]
    ContinueWithoutBlock,
    /// A page beyond its block's end.
    #[error("offset {offset:#x} is outside the RAM block {name:?} of {block_bytes} bytes")]
    OutsideBlock {
        /// The block.
        name: String,
        /// Where the page would be.
        offset: u64,
        /// The block's length.
        block_bytes: u64,
    },
    /// A MULTIFD_FLUSH mark in a multifd stream whose setup had none: what
    /// counts as an epoch changed underway.
    #[error("a MULTIFD_FLUSH mark in a stream that counts by sections")]
    StrayFlush,
    /// More epochs than can be counted.
    #[error("the stream has more rounds than can be counted")]
    TooManyRounds,
    /// Found when it was too late to pass the stream on whole: pages were
    /// taken out, or travel on multifd channels.
    #[error(
        "the stream can't be split, and it is too late to pass it on whole: {0}; migrate without \
         that, or with the classic stream from the start"
    )]
    Late(Unsplittable),
}
