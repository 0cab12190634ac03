//! Pages that the destination may have already: they go by name first, and as
//! bytes only if it wants them.

use content::Name;
use page::{Batch, BlockId, Epoch, PAGE_BYTES, PageIndex};
use wire::DiskPlace;

/// Knows the names of pages, and can have their bodies again.
pub trait Namer: std::fmt::Debug + Send + Sync {
    /// Names the bodies of a batch that are to go by name, in their order, into
    /// empty `labels`.
    fn name(&self, batch: &Batch, labels: &mut Labels) -> Asking;

    /// Takes out bodies that were announced to the destination, by [`Reserved::tell`],
    /// and that have not changed since. Says how many.
    ///
    /// [`Reserved::tell`]: crate::Reserved::tell
    fn take_out_announced(&self, _batch: &mut Batch) -> usize {
        0
    }

    /// Reads what pages of a block contain by now, one after the other. False if
    /// that can't be had any more.
    fn read_again(&self, block: BlockId, pages: &[PageIndex], into: &mut [u8]) -> bool;

    /// How many of the pages that the destination waits for lanes should have to
    /// send, once they have little else.
    fn spare_pages(&self) -> u64 {
        0
    }

    /// Lanes could send so many of them, all that they ever could counted.
    fn has_spare(&self, _pages: u64) {}
}

/// Names of bodies.
#[derive(Debug, Default)]
pub struct Labels {
    /// One for each.
    pub names: Vec<Name>,
    /// Where disks have their content: one for each, or none at all.
    pub places: Vec<Option<DiskPlace>>,
}

impl Labels {
    pub(crate) fn clear(&mut self) {
        self.names.clear();
        self.places.clear();
    }
}

/// Whether the destination is asked for a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asking {
    /// It is not: its bodies go at once.
    No,
    /// It is.
    Now,
    /// It is, and may wait for content that is on its way from elsewhere: the
    /// bodies can be had again.
    MayWait,
    /// It is, for bodies with these bits, which can be had again: their buffers
    /// are not kept for it. The others go at once.
    Only(u128),
}

/// Pages whose bodies are not kept: what they contain when they are sent is at
/// least as new, and as good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RereadPages {
    pub(crate) block: BlockId,
    pub(crate) epoch: Epoch,
    pub(crate) pages: Vec<PageIndex>,
}

impl RereadPages {
    pub(crate) fn new(block: BlockId, epoch: Epoch, pages: Vec<PageIndex>) -> Self {
        Self { block, epoch, pages }
    }

    /// Those of a batch's bodies whose bit is set.
    pub(crate) fn of(batch: &Batch, bits: u128) -> Self {
        let pages = chosen(batch.bodies(), bits).map(|body| body.page).collect();
        Self { block: batch.block, epoch: batch.epoch, pages }
    }

    /// Those with these bits of a batch that had no others.
    pub(crate) fn chosen(&self, bits: u128) -> Self {
        Self { pages: chosen(&self.pages, bits).copied().collect(), ..*self }
    }

    /// Takes out those of its pages that stand at these places of the batch they
    /// are of, where `bits` are chosen; of these the others are left. None if there
    /// is no such one.
    pub(crate) fn take(&mut self, bits: &mut u128, places: &[u8]) -> Option<Self> {
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

    pub(crate) fn bytes(&self) -> u64 {
        (self.pages.len() * PAGE_BYTES) as u64
    }

    /// Puts what the pages contain by now into an empty batch.
    pub(crate) fn fill(&self, namer: &dyn Namer, batch: &mut Batch) -> bool {
        batch.block = self.block;
        batch.epoch = self.epoch;
        let bytes = self.pages.len() * PAGE_BYTES;
        if !namer.read_again(self.block, &self.pages, &mut batch.buffer_mut()[..bytes]) {
            return false;
        }
        for (nth, page) in self.pages.iter().enumerate() {
            batch.push_body(*page, nth * PAGE_BYTES);
        }
        true
    }
}

/// The items whose bit is set.
pub(crate) fn chosen<T>(items: &[T], bits: u128) -> impl Iterator<Item = &T> {
    items.iter().enumerate().filter(move |(nth, _)| is_set(bits, *nth)).map(|(_, item)| item)
}

pub(crate) fn is_set(bits: u128, nth: usize) -> bool {
    nth < 128 && bits >> nth & 1 == 1
}

/// The bits that a batch with so many pages has.
pub(crate) fn bits_of(pages: usize) -> u128 {
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
