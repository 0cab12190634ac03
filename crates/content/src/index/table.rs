//! The table from names to places, with eight bytes an entry.
//!
//! An entry is a place and 20 bits of a name. Its bucket gives the rest of the name's first 32
//! bits, and no more of a name is stored. So a look-up may return a place of other content, once
//! in 2^32 for each entry. Names are evenly spread, so buckets fill evenly, and the name serves
//! as its own hash.
//!
//! Buckets are in the order of names. So an entry's place in a table of another size follows from
//! its current place, and the table grows and shrinks without the names.

use parking_lot::RwLock;

use super::members::Living;
use crate::Name;

/// Members' numbers are below this, and not 0.
pub(super) const MEMBERS_MAX: usize = 1 << MEMBER_BITS;

const PAGE_BITS: u32 = 32;
const MEMBER_BITS: u32 = 12;
const TAG_BITS: u32 = 20;
const _: () = assert!(PAGE_BITS + MEMBER_BITS + TAG_BITS == u64::BITS);

/// Each shard has a lock. They are enough that threads seldom meet.
const SHARDS: usize = 1 << SHARD_BITS;
const SHARD_BITS: u32 = 8;
/// The bits of a hint within a shard.
const REST_BITS: u32 = u32::BITS - SHARD_BITS;

/// The entries of a bucket: two cache lines, which processors fetch together. With eight entries
/// and the same memory, three times as many pages would find no place.
const PLACES: usize = 16;
const _: () = assert!(size_of::<Bucket>() == 128);
/// With fewer buckets, bucket and tag would not determine the hint.
const BUCKETS_MIN: usize = 1 << (REST_BITS - TAG_BITS);
const BUCKETS_MAX: usize = 1 << REST_BITS;
const _: () = assert!(usize::BITS > 2 * REST_BITS);

/// How many places are kept for one content: one may change, or leave.
const COPIES_MAX: usize = 2;

/// The first 32 bits of a name, all that the index stores of it. Not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hint(u32);

impl Hint {
    pub(super) fn of(name: &Name) -> Self {
        Self(((name.prefix() >> u32::BITS) as u32).max(1))
    }

    /// The inverse of [`Hint::bits`]. None for 0.
    pub(super) fn from_bits(bits: u32) -> Option<Self> {
        (bits != 0).then_some(Self(bits))
    }

    pub(super) fn bits(self) -> u32 {
        self.0
    }

    fn shard(self) -> usize {
        (self.0 >> REST_BITS) as usize
    }

    fn rest(self) -> u32 {
        self.0 & ((1 << REST_BITS) - 1)
    }

    fn tag(self) -> u32 {
        self.0 & TAG_MASK
    }
}

const TAG_MASK: u32 = (1 << TAG_BITS) - 1;

/// The place of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemberPage {
    /// The VM that has it.
    pub(super) member: u16,
    pub(super) page: u32,
}

/// A place and its tag. 0 is no entry, since no member has number 0.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Entry(u64);

impl Entry {
    const NONE: Self = Self(0);

    fn new(hint: Hint, place: MemberPage) -> Self {
        let owner = u64::from(hint.tag()) << MEMBER_BITS | u64::from(place.member);
        Self(owner << PAGE_BITS | u64::from(place.page))
    }

    fn tag(self) -> u32 {
        (self.0 >> (PAGE_BITS + MEMBER_BITS)) as u32
    }

    fn member(self) -> u16 {
        ((self.0 >> PAGE_BITS) & ((1 << MEMBER_BITS) - 1)) as u16
    }

    fn place(self) -> MemberPage {
        MemberPage { member: self.member(), page: (self.0 << PAGE_BITS >> PAGE_BITS) as u32 }
    }
}

#[derive(Clone)]
#[repr(align(128))]
struct Bucket([Entry; PLACES]);

impl Bucket {
    const EMPTY: Self = Self([Entry::NONE; PLACES]);

    /// The slot for `entry`. None if the bucket has it already.
    fn room(&self, entry: Entry, living: &Living) -> Option<usize> {
        let mut free = None;
        let mut copies = 0;
        let mut oldest: Option<usize> = None;
        for (at, other) in self.0.iter().enumerate() {
            if *other == entry {
                return None;
            }
            if !living.has(other.member()) {
                free = free.or(Some(at));
            } else if other.tag() == entry.tag() {
                copies += 1;
                // Content that was seen last is most likely still there. Another member's copy is
                // kept rather than a second one of the same member.
                if oldest.is_none() || other.member() == entry.member() {
                    oldest = Some(at);
                }
            }
        }
        if copies >= COPIES_MAX { oldest } else { free.or_else(|| Some(self.victim(entry))) }
    }

