//! Errors in a stream.

use std::fmt;

/// The program or library that wrote a part of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// The command.
    Xl,
    /// The library that creates domains.
    Libxl,
    /// The library that saves and restores them.
    Libxc,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Xl => "xl",
            Self::Libxl => "libxl",
            Self::Libxc => "libxc",
        })
    }
}

/// An error in a stream of xl. xl at the source, or another process that wrote to its pipe, is to
/// blame. The domain is still the source's: xl resumes it when its transport ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// Other bytes where a header must be.
    #[error("not a migration stream of xl: the header of {layer} is missing")]
    Header {
        /// Whose header.
        layer: Layer,
    },
    /// A stream of a big-endian machine.
    #[error("{layer} wrote the stream in big-endian order")]
    BigEndian {
        /// Whose part of the stream.
        layer: Layer,
    },
    /// A stream of Xen 4.5 or older.
    #[error("xl wrote the stream in the format of Xen 4.5 or older")]
    Legacy,
    /// Flags of a newer xl.
    #[error("xl's header has the mandatory flags {flags:#x}, which are not all known")]
    Flags {
        /// All mandatory flags.
        flags: u32,
    },
    /// A domain's configuration longer than any.
    #[error(
        "xl's header announces {bytes} bytes of configuration, more than {}",
        crate::OPTIONAL_BYTES_MAX
    )]
    OptionalBytes {
        /// The length it claims.
        bytes: u32,
    },
    /// A configuration without what the agents need, or none.
    #[error("the domain's configuration in xl's header can't be used: {why}")]
    Configuration {
        /// What is wrong.
        why: &'static str,
    },
    /// A newer or older format.
    #[error("{layer} wrote the stream in format {version}, which is not known")]
    Version {
        /// Whose part of the stream.
        layer: Layer,
        /// The format's number.
        version: u32,
    },
    /// Neither a PV nor an HVM (or PVH) domain.
    #[error("the stream has a domain of type {kind}, which is not known")]
    DomainKind {
        /// The type's number.
        kind: u32,
    },
    /// Pages of another size than 4 KiB.
    #[error("the stream counts in pages of 2^{bits} bytes")]
    PageBits {
        /// The page size as a power of two.
        bits: u16,
    },
    /// A record longer than its reader takes.
    #[error("record {kind:#x} of {layer} has {bytes} bytes, more than {}", crate::RECORD_BYTES_MAX)]
    RecordBytes {
        /// Whose record.
        layer: Layer,
        /// The record's type.
        kind: u32,
        /// The length it claims.
        bytes: u32,
    },
    /// A body of a record that has none.
    #[error("record {kind:#x} of {layer} has a body of {bytes} bytes instead of none")]
    NotEmpty {
        /// Whose record.
        layer: Layer,
        /// The record's type.
        kind: u32,
        /// The length it claims.
        bytes: u32,
    },
    /// A record that a reader must understand, of a newer Xen.
    #[error("record {kind:#x} of {layer} is mandatory, and not known")]
    UnknownRecord {
        /// Whose record.
        layer: Layer,
        /// The record's type.
        kind: u32,
    },
    /// A record where the stream's order does not allow one.
    #[error("record {kind:#x} of {layer} is out of place")]
    OutOfPlace {
        /// Whose record.
        layer: Layer,
        /// The record's type.
        kind: u32,
    },
    /// A PAGE_DATA record without pages, or with too many.
    #[error("a PAGE_DATA record has {count} pages instead of 1 to {}", crate::RECORD_PAGES_MAX)]
    PageCount {
        /// The count it claims.
        count: u32,
    },
    /// A PAGE_DATA record whose length doesn't fit its pages.
    #[error("a PAGE_DATA record of {count} pages has {bytes} bytes, which do not fit their types")]
    PageDataBytes {
        /// Its pages.
        count: u32,
        /// The length it claims.
        bytes: u32,
    },
    /// Reserved bits of PAGE_DATA, which is written anew at the destination.
    #[error("a PAGE_DATA record uses reserved bits")]
    Reserved,
    /// A page beyond 16 TiB.
    #[error("page {number:#x} is beyond 16 TiB")]
    PageNumber {
        /// The page.
        number: u64,
    },
    /// A page of a type that newer versions of Xen may have.
    #[error("page {page:#x} has the type {kind}, which is not known")]
    PageKind {
        /// The type's number.
        kind: u64,
        /// The page.
        page: u64,
    },
    /// More epochs than can be counted.
    #[error("the stream has more passes than can be counted")]
    TooManyPasses,
    /// The stream ended where more was required: xl failed, was ended, or its domain could not be
    /// suspended.
    #[error("the stream of xl ended early, {place}")]
    EndedEarly {
        /// The place where it ended.
        place: &'static str,
    },
}
