//! Faults in a helper's answer.

use crate::VERSION;

/// The helper broke the protocol, or can't answer. The only effect on the VM is that there is no
/// map.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The helper speaks another version.
    #[error(
        "the guest's helper has version {theirs} of the protocol, and this agent {VERSION}: update \
         the older one"
    )]
    OtherVersion {
        /// Its version.
        theirs: u16,
    },
    /// The helper refuses.
    #[error("the guest's helper reports an error: {text}")]
    Refused {
        /// Its reason, cleaned.
        text: String,
    },
    /// No greeting came from the port.
    #[error("{bytes} bytes arrived from the guest's port without a greeting")]
    NoGreeting {
        /// How many bytes were received.
        bytes: u64,
    },
    /// Not a frame.
    #[error("the guest's helper sent an invalid frame")]
    NoFrame,
    /// A frame of an unknown kind.
    #[error("the guest's helper sent a frame of the unknown kind {kind}")]
    Kind {
        /// Its number.
        kind: u8,
    },
    /// A frame that is too long, or longer packed than unpacked.
    #[error("the guest's helper announced a frame of {bytes} bytes, {unpacked} unpacked")]
    Length {
        /// Its size as sent.
        bytes: u32,
        /// Its unpacked size.
        unpacked: u32,
    },
    /// A frame is missing, or came twice.
    #[error("the guest's helper sent frame {found} where {expected} was due")]
    Sequence {
        /// The next frame's number.
        expected: u32,
        /// The received frame's number.
        found: u32,
    },
    /// Bytes were lost or changed.
    #[error("a frame of the guest's helper is damaged")]
    Checksum,
    /// The content can't be unpacked.
    #[error("a frame of the guest's helper can't be unpacked")]
    Packed,
    /// A frame ends within a value.
    #[error("a frame of the guest's helper is cut short")]
    CutShort,
    /// A frame continues after its end.
    #[error("a frame of the guest's helper has data after its end")]
    TooMuch,
    /// Not a number.
    #[error("a number of the guest's helper has too many bits")]
    Number,
    /// A text that is too long or not printable.
    #[error("a text of the guest's helper is too long or can't be shown")]
    Text,
    /// Too many disks.
    #[error("the guest's helper names more than {} disks", crate::DEVICES_MAX)]
    Devices,
    /// A run on a disk that was not named.
    #[error("the guest's helper names a location on disk {device}, which it did not announce")]
    Device {
        /// Its number.
        device: u64,
    },
    /// A run without pages, or a frame without runs: an answer of these might never end.
    #[error("the guest's helper sent a run without pages")]
    Empty,
    /// A page that the VM does not have.
    #[error("the guest's helper names {pages} pages from {page} on, beyond the VM's memory")]
    OutsideRam {
        /// The first page.
        page: u64,
        /// How many.
        pages: u64,
    },
    /// A sector that the disk does not have.
    #[error("the guest's helper names {pages} pages at sector {sector}, beyond its disk's end")]
    OutsideDisk {
        /// The first sector.
        sector: u64,
        /// How many pages.
        pages: u64,
    },
    /// More runs than were requested.
    #[error("the guest's helper names more than {runs_max} runs")]
    Runs {
        /// The most that were requested.
        runs_max: u32,
    },
    /// More than twice as many pages as the VM has.
    #[error("the guest's helper names more than {pages_max} pages, of which the VM has half")]
    Pages {
        /// The bound.
        pages_max: u64,
    },
    /// Bytes after the summary.
    #[error("the guest's helper sent more after its summary")]
    AfterEnd,
}
