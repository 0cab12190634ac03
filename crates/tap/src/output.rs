//! The receiver of the tap's output.

use std::sync::Arc;

use data_threads::DataThreads;
use page::{Batch, Epoch};

/// A RAM block, as QEMU announced it.
pub use stream::Block;
/// The stream before the first page.
pub use stream::Head;
/// Why a stream can't be split, or no longer.
pub use stream::Unsplittable;

/// The receiver of the tap's output accepts no more, and reports the reason itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the stream's reader has ended")]
pub struct Stopped;

/// Receives what the tap reads. Called from all of its threads; a call that blocks makes
/// QEMU wait, and one that returns [`Stopped`] ends the tap.
pub trait Output: Send + Sync + 'static {
    /// Receives the head: once, before any batch.
    fn head(&self, head: Head) -> Result<(), Stopped>;

    /// The bodies of a batch from number `first` on have been read. Called for every body
    /// before the batch is handed on, and as soon as it is read, while its bytes are still
    /// in the processor's cache.
    fn arrived(&self, _batch: &Batch, _first: usize) {}

    /// Receives pages, from all threads at once; the epoch tells which version is newer.
    fn batch(&self, batch: Batch) -> Result<(), Stopped>;

    /// QEMU has searched for dirty pages many times and found none.
    ///
    /// If it waits for permission to stop the VM, it keeps searching, which takes most of a
    /// core. Called only for [`Tap::of_taken`](crate::Tap::of_taken); other taps slow QEMU
    /// down themselves.
    fn idles(&self) {}

    /// All threads have handed on every batch of the epochs before this one.
    ///
    /// There are none before the first epoch.
    fn all_before(&self, _epoch: Epoch) {}

    /// Receives a piece of the non-RAM stream after RAM, in order.
    fn tail(&self, bytes: &[u8]) -> Result<(), Stopped>;

    /// Receives a piece of a stream that can't be split, in order from its first byte; the
    /// first piece has the reason.
    fn whole(&self, bytes: &[u8], reason: Option<&str>) -> Result<(), Stopped>;

    /// Receives a piece of a stream that is no longer split, in order, instead of the tail.
    ///
    /// It must reach the destination's QEMU unchanged, after everything handed on before is
    /// placed. Called only for [`Tap::of_taken`](crate::Tap::of_taken).
    ///
    /// The first piece has the reason. After [`Unsplittable::Postcopy`] the VM runs at the
    /// destination while its pages arrive: its QEMU's answers have to reach the source's
    /// QEMU at once, and the rest of the stream can't be held back any more.
    ///
    /// By default it ends the tap.
    fn rest(&self, _bytes: &[u8], _reason: Option<&Unsplittable>) -> Result<(), Stopped> {
        Err(Stopped)
    }

    /// RAM's last section has started: QEMU has stopped the VM. Called once, unless that
    /// section has already ended when it is seen.
    fn last_section(&self) {}

    /// Every batch has been handed on, and no thread will deliver another.
    ///
    /// Called once, only for a stream that is split, before or after the first piece of the
    /// tail or the rest.
    fn ram_over(&self) {}

    /// The data threads that the threads reading QEMU's sockets join, if any.
    fn threads(&self) -> Option<Arc<DataThreads>> {
        None
    }
}
