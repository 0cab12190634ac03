//! Items that are requested and not started, in the image's order.
//!
//! The image is divided into stretches of [`STRETCH_BYTES`], as large as the
//! largest request. A stretch collects its items as they are added and is sorted
//! when it is used, so that adding a page costs one push. The reader sweeps upwards
//! and starts again at the bottom (items added below it gain neighbours meanwhile);
//! items are taken from the end by popping from the last stretch.

use std::collections::BTreeMap;

use page::PAGE_BYTES;

/// The size of a stretch, and of the largest request but for its last page.
pub(crate) const STRETCH_BYTES: u64 = 1 << 20;
/// Item lists that are kept for the next stretches.
const SPARE_MAX: usize = 64;
const PAGE: u64 = PAGE_BYTES as u64;

/// A requested page of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Item {
    /// Where its 4,096 bytes start in the image: at any byte, since a guest's partition
    /// may start anywhere.
    pub offset: u64,
    /// Identifies the item to its owner.
    pub token: u64,
}

/// How much may go into one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// From its first to its last byte; a page at least.
    pub(crate) bytes_max: u64,
    /// Other bytes between two pages that are read with them.
    pub(crate) gap_bytes_max: u64,
}

#[derive(Debug)]
pub(crate) struct Requested {
    image_bytes: u64,
    stretches: BTreeMap<u64, Stretch>,
    /// The stretch that the sweep is at.
    at: u64,
    items: usize,
    spare: Vec<Vec<Item>>,
}

#[derive(Debug, Default)]
struct Stretch {
    items: Vec<Item>,
    /// Items before this index are started.
    from: usize,
    sorted: bool,
}

impl Stretch {
    fn rest(&mut self) -> &[Item] {
        let rest = &mut self.items[self.from..];
        if !self.sorted {
            rest.sort_unstable();
            self.sorted = true;
        }
        rest
    }

    fn is_empty(&self) -> bool {
        self.from == self.items.len()
    }
}

