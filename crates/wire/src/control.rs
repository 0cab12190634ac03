//! The control connection: messages between source and destination.

mod frame;
mod prepare;
#[cfg(test)]
mod tests;

use data_threads::SchedParams;
use policy::pace::DestinationUse;
use serde::{Deserialize, Serialize};
use switchover::Envelope;

use crate::carry::{Carry, Carrying, Channels};
use crate::domain::ReceiveDomain;
use crate::examine::{Answer, Question};
use crate::part::Part;

pub use frame::{Frame, FrameHeader, read_frame, read_message};
pub use prepare::{AuditOrder, Prepare, Prepared, SharingOrder, StorageOrder};

/// A RAM block as QEMU announced it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announced {
    /// QEMU's name for it.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

/// A message from the source.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub enum ToDestination {
    /// Prepare for a VM.
    Prepare(Box<Prepare>),
    /// Carry a migration that another manager commands; sent instead of `Prepare`.
    Carry(Box<Carry>),
    /// Receive a domain of Xen; sent instead of `Prepare`, and answered by [`ToSource::Carrying`].
    ReceiveDomain(Box<ReceiveDomain>),
    /// Pages of a domain that belong to this epoch may arrive from now on.
    Epoch {
        /// The epoch: one more than the one before it.
        epoch: u32,
        /// Bytes of the non-RAM stream before it.
        position: u64,
    },
    /// QEMU's channels besides the main one, sent before the RAM blocks of a carried VM.
    Channels(Channels),
    /// Pages of a carried VM can be read from its disks. Sent before its channels and RAM blocks,
    /// and only if the destination waits for content, which answers with [`ToSource::StorageRead`].
    Storage(StorageOrder),
    /// The connecting side's stream is relayed by lanes: as contiguous blocks of disk 0, once the
    /// destination has announced its room.
    RelayBegins,
    /// That stream has ended.
    RelayEnds {
        /// Its length.
        bytes: u64,
    },
    /// Every batch of a carried VM is placed, and RAM has ended.
    Placed {
        /// See [`ToDestination::Complete`].
        audit: Vec<u64>,
    },
    /// Answer a question; sent instead of `Prepare`, if there is no VM to move.
    Examine {
        /// The question.
        question: Part<Question>,
    },
    /// The RAM blocks; a [`Frame::Head`] follows.
    Blocks {
        /// In the order of their numbers on the lanes.
        blocks: Vec<Announced>,
        /// QEMU's number for the section `ram`.
        ram_section: u32,
        /// Whether sections end in footers.
        footers: bool,
    },
    /// Flush what was delivered for a disk.
    FlushDisk {
        /// Returned with the answer.
        ticket: u64,
        /// The disk's number.
        disk: u16,
    },
    /// How many of the pages that the destination waits for the source itself could have sent, in
    /// total since the start.
    Spare {
        /// It never decreases.
        pages: u64,
    },
    /// New scheduling parameters for the destination's data threads.
    Terms(SchedParams),
    /// Every batch is placed and the whole non-RAM stream was sent: load it.
    Complete {
        /// Bytes sent of the tail (or of the whole stream), as a check.
        residue_bytes: u64,
        /// The total of each RAM block, for the audit (`audit::Ledger`); empty without an audit.
        #[serde(default)]
        audit: Vec<u64>,
    },
    /// Ranges, each with its block, whose entries the source requests.
    AuditRanges {
        /// Each is answered by [`ToSource::AuditEntries`].
        ranges: Vec<(u16, u32)>,
    },
    /// The differences are accepted: those pages were never handed over.
    AuditAccepted,
    /// A message of the switchover, sent from `prepared` on.
    Switchover {
        /// The source's state.
        said: Envelope<switchover::ToDestination>,
    },
    /// The VM stays at the source, which has not even started.
    Abort {
        /// Why, for the log.
        reason: String,
    },
}

/// A message from the destination.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub enum ToSource {
    /// QEMU waits, and lanes may connect.
    Prepared(Prepared),
    /// The destination has connected to the QEMU of a carried migration.
    Carrying(Carrying),
    /// The answer to a question, which ends the connection.
    Examined {
        /// The answer.
        answer: Answer,
    },
    /// The destination can't or won't take the VM.
    Refused {
        /// Why, for the operator.
        reason: String,
    },
    /// How pages are placed, once the block list is known.
    Placement {
        /// Blocks written to directly.
        mapped: Vec<String>,
        /// Blocks written through the non-RAM stream.
        inline: Vec<String>,
    },
    /// A disk was flushed, or can't be.
    DiskFlushed {
        /// The request's ticket.
        ticket: u64,
        /// Why it can't be flushed.
        error: Option<String>,
    },
    /// The destination's disks have room for more.
    DiskRoom {
        /// The number of batches of disk blocks that may be sent, of all disks together, in total
        /// since the start. It never decreases.
        batches: u64,
    },
    /// The fate of pages that were sent by name and deferred.
    Late {
        /// Several batches at a time.
        batches: Vec<Late>,
    },
    /// A block differs from what was handed over: the digests of its ranges.
    AuditDigests {
        /// The block.
        block: u16,
        /// The first range.
        first: u32,
        /// One digest for each range.
        digests: Vec<u64>,
        /// More digests follow, of this block or another.
        more: bool,
    },
    /// What was placed in a requested range.
    AuditEntries {
        /// The block.
        block: u16,
        /// The range.
        range: u32,
        /// One entry for each page (`audit::Entry`).
        entries: Vec<u64>,
    },
    /// RAM doesn't hold what was placed there.
    AuditReread {
        /// In this many pages.
        pages: u64,
        /// Some of them, each with its block.
        examples: Vec<(u16, u32)>,
    },
    /// Nothing differs.
    Audited {
        /// Pages read back from RAM.
        reread_pages: u64,
    },
    /// The traffic of the destination's NICs, once a second.
    NicUse(DestinationUse),
    /// A feature that is not used at the destination, and why.
    Note {
        /// For the operator.
        text: String,
    },
    /// A message of the switchover, sent from `prepared` on.
    Switchover {
        /// The destination's state.
        said: Envelope<switchover::ToSource>,
    },
    /// Other VMs that may have the same content are at the destination, or arrive: send pages by
    /// name from now on.
    Share,
    /// Which disks of a carried VM are read.
    StorageRead {
        /// See [`Prepared`].
        disks: Vec<bool>,
        /// Why the others are not.
        notes: Vec<String>,
    },
    /// The migration's cost at the destination, sent after `running`.
    Cost(Cost),
}

/// The fate of a batch's deferred pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Late {
    /// The batch.
    pub ticket: u32,
    /// Pages that are requested from the source after all, by index in the batch. Unless `more` is
    /// set, all its other deferred pages are placed.
    #[serde(rename = "wanted")]
    pub requested: Vec<u8>,
    /// The others are not placed: they still wait.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
}

/// A migration's cost at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// CPU seconds that its agent's threads spent.
    pub cpu_s: f64,
    /// The most bytes buffered at a time.
    pub pool_high_water_bytes: u64,
    /// Bytes of pages that other hosts of the rack provided.
    #[serde(default)]
    pub peer_bytes: u64,
    /// Bytes of pages that the source sent although another provider delivered the same.
    #[serde(default)]
    pub again_bytes: u64,
    /// Bytes of pages read from the VM's disks.
    #[serde(default)]
    pub stored_bytes: u64,
    /// Bytes read from storage for that.
    #[serde(default)]
    pub storage_read_bytes: u64,
    /// How long the VM had run when `running` was sent.
    pub ran_ms: f64,
}
