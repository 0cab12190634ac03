//! The names of pages, for a destination that may have their content already.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use content::Key;
use page::{Batch, BlockId, PageIndex};
use transport::{Asking, Labels, Namer};

use super::live::Live;
use super::sieve::Sieve;

/// Names what QEMU hands over in its first pass. What comes later has been written
/// since: it is like nothing else, or soon not any more.
pub(super) struct Naming {
    pub(super) key: Key,
    pub(super) live: Arc<Live>,
    pub(super) sieve: Arc<Sieve>,
    /// QEMU is held until all is there: the destination may wait for content.
    pub(super) held: bool,
}

impl std::fmt::Debug for Naming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Naming").field("held", &self.held).finish_non_exhaustive()
    }
}

impl Namer for Naming {
    fn name(&self, batch: &Batch, labels: &mut Labels) -> Asking {
        if self.live.first_pass_over.load(Relaxed) {
            return Asking::No;
        }
        labels.names.extend(batch.bodies().iter().map(|body| self.key.name(batch.bytes_of(*body))));
        if self.held && self.sieve.reaches(batch.block) { Asking::MayWait } else { Asking::Now }
    }

    fn read_again(&self, block: BlockId, pages: &[PageIndex], into: &mut [u8]) -> bool {
        self.sieve.read(block, pages, into)
    }
}
