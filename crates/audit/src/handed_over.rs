//! The source's end, from before QEMU's block list is known.

use std::sync::OnceLock;

use page::{Batch, BlockId, Body, Epoch, PageIndex};

use crate::{BlockLedger, Hash, Ledger};

/// What QEMU handed over last of each page, once its block list is known. Without
/// an audit, or without memory for one, nothing is kept.
#[derive(Debug, Default)]
pub struct HandedOver {
    /// None: no audit is wanted.
    hash: Option<Hash>,
    ledger: OnceLock<Option<Ledger>>,
}

/// Why nothing is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotKept {
    /// No audit is wanted.
    NotWanted,
    /// There is no memory for it.
    NoMemory,
    /// There was no block list.
    NoBlocks,
}

impl HandedOver {
    /// Of a migration that is to be audited, by this hash, or not.
    #[must_use]
    pub fn new(hash: Option<Hash>) -> Self {
        Self { hash, ledger: OnceLock::new() }
    }

    /// The block list is known: how many pages each has.
    pub fn announce(&self, pages: impl Iterator<Item = u64>) {
        let _ = self.ledger.set(self.hash.and_then(|hash| Ledger::new(hash, pages)));
    }

    /// QEMU hands these bodies of a batch over, in this epoch.
    pub fn bodies(&self, batch: &Batch, bodies: &[Body], epoch: Epoch) {
        if let Ok(ledger) = self.ledger() {
            ledger.bodies_handed_over(batch, bodies, epoch);
        }
    }

    /// QEMU hands the fills of a batch over, in this epoch.
    pub fn fills(&self, batch: &Batch, epoch: Epoch) {
        if let Ok(ledger) = self.ledger() {
            ledger.fills_handed_over(batch, epoch);
        }
    }

    /// A page was left out after that: QEMU hands it over again.
    pub fn left_out(&self, block: BlockId, page: PageIndex, epoch: Epoch) {
        if let Some(block) = self.block(block) {
            block.left_out(page, epoch);
        }
    }

    /// What is kept of one block.
    #[must_use]
    pub fn block(&self, block: BlockId) -> Option<&BlockLedger> {
        self.ledger().ok()?.block(block)
    }

    /// What is kept.
    ///
    /// # Errors
    /// If nothing is.
    pub fn ledger(&self) -> Result<&Ledger, NotKept> {
        match self.ledger.get() {
            _ if self.hash.is_none() => Err(NotKept::NotWanted),
            Some(Some(ledger)) => Ok(ledger),
            Some(None) => Err(NotKept::NoMemory),
            None => Err(NotKept::NoBlocks),
        }
    }
}

#[cfg(test)]
mod tests {
    use page::Pool;

    use super::*;

    #[test]
    fn what_is_handed_over_counts_once_blocks_are_known_and_if_it_is_wanted() {
        let mut batch = Pool::new(1).take().unwrap();
        batch.push_fill(PageIndex(1), 7);
        let wanted = Some(Hash::default());
        for (hash, announced, expected) in [
            (None, true, Err(NotKept::NotWanted)),
            (wanted, false, Err(NotKept::NoBlocks)),
            (wanted, true, Ok(4)),
        ] {
            let handed_over = HandedOver::new(hash);
            if announced {
                handed_over.announce([4].into_iter());
            }
            handed_over.fills(&batch, Epoch(1));
            assert_eq!(handed_over.ledger().map(Ledger::pages), expected);
            let noted = handed_over.ledger().is_ok_and(|ledger| ledger.totals() != [0]);
            assert_eq!(noted, expected.is_ok());
        }
        let endless = HandedOver::new(wanted);
        endless.announce([u64::MAX >> 4].into_iter());
        assert_eq!(endless.ledger().err(), Some(NotKept::NoMemory));
    }
}
