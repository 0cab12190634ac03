//! The numbers by which a ledger's entries know epochs: an entry has few bits for one, and a QEMU
//! that is held ends a thousand passes a second without a page. So only epochs in which pages came
//! use them up.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use page::Epoch;
use parking_lot::Mutex;

/// How many epochs are remembered. A thread may be behind by what its socket holds, which is some
/// hundred epochs.
const RECENT_MAX: usize = 1024;

/// The numbers of a source's epochs. A later epoch has a higher number.
#[derive(Debug, Default)]
pub(crate) struct Numbering {
    /// The newest epoch above its number; 0 until there is one. Read for each batch, without a
    /// lock.
    newest: AtomicU64,
    recent: Mutex<VecDeque<Numbered>>,
}

/// An epoch in which pages came. A number is between 1 and twice the epoch's place among those.
#[derive(Clone, Copy, Debug)]
struct Numbered {
    epoch: u32,
    number: u32,
}

impl Numbering {
    /// The number of an epoch in which pages come.
    pub(crate) fn of(&self, Epoch(epoch): Epoch) -> u32 {
        let newest = self.newest.load(Relaxed);
        if newest != 0 && newest >> 32 == u64::from(epoch) {
            return (newest & 0xffff_ffff) as u32;
        }
        let mut recent = self.recent.lock();
        let Some(last) = recent.back().copied() else {
            return self.add(&mut recent, Numbered { epoch, number: 1 });
        };
        if epoch <= last.epoch {
            return late(&recent, epoch);
        }
        // A number is left for the epochs between the two, from which pages may come late.
        let number = last.number.saturating_add((epoch - last.epoch).min(2));
        self.add(&mut recent, Numbered { epoch, number })
    }

    fn add(&self, recent: &mut VecDeque<Numbered>, new: Numbered) -> u32 {
        if recent.len() == RECENT_MAX {
            recent.pop_front();
        }
        recent.push_back(new);
        self.newest.store(u64::from(new.epoch) << 32 | u64::from(new.number), Relaxed);
        new.number
    }

    /// The number of an epoch in which pages came; none if it is not remembered.
    pub(crate) fn find(&self, Epoch(epoch): Epoch) -> Option<u32> {
        let recent = self.recent.lock();
        let at = recent.binary_search_by_key(&epoch, |one| one.epoch).ok()?;
        recent.get(at).map(|one| one.number)
    }

    /// The epoch that has this number, as far as it is remembered.
    pub(crate) fn epoch(&self, number: u32) -> Epoch {
        let recent = self.recent.lock();
        let after = recent.partition_point(|one| one.number <= number);
        let before = recent.get(after.wrapping_sub(1)).or_else(|| recent.front());
        Epoch(before.map_or(number, |one| one.epoch))
    }
}

/// The number of an epoch that is not the newest: above all before it, and below all after it. All
/// epochs between two that are remembered have one number, and so have those before the first.
fn late(recent: &VecDeque<Numbered>, epoch: u32) -> u32 {
    let after = recent.partition_point(|one| one.epoch <= epoch);
    match after.checked_sub(1).and_then(|before| recent.get(before)) {
        Some(before) if before.epoch == epoch => before.number,
        Some(before) => before.number.saturating_add(1),
        None => recent.front().map_or(0, |first| first.number.saturating_sub(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_without_pages_use_up_one_number_at_most() {
        let numbering = Numbering::default();
        let epochs = [7, 8, 10, 4_000_000_000, u32::MAX];
        let numbers = epochs.map(|epoch| numbering.of(Epoch(epoch)));
        assert_eq!(numbers, [1, 2, 4, 6, 8]);
        assert_eq!(epochs.map(|epoch| numbering.of(Epoch(epoch))), numbers, "once more");
        assert_eq!(numbers.map(|number| numbering.epoch(number)), epochs.map(Epoch));
        assert_eq!(numbering.find(Epoch(10)), Some(4));
        assert_eq!(numbering.find(Epoch(9)), None);
    }

    #[test]
    fn what_comes_late_has_a_number_between_those_around_it() {
        let numbering = Numbering::default();
        for epoch in [5, 6, 9, 20] {
            numbering.of(Epoch(epoch));
        }
        let numbers = (1..=20).map(|epoch| numbering.of(Epoch(epoch)));
        assert_eq!(
            numbers.collect::<Vec<_>>(),
            [0, 0, 0, 0, 1, 2, 3, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 6]
        );
    }

    #[test]
    fn what_is_older_than_all_that_is_remembered_is_older() {
        let numbering = Numbering::default();
        for epoch in 1..=2000 {
            numbering.of(Epoch(epoch));
        }
        assert_eq!(numbering.of(Epoch(3)), 2000 - 1024);
        assert_eq!(numbering.of(Epoch(1500)), 1500);
        assert_eq!((numbering.find(Epoch(3)), numbering.epoch(3)), (None, Epoch(2000 - 1023)));
    }
}
