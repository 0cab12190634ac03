//! Pages that went by name, and whose bodies can be read again if they are wanted.

use std::sync::Arc;

use page::{Batch, BlockId, Epoch, PAGE_BYTES, PageIndex, PageSet};

use super::naming::Naming;

/// Pages whose bodies can be read again. They come from the VM's RAM, where the content is at
/// least as new, is as good, and is noted for the audit; or from the batch that they arrived in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RereadPages {
    pub(super) block: BlockId,
    pub(super) epoch: Epoch,
    pub(super) pages: Vec<PageIndex>,
    kept: Option<Kept>,
}

/// A batch that is kept for its bodies, in its pool buffer. QEMU waits while many are kept.
#[derive(Clone, Debug)]
pub(super) struct Kept(Arc<Batch>);

impl Kept {
    pub(super) fn new(batch: Batch) -> Self {
        Self(Arc::new(batch))
    }

    /// These of its bodies.
    pub(super) fn pages(&self, set: PageSet) -> RereadPages {
        RereadPages { kept: Some(self.clone()), ..RereadPages::of(&self.0, set) }
    }
}

impl PartialEq for Kept {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Kept {}

impl RereadPages {
    pub(super) fn new(block: BlockId, epoch: Epoch, pages: Vec<PageIndex>) -> Self {
        Self { block, epoch, pages, kept: None }
    }

    /// These bodies of a batch.
    pub(super) fn of(batch: &Batch, set: PageSet) -> Self {
        let pages = set.of(batch.bodies()).map(|body| body.page).collect();
        Self::new(batch.block, batch.epoch, pages)
    }

    /// These pages, of a batch that had no others.
    pub(super) fn chosen(&self, set: PageSet) -> Self {
        self.with(set.of(&self.pages).copied().collect())
    }

    /// Other pages of the same batch.
    fn with(&self, pages: Vec<PageIndex>) -> Self {
        Self { pages, kept: self.kept.clone(), ..*self }
    }

    /// Removes the pages at these `places` of their batch, and returns them. `set` has the places
    /// of all pages here, and afterwards of those that are left. None if one of `places` is not
    /// among them, or repeated.
    pub(super) fn take(&mut self, set: &mut PageSet, places: &[u8]) -> Option<Self> {
        let (mut taken, mut gone) = (Vec::with_capacity(places.len()), PageSet::NONE);
        for place in places.iter().copied().map(usize::from) {
            if !set.without(gone).has(place) {
                return None;
            }
            gone.insert(place);
            let before = *set & PageSet::all(place);
            taken.push(*self.pages.get(before.len())?);
        }
        let mut places = set.iter();
        self.pages.retain(|_| places.next().is_some_and(|place| !gone.has(place)));
        *set = set.without(gone);
        Some(self.with(taken))
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.pages.len() * PAGE_BYTES) as u64
    }

    /// Reads the pages' current content, or their content when kept, into an empty batch. False
    /// if that is not possible.
    pub(super) fn fill(&self, naming: &Naming, batch: &mut Batch) -> bool {
        batch.block = self.block;
        batch.epoch = self.epoch;
        let into = &mut batch.buffer_mut()[..self.pages.len() * PAGE_BYTES];
        let is_there = match &self.kept {
            Some(Kept(kept)) => copied(kept, &self.pages, into),
            None => naming.read_again(self.block, &self.pages, into),
        };
        if !is_there {
            return false;
        }
        for (nth, page) in self.pages.iter().enumerate() {
            batch.push_body(*page, nth * PAGE_BYTES);
        }
        true
    }
}

/// Copies bodies of a batch. False if one of these pages is not in it.
fn copied(kept: &Batch, pages: &[PageIndex], into: &mut [u8]) -> bool {
    pages.iter().zip(into.chunks_exact_mut(PAGE_BYTES)).all(|(page, into)| {
        let body = kept.bodies().iter().find(|body| body.page == *page);
        body.map(|body| into.copy_from_slice(kept.bytes_of(*body))).is_some()
    })
}

#[cfg(test)]
mod tests {
    use audit::{Delivery, HandedOver, Hash, Ledger};
    use page::{Pool, SLOT_BYTES};
    use ram::Mapping;

    use super::super::naming::Waits;
    use super::*;

