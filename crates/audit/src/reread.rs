//! Pages that the source reads from the VM's memory again, and sends as read.
//!
//! QEMU hands a page over again if the guest has written it. But content may change without that: a
//! balloon gives pages back to the host, and pages that a guest reports as free lose their dirty
//! bits. So the entry of what was handed over is replaced with what was sent. The destination may
//! still hold the former, or an earlier reread: a lane may have died with one copy while another
//! lane delivered the other.

use std::sync::atomic::{Ordering::Acquire, fence};

use page::{BATCH_PAGES, PAGE_BYTES, PageIndex};

use crate::BlockLedger;
use crate::entry::Entry;

/// Pages of one batch that are being reread.
#[derive(Debug)]
pub struct Rereading<'l> {
    block: &'l BlockLedger,
    pages: &'l [PageIndex],
    /// Their entries before that.
    noted: [Entry; BATCH_PAGES],
}

impl BlockLedger {
    /// Starts rereading these pages. What QEMU hands over from now on is newer.
    #[must_use]
    pub fn begin_to_reread<'l>(&'l self, pages: &'l [PageIndex]) -> Rereading<'l> {
        let mut noted = [Entry(0); BATCH_PAGES];
        for (noted, page) in noted.iter_mut().zip(pages) {
            *noted = self.entry(*page);
        }
        // No page may be read before its entry.
        fence(Acquire);
        Rereading { block: self, pages, noted }
    }
}

impl Rereading<'_> {
    /// Records what the pages contain, one after the other, which is what is sent.
    pub fn note(self, bytes: &[u8]) {
        let Self { block, pages, noted } = self;
        let mut writing = block.write();
        let each = pages.iter().zip(noted).zip(bytes.chunks_exact(PAGE_BYTES));
        for ((page, noted), bytes) in each.filter(|((_, noted), _)| noted.is_known()) {
            let fingerprint = block.hash().of(bytes);
            if fingerprint != noted.fingerprint() {
                writing.reread(*page, noted, fingerprint);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use page::{BlockId, Epoch};

    use super::*;
    use crate::{Delivery, Hash, Ledger};

    const PAGE: PageIndex = PageIndex(3);

    fn ledger() -> Ledger {
        Ledger::new(Hash::default(), [10]).unwrap()
    }

    /// Hands over the page, filled with that byte.
    fn hand_over(source: &Ledger, epoch: u32, byte: u8) {
        let block = source.block(BlockId(0)).unwrap();
        block.write().handed_over(PAGE, block.hash().of_fill(byte), Epoch(epoch));
    }

    fn read_again(source: &Ledger, byte: u8) {
        let block = source.block(BlockId(0)).unwrap();
        block.begin_to_reread(&[PAGE]).note(&[byte; PAGE_BYTES]);
    }

    /// Whether the totals are equal, and whether no page differs, if the destination placed that
    /// byte; none means that it placed nothing.
    fn compared(source: &Ledger, placed: Option<u8>) -> (bool, bool) {
        let destination = ledger();
        let theirs = destination.block(BlockId(0)).unwrap();
        if let Some(byte) = placed {
            theirs.write().placed(PAGE, theirs.hash().of_fill(byte), Epoch(1), Delivery::Body);
        }
        let ours = source.block(BlockId(0)).unwrap();
        let compared = ours.compare(0, &theirs.entries(0).unwrap()).unwrap();
        (source.totals() == destination.totals(), compared.differences.is_empty())
    }

    #[test]
    fn reread_content_is_expected_and_earlier_content_accepted() {
        let source = ledger();
        hand_over(&source, 1, 7);
        read_again(&source, 7);
        assert_eq!(compared(&source, Some(7)), (true, true));
        assert_eq!(compared(&source, Some(8)), (false, false), "it has not changed");
        read_again(&source, 0);
        assert_eq!(compared(&source, Some(0)), (true, true));
        assert_eq!(compared(&source, Some(7)), (false, true));
        assert_eq!(compared(&source, None), (false, false), "it never came");
        read_again(&source, 9);
        assert_eq!(compared(&source, Some(9)), (true, true));
        assert_eq!(compared(&source, Some(0)), (false, true), "by a lane that died");
        hand_over(&source, 2, 5);
        assert_eq!(compared(&source, Some(5)), (true, true));
        assert_eq!(compared(&source, Some(9)), (false, false), "it came once more");
    }

    #[test]
    fn what_qemu_hands_over_meanwhile_is_newer() {
        let source = ledger();
        read_again(&source, 3);
        assert_eq!(compared(&source, None), (true, true), "it was never handed over");
        for (epoch, byte) in [(1, 7), (2, 8)] {
            let block = source.block(BlockId(0)).unwrap();
            let rereading = block.begin_to_reread(&[PAGE]);
            hand_over(&source, epoch, byte);
            rereading.note(&[3; PAGE_BYTES]);
            assert_eq!(compared(&source, Some(byte)), (true, true));
            assert_eq!(compared(&source, Some(3)), (false, false));
        }
    }

    #[test]
    fn pages_that_are_not_there_are_passed_by() {
        let source = ledger();
        let block = source.block(BlockId(0)).unwrap();
        let pages = [PageIndex(10), PageIndex(u32::MAX)];
        block.begin_to_reread(&pages).note(&[1; 2 * PAGE_BYTES]);
        assert_eq!(source.totals(), [0]);
    }
}
