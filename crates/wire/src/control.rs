//! The control connection: what source and destination say to one another.

mod frame;
mod prepare;
#[cfg(test)]
mod tests;

use data_threads::SchedParams;
use policy::pace::DestinationUse;
use serde::{Deserialize, Serialize};
use switchover::Envelope;

use crate::carry::{Carry, Carrying, Channels};
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

/// From the source.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub enum ToDestination {
    /// Get ready.
    Prepare(Box<Prepare>),
    /// Somebody else moves a VM; instead of an order to prepare.
    Carry(Box<Carry>),
    /// QEMU's channels beside the main one, before the RAM blocks of a VM that is
    /// carried.
    Channels(Channels),
    /// Pages of a VM that is carried can be read from its disks; before its channels and
    /// RAM blocks, and only if the destination waits for content. It answers with
    /// [`ToSource::StorageRead`].
    Storage(StorageOrder),
    /// What the one who connected says is relayed by lanes: as blocks of disk 0 that
    /// follow one another without gaps, once the destination has said what room it has.
    RelayBegins,
    /// It has said all.
    RelayEnds {
        /// So many bytes.
        bytes: u64,
    },
    /// Every batch of a VM that is carried is placed, and RAM has ended.
    Placed {
        /// As in [`ToDestination::Complete`].
        audit: Vec<u64>,
    },
    /// No VM comes; instead of an order to prepare.
    Examine {
        /// What is asked.
        question: Part<Question>,
    },
    /// The RAM blocks; a [`Frame::Head`] follows.
    Blocks {
        /// In the order their numbers on the lanes mean.
        blocks: Vec<Announced>,
        /// QEMU's number for the section `ram`.
        ram_section: u32,
        /// Whether sections end in footers.
        footers: bool,
    },
    /// Make durable what was delivered for a disk.
    FlushDisk {
        /// Comes back with the answer.
        ticket: u64,
        /// Its number.
        disk: u16,
    },
    /// The source could send so many of the pages that the destination waits for
    /// itself, all that it ever could counted.
    Spare {
        /// Never less than before.
        pages: u64,
    },
    /// Other terms for the destination's data threads from now on.
    Terms(SchedParams),
    /// Every batch is placed and the whole residue was sent: load it.
    Complete {
        /// Bytes of tail (or of the whole stream) sent, as a check.
        residue_bytes: u64,
        /// All pages of each RAM block in one number, for the audit (`audit::Ledger`);
        /// empty if there is none.
        #[serde(default)]
        audit: Vec<u64>,
    },
    /// Ranges, by their blocks, whose entries the source wants to see.
    AuditRanges {
        /// Each answered by [`ToSource::AuditEntries`].
        ranges: Vec<(u16, u32)>,
    },
    /// What differs need not be the same: it was never handed over.
    AuditAccepted,
    /// Of the switchover, from `prepared` on.
    Switchover {
        /// What the source is in.
        said: Envelope<switchover::ToDestination>,
    },
    /// It stays at the source, which has not even begun.
    Abort {
        /// Why, for the log.
        reason: String,
    },
}

/// From the destination.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub enum ToSource {
    /// QEMU waits; lanes may come.
    Prepared(Prepared),
    /// What is to be carried goes to a QEMU.
    Carrying(Carrying),
    /// What was asked; the connection ends with it.
    Examined {
        /// The answer.
        answer: Answer,
    },
    /// It can't or won't take the VM.
    Refused {
        /// Why, for the operator.
        reason: String,
    },
    /// How pages are placed, known once the block list is.
    Placement {
        /// Blocks written to directly.
        mapped: Vec<String>,
        /// Blocks written through the residue.
        inline: Vec<String>,
    },
    /// A disk is durable, or can't be made so.
    DiskFlushed {
        /// As it was asked.
        ticket: u64,
        /// Why not.
        error: Option<String>,
    },
    /// The destination's disks have room for more.
    DiskRoom {
        /// So many batches of disk blocks may be sent, all disks' together, and
        /// all that were ever sent counted once. Never less than before.
        batches: u64,
    },
    /// Pages that came by name, and were not there yet.
    Late {
        /// Some batches at a time.
        batches: Vec<Late>,
    },
    /// A block is not as it was handed over: the digests of its ranges.
    AuditDigests {
        /// The block.
        block: u16,
        /// The first range.
        first: u32,
        /// One for each.
        digests: Vec<u64>,
        /// More of them follow, of this block or another.
        more: bool,
    },
    /// What was placed in a range, as it was asked for.
    AuditEntries {
        /// The block.
        block: u16,
        /// The range.
        range: u32,
        /// One for each page (`audit::Entry`).
        entries: Vec<u64>,
    },
    /// RAM doesn't hold what was placed there.
    AuditReread {
        /// In so many pages.
        pages: u64,
        /// Of these blocks, and these pages of theirs, among others.
        examples: Vec<(u16, u32)>,
    },
    /// Nothing differs.
    Audited {
        /// Pages that were read back from RAM.
        reread_pages: u64,
    },
    /// What crosses the destination's NICs: once a second.
    NicUse(DestinationUse),
    /// A feature that is not used there, and why.
    Note {
        /// For the operator.
        text: String,
    },
    /// Of the switchover, from `prepared` on.
    Switchover {
        /// What the destination is in.
        said: Envelope<switchover::ToSource>,
    },
    /// Others that may have the same content are here, or come: from now on pages go by
    /// name.
    Share,
    /// Which disks of a VM that is carried are read.
    StorageRead {
        /// As in [`Prepared`].
        disks: Vec<bool>,
        /// Why others are not.
        notes: Vec<String>,
    },
    /// What the migration took at the destination: said after `running`.
    Cost(Cost),
}

/// What has become of pages of a batch that were to come later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Late {
    /// The batch.
    pub ticket: u32,
    /// Those that are wanted from the source after all, by their place in it. All
    /// others that were to come later are placed.
    pub wanted: Vec<u8>,
    /// They are not: all others still wait.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
}

/// What a migration took at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// CPU seconds that its agent's threads spent.
    pub cpu_s: f64,
    /// Most bytes ever buffered.
    pub pool_high_water_bytes: u64,
    /// Pages that came from other hosts of its rack.
    #[serde(default)]
    pub peer_bytes: u64,
    /// Pages that the source sent though somebody else brought the same.
    #[serde(default)]
    pub again_bytes: u64,
    /// Pages that were read from the VM's disks.
    #[serde(default)]
    pub stored_bytes: u64,
    /// What was read from storage for that.
    #[serde(default)]
    pub storage_read_bytes: u64,
    /// How long the VM had run by the time `running` was said.
    pub ran_ms: f64,
}