    /// The entry to evict from a full bucket: one of two copies, or else any.
    fn victim(&self, new: Entry) -> usize {
        let twice = |at: &usize| {
            let tag = self.0[*at].tag();
            self.0.iter().filter(|other| other.tag() == tag).count() > 1
        };
        let any = new.place().page as usize % PLACES;
        (0..PLACES).find(twice).unwrap_or(any)
    }
}

#[repr(align(64))]
struct Shard(RwLock<Vec<Bucket>>);

/// Entries by name.
pub(super) struct Table {
    shards: Box<[Shard]>,
}

impl Table {
    pub(super) fn new() -> Self {
        let shard = || Shard(RwLock::new(vec![Bucket::EMPTY; BUCKETS_MIN]));
        Self { shards: (0..SHARDS).map(|_| shard()).collect() }
    }

    /// The places where living members may have the content.
    pub(super) fn places(&self, hint: Hint, living: &Living) -> impl Iterator<Item = MemberPage> {
        let bucket = {
            let buckets = self.shards[hint.shard()].0.read();
            buckets[bucket_of(hint.rest(), buckets.len())].clone()
        };
        let wanted = move |entry: &Entry| entry.tag() == hint.tag() && living.has(entry.member());
        bucket.0.into_iter().filter(wanted).map(Entry::place)
    }

    /// Records that the content was seen there. A known entry, as in most rounds of a scanner, is
    /// not written again.
    pub(super) fn put(&self, hint: Hint, place: MemberPage, living: &Living) {
        let entry = Entry::new(hint, place);
        let shard = &self.shards[hint.shard()].0;
        {
            let buckets = shard.read();
            if buckets[bucket_of(hint.rest(), buckets.len())].0.contains(&entry) {
                return;
            }
        }
        let mut buckets = shard.write();
        let at = bucket_of(hint.rest(), buckets.len());
        if let Some(room) = buckets[at].room(entry, living) {
            buckets[at].0[room] = entry;
        }
    }

    /// Removes an entry whose content is not there any more.
    pub(super) fn take(&self, hint: Hint, place: MemberPage) {
        let entry = Entry::new(hint, place);
        let mut buckets = self.shards[hint.shard()].0.write();
        let at = bucket_of(hint.rest(), buckets.len());
        for same in buckets[at].0.iter_mut().filter(|other| **other == entry) {
            *same = Entry::NONE;
        }
    }

    /// Fits the table's size to so many `pages`, one shard after the other: the others stay
    /// readable meanwhile, and no second table is needed. It shrinks only by half or more. If
    /// several threads do so, the last one at a shard fits it to what counts then.
    pub(super) fn fit(&self, pages: impl Fn() -> u64, living: &Living) {
        for Shard(shard) in &self.shards {
            let mut buckets = shard.write();
            let wanted = buckets_for(pages());
            if buckets.len() < wanted || buckets.len() / 2 > wanted {
                *buckets = resized(&buckets, wanted, living);
            }
        }
    }

