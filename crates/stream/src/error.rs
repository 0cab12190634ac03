//! Reasons why a stream can't be split, and errors in a stream.

/// Why the splitter can't split a valid stream.
///
/// The destination's QEMU may well understand it: it can be passed on whole, as
/// long as no page was taken out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsplittable {
    /// A device other than RAM writes during setup or while RAM is sent.
    /// Sections have no length, so only that device's code knows where its data
    /// ends.
    #[error("the device {name:?} writes into the stream before RAM has ended")]
    Section {
        /// The section's name.
        name: String,
    },
    /// A section whose START was not seen.
    #[error("section {section} continues before RAM has ended")]
    SectionId {
        /// The section's number.
        section: u32,
    },
    /// The migration has switched to postcopy.
    #[error("the migration turns to postcopy (command {command})")]
    Postcopy {
        /// The command that switches.
        command: u16,
    },
    /// Content of dirty bitmaps before the VM has stopped.
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
    /// A part of the configuration record that is newer than QEMU 10.
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
    /// A command whose effect on the stream is not known.
    #[error("the stream has the command {command}, which is not known")]
    Command {
        /// The command's number.
        command: u16,
    },
    /// XBZRLE records, which are differences to the version sent before.
    #[error("pages are sent as differences (capability xbzrle)")]
    Xbzrle,
    /// Pages compressed by QEMU itself.
    #[error("pages are compressed by QEMU (capability compress)")]
    Compressed,
    /// RDMA records.
    #[error("the stream carries RDMA hooks")]
    Hook,
    /// A RAM record with flags that are newer than QEMU 10.
    #[error("a RAM record has the flags {flags:#x}, which are not known")]
    Flags {
        /// All flags of the record.
        flags: u64,
    },
    /// The stream ended without RAM.
    #[error("the stream has no RAM section")]
    NoRam,
}

/// An error in a main stream. QEMU at the source, or another process that wrote
/// to its socket, is to blame; the source VM can continue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The first bytes are not QEMU's.
    #[error("not a migration stream of QEMU: it starts with {magic:#010x}, version {version}")]
    NotAStream {
        /// The first four bytes.
        magic: u32,
        /// The four after them.
        version: u32,
    },
    /// The stream ended where more was required: QEMU died or cancelled.
    #[error("QEMU's stream ended early, {place}")]
    EndedEarly {
        /// The place where it ended.
        place: &'static str,
    },
    /// A byte that starts no record.
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
    /// Footers are present or absent contrary to the machine type, after the
    /// splitter has already predicted them for the destination.
    #[error(
        "QEMU's section footers are switched {}, against its machine type; migrate with the \
         classic stream",
        if *.sent { "on" } else { "off" }
    )]
    Footers {
        /// Whether QEMU sends footers.
        sent: bool,
    },
    /// More bytes before RAM's pages than any VM has.
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
        /// The name, lossily decoded.
        name: String,
    },
    /// A block length that is not a whole number of pages, or is beyond 16 TiB.
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
        /// Bytes beyond the total.
        excess_bytes: u64,
    },
    /// RAM setup without a block list, or with several.
    #[error("RAM setup has {count} block lists instead of one")]
    BlockLists {
        /// The number of block lists.
        count: u32,
    },
    /// A page of a block that was not announced.
    #[error("a page belongs to the RAM block {name:?}, which was not announced")]
    UnknownBlock {
        /// The name, lossily decoded.
        name: String,
    },
    /// A record with CONTINUE, but no block before it.
    #[error("a page belongs to the block of the page before it, and there is none")]
    ContinueWithoutBlock,
    /// A page beyond its block's end.
    #[error("offset {offset:#x} is outside the RAM block {name:?} of {block_bytes} bytes")]
    OutsideBlock {
        /// The block.
        name: String,
        /// The page's offset.
        offset: u64,
        /// The block's length.
        block_bytes: u64,
    },
    /// A MULTIFD_FLUSH mark in a multifd stream whose setup had none: the
    /// meaning of an epoch would change midway.
    #[error("a MULTIFD_FLUSH mark in a stream that counts by sections")]
    StrayFlush,
    /// More epochs than can be counted.
    #[error("the stream has more rounds than can be counted")]
    TooManyRounds,
    /// An unsplittable stream, detected when it was too late to pass it on
    /// whole: pages were taken out, or are on multifd channels.
    #[error(
        "the stream can't be split, and it is too late to relay it unchanged: {0}; migrate without \
         that, or with the classic stream from the start"
    )]
    Late(Unsplittable),
}
