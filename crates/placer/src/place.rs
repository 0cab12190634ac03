//! What placing pages of one epoch needs, whichever way they are placed.

use audit::{BlockLedger, Delivery, Fingerprint};
use page::{BATCH_PAGES, Epoch, PAGE_BYTES, PageIndex};

use crate::block::Block;
use crate::placer::Gate;

/// Where pages of one epoch go, all delivered in the same way.
#[derive(Clone, Copy)]
pub(crate) struct Place<'p> {
    pub(crate) block: &'p Block,
    pub(crate) gate: &'p Gate,
    pub(crate) epoch: Epoch,
    pub(crate) delivery: Delivery,
    pub(crate) ledger: Option<&'p BlockLedger>,
}

/// Of each body of a batch.
pub(crate) type Fingerprints = [Fingerprint; BATCH_PAGES];

impl Place<'_> {
    /// To be found out before anything is locked. From the last page to the first:
    /// what was received last is still in the processor's cache, and the copy into
    /// RAM, which begins with the first, finds that there.
    pub(crate) fn fingerprints(&self, bytes: &[u8]) -> Fingerprints {
        let mut fingerprints = [Fingerprint::default(); BATCH_PAGES];
        if let Some(hash) = self.ledger.map(BlockLedger::hash) {
            let pages = fingerprints.iter_mut().zip(bytes.chunks_exact(PAGE_BYTES));
            for (fingerprint, bytes) in pages.rev() {
                *fingerprint = hash.of(bytes);
            }
        }
        fingerprints
    }

    /// Of a page that is one byte repeated.
    pub(crate) fn fill_fingerprint(&self, byte: u8) -> Fingerprint {
        self.ledger.map_or_else(Fingerprint::default, |ledger| ledger.hash().of_fill(byte))
    }

    /// Pages that were written, with their range still locked.
    pub(crate) fn note(&self, written: impl Iterator<Item = (PageIndex, Fingerprint)>) {
        let Some(ledger) = self.ledger else { return };
        let mut writing = ledger.write();
        for (page, fingerprint) in written {
            writing.placed(page, fingerprint, self.epoch, self.delivery);
        }
    }
}