    /// Removes all entries of members that have left.
    pub(super) fn sweep(&self, living: &Living) {
        for Shard(shard) in &self.shards {
            for bucket in shard.write().iter_mut() {
                for entry in bucket.0.iter_mut().filter(|entry| !living.has(entry.member())) {
                    *entry = Entry::NONE;
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let shard = |shard: &Shard| shard.0.read().capacity() * size_of::<Bucket>();
        self.shards.iter().map(shard).sum::<usize>() + size_of_val(&*self.shards)
    }
}

/// Three slots for two pages. If all pages differ, one or two in a hundred find their bucket
/// full.
fn buckets_for(pages: u64) -> usize {
    let places = pages.saturating_mul(3) / 2;
    let buckets = places.div_ceil((PLACES * SHARDS) as u64);
    usize::try_from(buckets).unwrap_or(BUCKETS_MAX).clamp(BUCKETS_MIN, BUCKETS_MAX)
}

/// The bucket, of so many, for a hint's rest.
fn bucket_of(rest: u32, buckets: usize) -> usize {
    (rest as usize * buckets) >> REST_BITS
}

/// The rest of the hint of an entry in bucket `at` of `buckets`.
fn rest_of(entry: Entry, at: usize, buckets: usize) -> u32 {
    // A bucket's rests are consecutive, and fewer than there are tags.
    let first = u32::try_from((at << REST_BITS).div_ceil(buckets)).expect("a rest is short");
    first + (entry.tag().wrapping_sub(first) & TAG_MASK)
}

fn resized(old: &[Bucket], buckets: usize, living: &Living) -> Vec<Bucket> {
    let mut new = vec![Bucket::EMPTY; buckets];
    for (at, bucket) in old.iter().enumerate() {
        for &entry in bucket.0.iter().filter(|entry| living.has(entry.member())) {
            let to = &mut new[bucket_of(rest_of(entry, at, old.len()), buckets)];
            if let Some(free) = to.0.iter_mut().find(|place| **place == Entry::NONE) {
                *free = entry;
            }
        }
    }
    new
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn place(member: u16, page: u32) -> MemberPage {
        MemberPage { member, page }
    }

    fn living(members: &[u16]) -> Living {
        let living = Living::default();
        members.iter().for_each(|member| living.set(*member, true));
        living
    }

    fn places(table: &Table, bits: u32, living: &Living) -> Vec<MemberPage> {
        table.places(Hint(bits), living).collect()
    }

    #[test]
    fn two_places_are_kept_of_one_content_with_the_last_seen() {
        let (table, living) = (Table::new(), living(&[1, 2, 3]));
        let all = [place(1, 7), place(1, 8), place(1, 9), place(2, 0), place(3, u32::MAX)];
        for seen in all {
            table.put(Hint(77), seen, &living);
            table.put(Hint(77), seen, &living);
            let kept = places(&table, 77, &living);
            assert!(kept.len() <= COPIES_MAX && kept.contains(&seen), "{kept:?}");
        }
        let kept = places(&table, 77, &living);
        assert_ne!(kept[0].member, kept[1].member);
        table.take(Hint(77), place(1, 7));
        table.take(Hint(77), kept[0]);
        assert_eq!(places(&table, 77, &living), [kept[1]]);
        assert_eq!(places(&table, 78, &living), []);
        // No member takes another member's place.
        for seen in [place(1, 1), place(2, 2), place(2, 3), place(1, 4), place(2, 5)] {
            table.put(Hint(79), seen, &living);
        }
        assert_eq!(places(&table, 79, &living), [place(1, 4), place(2, 5)]);
    }

    #[test]
    fn a_full_bucket_evicts_dead_entries_then_second_copies() {
        let (table, living) = (Table::new(), living(&[1, 2]));
        // All in the first bucket: a sixteenth of a shard.
        for bits in 1..=14 {
            table.put(Hint(bits), place(1, bits), &living);
        }
        for page in [100, 101] {
            table.put(Hint(50), place(1, page), &living);
        }
        let held = |bits| places(&table, bits, &living).len();
        table.put(Hint(15), place(2, 15), &living);
        assert_eq!((1..=15).map(held).sum::<usize>(), 15);
        assert_eq!(held(50), 1);
        table.put(Hint(16), place(2, 16), &living);
        let all = || (1..=16).chain([50]).map(held).sum::<usize>();
        assert_eq!((held(16), all()), (1, PLACES));
        living.set(2, false);
        assert_eq!(all(), PLACES - 2);
        table.put(Hint(17), place(1, 17), &living);
        assert_eq!((held(17), all()), (1, PLACES - 2));
    }

    #[test]
    fn a_sweep_removes_only_members_that_have_left() {
        let (table, living) = (Table::new(), living(&[1, 2]));
        for bits in 1..1000_u32 {
            let bits = bits.wrapping_mul(0x9e37_79b9);
            table.put(Hint(bits), place(1 + (bits % 2) as u16, bits), &living);
        }
        let count = |table: &Table| {
            let hints = (1..1000_u32).map(|bits| bits.wrapping_mul(0x9e37_79b9));
            hints.filter(|bits| !places(table, *bits, &living).is_empty()).count()
        };
        assert_eq!(count(&table), 999);
        living.set(2, false);
        let left = count(&table);
        table.sweep(&living);
        living.set(2, true);
        assert_eq!(count(&table), left);
        assert!((400..600).contains(&left));
    }

    proptest! {
        #[test]
        fn an_entry_tells_what_it_was_made_of(bits in 1_u32.., member in 1_u16..4096, page: u32) {
            let entry = Entry::new(Hint(bits), place(member, page));
            prop_assert_eq!(entry.place(), place(member, page));
            prop_assert_eq!(entry.tag(), bits & TAG_MASK);
        }

        #[test]
        fn an_entry_and_its_bucket_give_its_hint(
            rest in 0_u32..1 << REST_BITS,
            buckets in BUCKETS_MIN..=BUCKETS_MAX,
        ) {
            let entry = Entry::new(Hint(rest), place(1, 1));
            let at = bucket_of(rest, buckets);
            prop_assert!(at < buckets);
            prop_assert_eq!(rest_of(entry, at, buckets), rest);
        }

        #[test]
        fn nothing_is_lost_when_the_table_changes_its_size(
            hints in prop::collection::hash_set(1_u32.., 1..300),
            sizes in prop::collection::vec(0..3_000_000_u64, 1..4),
        ) {
            let (table, living) = (Table::new(), living(&[5]));
            let all: Vec<_> = hints.into_iter().zip(0..).collect();
            table.fit(|| 50_000, &living);
            for &(bits, page) in &all {
                table.put(Hint(bits), place(5, page), &living);
            }
            for pages in sizes {
                table.fit(|| pages, &living);
                for &(bits, page) in &all {
                    prop_assert!(places(&table, bits, &living).contains(&place(5, page)));
                }
            }
        }
    }
}
