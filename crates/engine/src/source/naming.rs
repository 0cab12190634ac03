//! What lanes have batches named by, and where they say what they could send.

use std::sync::Arc;

use dedup::source::Naming;
use page::{Batch, BlockId, PageIndex};
use transport::{Asking, Labels, Namer};
use wire::ToDestination;

use crate::link::Link;

/// Names batches on the lanes' threads.
#[derive(Debug)]
pub(super) struct LanesNamer {
    pub(super) naming: Arc<Naming>,
    pub(super) link: Arc<Link<ToDestination>>,
}

impl Namer for LanesNamer {
    fn take_out_announced(&self, batch: &mut Batch) -> usize {
        self.naming.take_out_announced(batch)
    }

    fn name(&self, batch: &Batch, labels: &mut Labels) -> Asking {
        self.naming.name(batch, labels)
    }

    fn read_again(&self, block: BlockId, pages: &[PageIndex], into: &mut [u8]) -> bool {
        self.naming.read_again(block, pages, into)
    }

    fn spare_pages(&self) -> u64 {
        self.naming.spare_pages()
    }

    fn has_spare(&self, pages: u64) {
        // Who leads the migration sees by other ways that it is over.
        let _ = self.link.say(&ToDestination::Spare { pages });
    }
}
