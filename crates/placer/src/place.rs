//! What is needed to place pages of one epoch, mapped or inline.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use audit::{BlockLedger, Delivery, Fingerprint, Writing};
use page::{BATCH_PAGES, Epoch, PAGE_BYTES, PageIndex};

use crate::PlaceError;
use crate::block::Block;

/// Closed when RAM is complete. It is checked under a range's lock, so the closing thread can
/// wait for those that have passed it.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    shut: AtomicBool,
}

impl Gate {
    pub(crate) fn check(&self) -> Result<(), PlaceError> {
        if self.shut.load(Relaxed) { Err(PlaceError::Closed) } else { Ok(()) }
    }

    pub(crate) fn close(&self) {
        self.shut.store(true, Relaxed);
    }
}

/// Where pages of one epoch go, all delivered in the same way.
#[derive(Clone, Copy)]
pub(crate) struct PageTarget<'p> {
    pub(crate) block: &'p Block,
    pub(crate) gate: &'p Gate,
    pub(crate) epoch: Epoch,
    pub(crate) delivery: Delivery,
    pub(crate) ledger: Option<&'p BlockLedger>,
}

/// The fingerprints of a batch's bodies.
pub(crate) type Fingerprints = [Fingerprint; BATCH_PAGES];

impl PageTarget<'_> {
    /// The bodies' fingerprints, to be computed before anything is locked. They are computed from
    /// the last page to the first: the bytes received last are still in the processor's cache,
    /// and the copy into RAM, which starts with the first, finds that page there.
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

    /// The fingerprint of a page of one byte.
    pub(crate) fn fill_fingerprint(&self, byte: u8) -> Fingerprint {
        self.ledger.map_or_else(Fingerprint::default, |ledger| ledger.hash().of_fill(byte))
    }

    /// Notes pages that were written, while their range is locked.
    pub(crate) fn note(&self, written: impl Iterator<Item = (PageIndex, Fingerprint)>) {
        let mut noting = self.noting();
        written.for_each(|(page, fingerprint)| noting.note(page, fingerprint));
    }
}

impl<'p> PageTarget<'p> {
    /// For notes of pages one by one. It must be dropped before their range is unlocked.
    pub(crate) fn noting(&self) -> Noting<'p> {
        Noting {
            writing: self.ledger.map(BlockLedger::write),
            epoch: self.epoch,
            delivery: self.delivery,
        }
    }
}

/// Notes pages, and adds them to the audit's sums once for all of them: lanes share the sums, so
/// that costs more than the page's own entry.
pub(crate) struct Noting<'p> {
    writing: Option<Writing<'p>>,
    epoch: Epoch,
    delivery: Delivery,
}

impl Noting<'_> {
    /// Notes a page that was written.
    pub(crate) fn note(&mut self, page: PageIndex, fingerprint: Fingerprint) {
        if let Some(writing) = &mut self.writing {
            writing.placed(page, fingerprint, self.epoch, self.delivery);
        }
    }
}