    #[test]
    fn late_wanted_pages_are_found_by_their_place_in_the_batch() {
        // Pages 10 to 15, of which the first, the fourth and the sixth are awaited.
        let set = PageSet::from_bits(0b10_1001);
        for (places, expected) in [
            (&[0_u8, 5][..], Some((vec![10, 15], vec![13]))),
            (&[5, 0], Some((vec![15, 10], vec![13]))),
            (&[3], Some((vec![13], vec![10, 15]))),
            (&[], Some((vec![], vec![10, 13, 15]))),
            (&[1], None),
            (&[3, 3], None),
            (&[127], None),
            (&[200], None),
        ] {
            let pages = [10, 13, 15].map(PageIndex).to_vec();
            let mut left = RereadPages::new(BlockId(1), Epoch(2), pages);
            let mut left_set = set;
            let taken = left.take(&mut left_set, places);
            let numbers =
                |pages: &RereadPages| pages.pages.iter().map(|page| page.0).collect::<Vec<_>>();
            assert_eq!(left_set.len(), left.pages.len(), "{places:?}");
            assert_eq!(
                taken.map(|taken| (numbers(&taken), numbers(&left))),
                expected,
                "{places:?}"
            );
        }
    }

    #[test]
    fn what_was_kept_is_sent_as_it_was() {
        let naming = super::super::stage::tests::naming(Waits::FirstPass);
        let pool = Pool::new(4 * SLOT_BYTES);
        let mut batch = pool.take().unwrap();
        (batch.block, batch.epoch) = (BlockId(1), Epoch(2));
        for (nth, page) in [10_u8, 13, 15].into_iter().enumerate() {
            let at = nth * PAGE_BYTES;
            batch.buffer_mut()[at..at + PAGE_BYTES].fill(page);
            batch.push_body(PageIndex(page.into()), at);
        }
        let kept = Kept::new(batch);
        let mut set = PageSet::all(3);
        let mut pages = kept.pages(set);
        drop(kept);
        let taken = pages.take(&mut set, &[2]).unwrap();
        for (reread, expected) in [(&taken, &[15_u8][..]), (&pages, &[10, 13])] {
            let mut again = pool.take().unwrap();
            assert!(reread.fill(&naming, &mut again));
            let all = again.bodies().iter().map(|body| (body.page.0, again.bytes_of(*body)[77]));
            let expected = expected.iter().map(|page| (u32::from(*page), *page));
            assert!(all.eq(expected));
            assert_eq!((again.block, again.epoch), (BlockId(1), Epoch(2)));
        }
        assert_eq!(pool.out_bytes(), SLOT_BYTES);
        drop((taken, pages));
        assert_eq!(pool.out_bytes(), 0, "its buffer is back");
    }

    /// A balloon has given one page back since QEMU handed both over, and QEMU does not report
    /// that.
    #[test]
    fn what_is_read_again_is_what_the_audit_expects() {
        let ram = Arc::new(Mapping::own(8 * PAGE_BYTES as u64));
        let mut plan = super::super::stage::tests::naming(Waits::Held).into_plan();
        plan.ram = Arc::default();
        plan.ram.announce([Some(Arc::clone(&ram))].into_iter());
        let handed_over = Arc::new(HandedOver::new(Some(Hash::default())));
        handed_over.announce([8].into_iter());
        plan.handed_over = Arc::clone(&handed_over);
        let (naming, pool) = (Naming::new(plan), Pool::new(2 * SLOT_BYTES));
        let mut batch = pool.take().unwrap();
        batch.epoch = Epoch(2);
        for (nth, page) in [3_u32, 4].into_iter().enumerate() {
            let at = nth * PAGE_BYTES;
            batch.buffer_mut()[at..at + PAGE_BYTES].fill(7);
            batch.push_body(PageIndex(page), at);
        }
        handed_over.bodies(&batch, batch.bodies(), batch.epoch);
        ram.fill(PageIndex(4).offset(), PAGE_BYTES as u64, 7).unwrap();
        let mut again = pool.take().unwrap();
        assert!(RereadPages::of(&batch, PageSet::all(2)).fill(&naming, &mut again));
        let placed = Ledger::new(Hash::default(), [8]).unwrap();
        let block = placed.block(BlockId(0)).unwrap();
        for body in again.bodies() {
            let fingerprint = block.hash().of(again.bytes_of(*body));
            block.write().placed(body.page, fingerprint, again.epoch, Delivery::Body);
        }
        assert_eq!(handed_over.ledger().unwrap().totals(), placed.totals());
    }
}
