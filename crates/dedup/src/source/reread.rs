//! Pages whose bodies are not kept, and are read once more if they are wanted.

use page::{Batch, BlockId, Epoch, PAGE_BYTES, PageIndex};

use super::naming::Naming;

/// Pages whose bodies are not kept: what they contain when they are sent is at
/// least as new, and as good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RereadPages {
    pub(super) block: BlockId,
    pub(super) epoch: Epoch,
    pub(super) pages: Vec<PageIndex>,
}

impl RereadPages {
    pub(super) fn new(block: BlockId, epoch: Epoch, pages: Vec<PageIndex>) -> Self {
        Self { block, epoch, pages }
    }

    /// Those of a batch's bodies whose bit is set.
    pub(super) fn of(batch: &Batch, bits: u128) -> Self {
        let pages = chosen(batch.bodies(), bits).map(|body| body.page).collect();
        Self { block: batch.block, epoch: batch.epoch, pages }
    }

    /// Those with these bits of a batch that had no others.
    pub(super) fn chosen(&self, bits: u128) -> Self {
        Self { pages: chosen(&self.pages, bits).copied().collect(), ..*self }
    }

    /// Takes out those of its pages that stand at these places of the batch they
    /// are of, where `bits` are chosen; of these the others are left. None if there
    /// is no such one.
    pub(super) fn take(&mut self, bits: &mut u128, places: &[u8]) -> Option<Self> {
        let (mut taken, mut gone) = (Vec::with_capacity(places.len()), 0_u128);
        for place in places {
            let bit = 1_u128.checked_shl(u32::from(*place))?;
            if *bits & !gone & bit == 0 {
                return None;
            }
            gone |= bit;
            taken.push(*self.pages.get((*bits & (bit - 1)).count_ones() as usize)?);
        }
        let mut places = (0..128).filter(|place| *bits >> place & 1 == 1);
        self.pages.retain(|_| places.next().is_some_and(|place| gone >> place & 1 == 0));
        *bits &= !gone;
        Some(Self { pages: taken, ..*self })
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.pages.len() * PAGE_BYTES) as u64
    }

    /// Puts what the pages contain by now into an empty batch.
    pub(super) fn fill(&self, naming: &Naming, batch: &mut Batch) -> bool {
        batch.block = self.block;
        batch.epoch = self.epoch;
        let bytes = self.pages.len() * PAGE_BYTES;
        if !naming.read_again(self.block, &self.pages, &mut batch.buffer_mut()[..bytes]) {
            return false;
        }
        for (nth, page) in self.pages.iter().enumerate() {
            batch.push_body(*page, nth * PAGE_BYTES);
        }
        true
    }
}

/// The items whose bit is set.
pub(super) fn chosen<T>(items: &[T], bits: u128) -> impl Iterator<Item = &T> {
    items.iter().enumerate().filter(move |(nth, _)| is_set(bits, *nth)).map(|(_, item)| item)
}

pub(super) fn is_set(bits: u128, nth: usize) -> bool {
    nth < 128 && bits >> nth & 1 == 1
}

/// The bits that a batch with so many pages has.
pub(super) fn bits_of(pages: usize) -> u128 {
    if pages >= 128 { u128::MAX } else { (1 << pages) - 1 }
}

const _: () = assert!(page::BATCH_PAGES <= 128, "a batch's pages have a bit each");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wanted_late_is_found_by_its_place_in_the_batch() {
        // Pages 10 to 15, of which the first, the fourth and the sixth come later.
        let bits = 0b10_1001;
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
            let mut left = RereadPages { block: BlockId(1), epoch: Epoch(2), pages };
            let mut left_bits = bits;
            let taken = left.take(&mut left_bits, places);
            let numbers =
                |pages: &RereadPages| pages.pages.iter().map(|page| page.0).collect::<Vec<_>>();
            assert_eq!(left_bits.count_ones() as usize, left.pages.len(), "{places:?}");
            assert_eq!(
                taken.map(|taken| (numbers(&taken), numbers(&left))),
                expected,
                "{places:?}"
            );
        }
    }

    #[test]
    fn a_whole_batch_has_all_bits() {
        assert_eq!(bits_of(128), u128::MAX);
        assert_eq!(bits_of(3), 0b111);
        assert_eq!(bits_of(0), 0);
        assert!(is_set(u128::MAX, 127) && !is_set(u128::MAX, 128));
    }
}
