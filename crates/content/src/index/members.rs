//! The index's members: the VMs whose pages it knows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::{Mutex, RwLock};

use super::table::{Hint, MEMBERS_MAX};
use super::{Holder, Scanned};
use crate::{EarlierNames, Key};

const WORDS: usize = MEMBERS_MAX / u64::BITS as usize;

/// The numbers of the members that have not left.
pub(super) struct Living([AtomicU64; WORDS]);

impl Default for Living {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; WORDS])
    }
}

impl Living {
    pub(super) fn has(&self, member: u16) -> bool {
        let (word, bit) = Self::bit(member);
        self.0[word].load(Relaxed) & bit != 0
    }

    pub(super) fn set(&self, member: u16, lives: bool) {
        let (word, bit) = Self::bit(member);
        if lives {
            self.0[word].fetch_or(bit, Relaxed);
        } else {
            self.0[word].fetch_and(!bit, Relaxed);
        }
    }

    /// Their numbers.
    pub(super) fn all(&self) -> impl Iterator<Item = u16> {
        (1..MEMBERS_MAX)
            .map_while(|member| u16::try_from(member).ok())
            .filter(|member| self.has(*member))
    }

    fn bit(member: u16) -> (usize, u64) {
        let member = usize::from(member);
        (member / u64::BITS as usize, 1 << (member % u64::BITS as usize))
    }
}

/// Numbers for members. A number that was given back is reused only after the table has been
/// swept, so it never stands for another member's entries.
pub(super) struct Numbers(Mutex<Piles>);

struct Piles {
    clean: Vec<u16>,
    used: Vec<u16>,
}

impl Numbers {
    pub(super) fn new() -> Arc<Self> {
        let clean = (1..MEMBERS_MAX).rev().filter_map(|number| u16::try_from(number).ok());
        let piles = Piles { clean: clean.collect(), used: Vec::with_capacity(MEMBERS_MAX) };
        Arc::new(Self(Mutex::new(piles)))
    }

    /// A number that no entry has. None if all are in use.
    pub(super) fn take(&self, sweep: impl FnOnce()) -> Option<u16> {
        let mut piles = self.0.lock();
        if piles.clean.is_empty() {
            sweep();
            let piles = &mut *piles;
            std::mem::swap(&mut piles.clean, &mut piles.used);
        }
        piles.clean.pop()
    }

    fn give_back(&self, number: u16) {
        self.0.lock().used.push(number);
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let piles = self.0.lock();
        (piles.clean.capacity() + piles.used.capacity()) * size_of::<u16>()
    }
}

/// One member's part of the index. Readers of a member keep it, also while the member leaves.
pub(crate) struct Seat {
    pub(super) number: u16,
    pub(crate) holder: Arc<dyn Holder>,
    pub(crate) key: Key,
    /// By page: the hint of the name that was noted last, or 0. It locates the entry that is out
    /// of date once the page has another name.
    hints: Box<[AtomicU32]>,
    /// The scanner's progress.
    pub(crate) round: Mutex<Round>,
    pub(crate) earlier_names: Arc<EarlierNames>,
    numbers: Arc<Numbers>,
}

/// Where a scanner is in a member's RAM.
#[derive(Debug, Default)]
pub(crate) struct Round {
    /// The next page.
    pub(crate) next: u64,
    /// When the round started.
    pub(crate) began: Option<Instant>,
    /// How many rounds are complete.
    pub(crate) completed: u64,
    /// When it last started to report all names, and whether it does so in this round.
    pub(crate) told: Option<Instant>,
    pub(crate) tells_all: bool,
}

impl Seat {
    pub(super) fn new(
        number: u16,
        holder: Arc<dyn Holder>,
        key: Key,
        pages: u64,
        earlier_names: EarlierNames,
        numbers: Arc<Numbers>,
    ) -> Self {
        let pages = pages.min(1 << u32::BITS);
        Self {
            earlier_names: Arc::new(earlier_names),
            number,
            holder,
            key,
            hints: (0..pages).map(|_| AtomicU32::new(0)).collect(),
            round: Mutex::default(),
            numbers,
        }
    }

    pub(crate) fn pages(&self) -> u64 {
        self.hints.len() as u64
    }

    /// Replaces a page's hint. Returns the page's number as in the table, and the earlier hint.
    /// None if the member has no such page.
    pub(super) fn replace(&self, page: u64, hint: Option<Hint>) -> Option<(u32, Option<Hint>)> {
        let hints = self.hints.get(usize::try_from(page).ok()?)?;
        let before = hints.swap(hint.map_or(0, Hint::bits), Relaxed);
        Some((u32::try_from(page).ok()?, Hint::from_bits(before)))
    }

    /// The hints of all pages that have a name.
    pub(super) fn hints(&self) -> impl Iterator<Item = u32> {
        self.hints.iter().map(|hint| hint.load(Relaxed)).filter(|hint| *hint != 0)
    }

    pub(super) fn scanned(&self) -> Scanned {
        let named = self.hints().count() as u64;
        Scanned { rounds: self.round.lock().completed, named }
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(self) + size_of_val(&*self.hints) + self.earlier_names.bytes()
    }
}

impl Drop for Seat {
    /// Now nothing can be noted under this number any more.
    fn drop(&mut self) {
        self.numbers.give_back(self.number);
    }
}

/// Seats by number.
pub(super) struct Seats(Box<[RwLock<Option<Arc<Seat>>>]>);

impl Seats {
    pub(super) fn new() -> Self {
        Self((0..MEMBERS_MAX).map(|_| RwLock::default()).collect())
    }

    pub(super) fn of(&self, member: u16) -> Option<Arc<Seat>> {
        self.0[usize::from(member)].read().clone()
    }

    pub(super) fn set(&self, member: u16, seat: Option<Arc<Seat>>) {
        *self.0[usize::from(member)].write() = seat;
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_comes_back_only_after_a_sweep() {
        let numbers = Numbers::new();
        let unswept = || panic!("not yet");
        for expected in 1..4096 {
            assert_eq!(numbers.take(unswept), Some(expected));
        }
        assert_eq!(numbers.take(|| {}), None);
        numbers.give_back(9);
        numbers.give_back(7);
        let mut swept = 0;
        for _ in 0..2 {
            assert!(matches!(numbers.take(|| swept += 1), Some(7 | 9)));
        }
        assert_eq!((swept, numbers.take(|| {})), (1, None));
    }

    #[test]
    fn each_member_has_its_own_bit() {
        let living = Living::default();
        for member in [1, 63, 64, 4095] {
            assert!(!living.has(member));
            living.set(member, true);
        }
        living.set(64, false);
        let have: Vec<u16> = (0..4096).filter(|member| living.has(*member)).collect();
        assert_eq!(have, [1, 63, 4095]);
    }
}
