//! What can be wrong with what a helper says.

use crate::VERSION;

/// A helper broke the rules, or can't answer. The VM is none the worse for it:
/// there is no map, and that is all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It speaks another version.
    #[error(
        "the guest's helper speaks version {theirs}, and this agent {VERSION}: update the older one"
    )]
    OtherVersion {
        /// Its version.
        theirs: u16,
    },
    /// It says that it can't.
    #[error("the guest's helper can't tell: {text}")]
    Refused {
        /// Its words, cleaned.
        text: String,
    },
    /// Whatever speaks there never greeted.
    #[error("{bytes} bytes came from the guest's port, and no greeting among them")]
    NoGreeting {
        /// How much was heard.
        bytes: u64,
    },
    /// Not a frame.
    #[error("what the guest's helper said is no frame")]
    NoFrame,
    /// A frame of an unknown kind.
    #[error("the guest's helper sent a frame of the unknown kind {kind}")]
    Kind {
        /// Its number.
        kind: u8,
    },
    /// A frame that is too long, or longer packed than not.
    #[error("the guest's helper announced a frame of {bytes} bytes, {unpacked} unpacked")]
    Length {
        /// As sent.
        bytes: u32,
        /// As it is to become.
        unpacked: u32,
    },
    /// A frame is missing, or came twice.
    #[error("the guest's helper sent frame {found} where {expected} was due")]
    Sequence {
        /// The next one.
        expected: u32,
        /// What came.
        found: u32,
    },
    /// Bytes were lost or changed.
    #[error("a frame of the guest's helper is damaged")]
    Checksum,
    /// What should be packed can't be unpacked.
    #[error("a frame of the guest's helper can't be unpacked")]
    Packed,
    /// A frame ends in the middle of something.
    #[error("a frame of the guest's helper is cut short")]
    CutShort,
    /// A frame goes on after its end.
    #[error("a frame of the guest's helper goes on after its end")]
    TooMuch,
    /// Not a number.
    #[error("a number of the guest's helper has too many bits")]
    Number,
    /// Not a text that may be shown.
    #[error("a text of the guest's helper is too long or can't be shown")]
    Text,
    /// One disk too many.
    #[error("the guest's helper names more than {} disks", crate::DEVICES_MAX)]
    Devices,
    /// A run on a disk that was not named.
    #[error("the guest's helper names a place on disk {device}, which it did not introduce")]
    Device {
        /// Its number.
        device: u64,
    },
    /// A run of nothing, or a frame without runs: it could go on for ever.
    #[error("the guest's helper sent a run without pages")]
    Empty,
    /// A page that the VM has not.
    #[error("the guest's helper names {pages} pages from {page} on, beyond the VM's memory")]
    OutsideRam {
        /// The first page.
        page: u64,
        /// How many.
        pages: u64,
    },
    /// A sector that the disk has not.
    #[error("the guest's helper names {pages} pages at sector {sector}, beyond its disk's end")]
    OutsideDisk {
        /// The first sector.
        sector: u64,
        /// How many pages.
        pages: u64,
    },
    /// More runs than were asked for.
    #[error("the guest's helper names more than {runs_max} runs")]
    Runs {
        /// How many it was told.
        runs_max: u32,
    },
    /// More pages than the VM has, several times over.
    #[error("the guest's helper names more than {pages_max} pages, of which the VM has half")]
    Pages {
        /// The bound.
        pages_max: u64,
    },
    /// Words after the last one.
    #[error("the guest's helper went on after its summary")]
    AfterEnd,
}
