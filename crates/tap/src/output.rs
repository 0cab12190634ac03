//! Where the tap hands things to.

use std::sync::Arc;

use data_threads::DataThreads;
use page::{Batch, Epoch};

/// A RAM block, as QEMU announced it.
pub use stream::Block;
/// Why a stream can't be split, or not any more.
pub use stream::Unsplittable;

/// What comes before the first page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The residue up to the end of RAM's setup, for the destination's QEMU.
    pub bytes: Vec<u8>,
    /// The RAM blocks; a `BlockId` is a place in this list.
    pub blocks: Vec<Block>,
    /// QEMU's number for the section `ram`.
    pub ram_section: u32,
    /// Whether sections end in footers.
    pub footers: bool,
    /// The migration may turn to postcopy: the destination's QEMU must load every
    /// page itself, so that it knows later which it has. None may be written into
    /// its memory.
    pub may_turn_to_postcopy: bool,
}

/// The receiver of the tap's output takes no more of it, and reports why
/// itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nobody takes the stream any more")]
pub struct Stopped;

/// Takes what the tap reads. Called from all of its threads; a call that blocks
/// makes QEMU wait.
pub trait Output: Send + Sync + 'static {
    /// The head: once, before any batch.
    ///
    /// # Errors
    /// To end the tap.
    fn head(&self, head: Head) -> Result<(), Stopped>;

    /// Bodies of a batch from this number on are there. Said of all of them before
    /// the batch is handed on, and as soon as they are read: what looks at their
    /// bytes now finds them in the processor's cache.
    fn arrived(&self, _batch: &Batch, _first: usize) {}

    /// Pages. From all threads at once; epochs tell which version is newer.
    ///
    /// # Errors
    /// To end the tap.
    fn batch(&self, batch: Batch) -> Result<(), Stopped>;

    /// QEMU has looked for dirty pages many times, and found none. If it waits until it may
    /// stop the VM, it goes on looking, which takes most of a core. Told only of
    /// [`Tap::of_taken`](crate::Tap::of_taken): others know by themselves.
    fn idles(&self) {}

    /// All batches of epochs before this one have been handed on, by all threads.
    /// Those of the first have none before them.
    fn all_before(&self, _epoch: Epoch) {}

    /// A piece of the residue after RAM, in order.
    ///
    /// # Errors
    /// To end the tap.
    fn tail(&self, bytes: &[u8]) -> Result<(), Stopped>;

    /// A piece of a stream that can't be split, in order from its first byte;
    /// the first piece comes with the reason.
    ///
    /// # Errors
    /// To end the tap.
    fn whole(&self, bytes: &[u8], reason: Option<&str>) -> Result<(), Stopped>;

    /// A piece of a stream that is split no longer, in order. It is to reach the
    /// destination's QEMU as it is, after all that was handed on before is placed.
    /// Takes the place of the tail. Comes only from [`Tap::of_taken`](crate::Tap::of_taken).
    ///
    /// The first piece comes with the reason. After [`Unsplittable::Postcopy`] the VM
    /// runs at the destination while its pages come: what its QEMU answers has to reach
    /// the source's at once, and what is still to come can't be held back any more.
    ///
    /// # Errors
    /// To end the tap. By default it does.
    fn rest(&self, _bytes: &[u8], _reason: Option<&Unsplittable>) -> Result<(), Stopped> {
        Err(Stopped)
    }

    /// RAM's last section has begun: QEMU has stopped the VM. Told once, unless that
    /// section is over as soon as it is seen.
    fn last_section(&self) {}

    /// RAM has ended. Whether QEMU may end its migration now; if not,
    /// [`Stopper::let_finish`](crate::Stopper::let_finish) is called later.
    fn ram_ended(&self) -> bool {
        true
    }

    /// All batches there are have been handed on: no thread brings one any more. Told
    /// once, of a stream that is split, after the first piece of the tail, or the rest,
    /// or before.
    fn ram_over(&self) {}

    /// The data threads that those reading QEMU's sockets join, if any.
    fn threads(&self) -> Option<Arc<DataThreads>> {
        None
    }
}
