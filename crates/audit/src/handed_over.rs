//! The source's ledger, from before QEMU's block list is known.

use std::sync::OnceLock;

use page::{Batch, BlockId, Body, Epoch, PageIndex};

use crate::{BlockLedger, Hash, Ledger};

/// Records what QEMU handed over last of each page, once its block list is known. Without an audit,
/// or without memory for one, it records nothing.
#[derive(Debug, Default)]
pub struct HandedOver {
    /// None: the migration is not audited.
    hash: Option<Hash>,
    ledger: OnceLock<Option<Ledger>>,
}

/// Why there is no ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotKept {
    /// The migration is not audited.
    NotWanted,
    /// There is no memory for a ledger.
    NoMemory,
    /// QEMU's block list was never known.
    NoBlocks,
}

impl HandedOver {
    /// For a migration that is audited with this hash; none means no audit.
    #[must_use]
    pub fn new(hash: Option<Hash>) -> Self {
        Self { hash, ledger: OnceLock::new() }
    }

    /// Creates the ledger, now that each block's number of pages is known.
    pub fn announce(&self, pages: impl Iterator<Item = u64>) {
        let _ = self.ledger.set(self.hash.and_then(|hash| Ledger::new(hash, pages)));
    }

    /// Records bodies of a batch that QEMU hands over in this epoch.
    pub fn bodies(&self, batch: &Batch, bodies: &[Body], epoch: Epoch) {
        if let Ok(ledger) = self.ledger() {
            ledger.bodies_handed_over(batch, bodies, epoch);
        }
    }

    /// Records the fills of a batch that QEMU hands over in this epoch.
    pub fn fills(&self, batch: &Batch, epoch: Epoch) {
        if let Ok(ledger) = self.ledger() {
            ledger.fills_handed_over(batch, epoch);
        }
    }

    /// Marks pages that the source left out after QEMU handed them over in that epoch: QEMU hands
    /// them over again.
    pub fn left_out(&self, block: BlockId, epoch: Epoch) -> impl Fn(PageIndex) {
        let mark = self.block(block).map(|block| block.left_out(epoch));
        move |page| {
            if let Some(mark) = &mark {
                mark(page);
            }
        }
    }

    /// The ledger of one block.
    #[must_use]
    pub fn block(&self, block: BlockId) -> Option<&BlockLedger> {
        self.ledger().ok()?.block(block)
    }

    /// The ledger.
    ///
    /// # Errors
    /// If there is none.
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