impl Requested {
    pub(crate) fn new(image_bytes: u64) -> Self {
        Self { image_bytes, stretches: BTreeMap::new(), at: 0, items: 0, spare: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.items
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items == 0
    }

    /// Adds items. Their offsets come from a guest: items outside the image are kept
    /// with its end, so that there are never more stretches than the image has.
    pub(crate) fn add(&mut self, items: &[Item]) {
        for item in items {
            let number = item.offset.min(self.image_bytes) / STRETCH_BYTES;
            let spare = &mut self.spare;
            let stretch = self.stretches.entry(number).or_insert_with(|| Stretch {
                items: spare.pop().unwrap_or_default(),
                from: 0,
                sorted: true,
            });
            stretch.sorted &= stretch.is_empty() || stretch.items.last() <= Some(item);
            stretch.items.push(*item);
        }
        self.items += items.len();
    }

    /// Appends the next request's items in order. Items beyond the image are taken
    /// together, and with no others.
    pub(crate) fn take_next(&mut self, limits: Limits, into: &mut Vec<Item>) {
        let ahead = self.stretches.range(self.at..).next().or_else(|| self.stretches.iter().next());
        let Some(number) = ahead.map(|(number, _)| *number) else { return };
        self.at = number;
        let Some(stretch) = self.stretches.get_mut(&number) else { return };
        let count = request_items(stretch.rest(), self.image_bytes, limits);
        into.extend_from_slice(&stretch.items[stretch.from..stretch.from + count]);
        stretch.from += count;
        self.items -= count;
        if stretch.is_empty() {
            self.at = number + 1;
            self.remove(number);
        }
    }

    /// Takes the items with the highest offsets: their tokens, highest first.
    pub(crate) fn take_from_the_end(&mut self, items_max: usize, into: &mut Vec<u64>) -> usize {
        let mut left = items_max;
        while left > 0
            && let Some(mut entry) = self.stretches.last_entry()
        {
            let number = *entry.key();
            let stretch = entry.get_mut();
            let count = stretch.rest().len().min(left);
            let kept = stretch.items.len() - count;
            into.extend(stretch.items[kept..].iter().rev().map(|item| item.token));
            stretch.items.truncate(kept);
            left -= count;
            if stretch.is_empty() {
                self.remove(number);
            }
        }
        let taken = items_max - left;
        self.items -= taken;
        taken
    }

    /// Takes the items of one stretch; `None` if nothing is left.
    pub(crate) fn take_any(&mut self) -> Option<Vec<Item>> {
        let (_, mut stretch) = self.stretches.pop_first()?;
        stretch.items.drain(..stretch.from);
        self.items -= stretch.items.len();
        Some(stretch.items)
    }

    fn remove(&mut self, number: u64) {
        let Some(mut stretch) = self.stretches.remove(&number) else { return };
        if self.spare.len() < SPARE_MAX {
            stretch.items.clear();
            self.spare.push(stretch.items);
        }
    }
}

/// How many of these items, in order, make the next request.
fn request_items(items: &[Item], image_bytes: u64, limits: Limits) -> usize {
    let Some(first) = items.first() else { return 0 };
    if first.offset >= image_bytes {
        return items.len();
    }
    let mut before = first.offset;
    let fits = items.iter().take_while(|item| {
        let gap = (item.offset - before).saturating_sub(PAGE);
        let bytes = (item.offset - first.offset).saturating_add(PAGE);
        before = item.offset;
        item.offset < image_bytes && gap <= limits.gap_bytes_max && bytes <= limits.bytes_max
    });
    // The first item is taken whatever the limits are.
    fits.count().max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const IMAGE: u64 = 8 << 20;

    fn items(offsets: &[u64]) -> Vec<Item> {
        let numbered = offsets.iter().zip(0..);
        numbered.map(|(offset, token)| Item { offset: *offset, token }).collect()
    }

    fn requests(requested: &mut Requested, limits: Limits) -> Vec<Vec<u64>> {
        let mut requests = Vec::new();
        loop {
            let mut next = Vec::new();
            requested.take_next(limits, &mut next);
            if next.is_empty() {
                return requests;
            }
            requests.push(next.iter().map(|item| item.offset).collect());
        }
    }

    #[test]
    fn neighbours_and_small_gaps_are_one_request() {
        let mut requested = Requested::new(IMAGE);
        requested.add(&items(&[512 + 20_480, 512, 512 + 4096, 512 + 12_288, 512]));
        let limits = Limits { bytes_max: STRETCH_BYTES, gap_bytes_max: 4096 };
        assert_eq!(requests(&mut requested, limits), [[512, 512, 4608, 12_800, 20_992]]);
        requested.add(&items(&[0, 8193]));
        assert_eq!(requests(&mut requested, limits), [vec![0], vec![8193]]);
        requested.add(&items(&[0, 4096, 8192, 12_288]));
        let limits = Limits { bytes_max: 8192, gap_bytes_max: 0 };
        assert_eq!(requests(&mut requested, limits), [[0, 4096], [8192, 12_288]]);
        requested.add(&items(&[0, 100]));
        let limits = Limits { bytes_max: 1, gap_bytes_max: 0 };
        assert_eq!(requests(&mut requested, limits), [[0], [100]]);
    }

    #[test]
    fn it_sweeps_upwards_and_starts_again() {
        let mut requested = Requested::new(IMAGE);
        let limits = Limits { bytes_max: STRETCH_BYTES, gap_bytes_max: 0 };
        requested.add(&items(&[5 << 20, 3 << 20]));
        let mut next = Vec::new();
        requested.take_next(limits, &mut next);
        assert_eq!(next[0].offset, 3 << 20);
        requested.add(&items(&[1 << 20, (3 << 20) + 4096]));
        assert_eq!(requests(&mut requested, limits), [[5 << 20], [1 << 20], [(3 << 20) + 4096]]);
    }

    #[test]
    fn items_outside_the_image_are_taken_together() {
        let mut requested = Requested::new(IMAGE + 100);
        let limits = Limits { bytes_max: STRETCH_BYTES, gap_bytes_max: u64::MAX };
        requested.add(&items(&[u64::MAX, IMAGE + 99, IMAGE + 100, 1 << 60]));
        let expected = [vec![IMAGE + 99], vec![IMAGE + 100, 1 << 60, u64::MAX]];
        assert_eq!(requests(&mut requested, limits), expected);
        requested.add(&items(&[u64::MAX - 5, 0]));
        let mut tokens = Vec::new();
        assert_eq!(requested.take_from_the_end(1, &mut tokens), 1);
        assert_eq!(tokens, [0]);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Add(Vec<u64>),
        Next(u64, u64),
        End(usize),
        Any,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let offset = prop_oneof![0..IMAGE / 512, 0..64_u64, (IMAGE / 512 - 64)..IMAGE / 512 + 9];
        let offsets = prop::collection::vec(offset.prop_map(|sector| sector * 512), 0..80);
        prop::collection::vec(
            prop_oneof![
                offsets.prop_map(Step::Add),
                (4096..STRETCH_BYTES, 0..100_000_u64).prop_map(|(max, gap)| Step::Next(max, gap)),
                (0..60_usize).prop_map(Step::End),
                Just(Step::Any),
            ],
            1..60,
        )
    }

    proptest! {
        /// The model is a sorted list.
        #[test]
        fn every_item_is_taken_once_and_in_its_place(steps in steps()) {
            let mut requested = Requested::new(IMAGE);
            let (mut model, mut tokens) = (Vec::<Item>::new(), 0..);
            for step in steps {
                match step {
                    Step::Add(offsets) => {
                        let added: Vec<_> = offsets
                            .into_iter()
                            .zip(&mut tokens)
                            .map(|(offset, token)| Item { offset, token })
                            .collect();
                        requested.add(&added);
                        model.extend(added);
                        model.sort_unstable();
                    }
                    Step::Next(bytes_max, gap_bytes_max) => {
                        let mut next = Vec::new();
                        requested.take_next(Limits { bytes_max, gap_bytes_max }, &mut next);
                        prop_assert_eq!(next.is_empty(), model.is_empty());
                        let Some(first) = next.first() else { continue };
                        let at = model.binary_search(first).unwrap();
                        prop_assert_eq!(model.drain(at..at + next.len()).collect::<Vec<_>>(), &next[..]);
                        if first.offset < IMAGE {
                            let last = next.last().unwrap();
                            prop_assert!(last.offset + PAGE - first.offset <= bytes_max);
                            let near = |pair: &[Item]| {
                                pair[1].offset <= pair[0].offset + PAGE + gap_bytes_max
                            };
                            prop_assert!(next.windows(2).all(near));
                        }
                    }
                    Step::End(items_max) => {
                        let mut taken = vec![7];
                        let count = requested.take_from_the_end(items_max, &mut taken);
                        prop_assert_eq!(count, items_max.min(model.len()));
                        let expected: Vec<_> =
                            model.split_off(model.len() - count).iter().rev().map(|item| item.token).collect();
                        prop_assert_eq!(&taken[1..], expected);
                    }
                    Step::Any => {
                        let any = requested.take_any();
                        prop_assert_eq!(any.is_none(), model.is_empty());
                        for item in any.into_iter().flatten() {
                            let at = model.binary_search(&item).unwrap();
                            model.remove(at);
                        }
                    }
                }
                prop_assert_eq!(requested.len(), model.len());
                prop_assert_eq!(requested.is_empty(), model.is_empty());
            }
        }
    }
}
