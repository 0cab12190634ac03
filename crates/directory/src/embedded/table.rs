//! One shard's table, which moves entries only when it grows.
//!
//! A name has two buckets of eight entries, chosen by its own bits, which are as good as any
//! hash. It goes into the emptier one, so the table is some three quarters full before both are
//! found full. Then it grows, up to its bound. From there on, the least useful entry of the two
//! buckets is evicted. So a look-up reads 512 bytes at most, and eviction needs no list and no
//! clock.

use content::Name;

use super::Now;
use super::hosts::Mark;

/// Entries in a bucket.
pub(super) const WAYS: usize = 8;

/// What is known of one content. It has at most two holders: when one changes or vanishes, the
/// other is left, and widely held content is fetched from more than one host. A third would cost
/// each entry four bytes.
#[derive(Clone, Copy, Debug)]
struct Entry {
    name: Name,
    /// The host that was recorded last; [`Mark::NOBODY`] if the entry is vacant.
    first: Mark,
    /// The other holder, [`Mark::NOBODY`], or [`Mark::CLAIM`] if `first` only claims the content.
    second: Mark,
    /// The first tick at which the entry has expired.
    until: u32,
}

const _: () = assert!(size_of::<Entry>() == 32);

type Bucket = [Entry; WAYS];

const EMPTY: Bucket = [Entry::VACANT; WAYS];

/// What a claim finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimResult {
    /// Nothing, and the content is claimed now.
    Nothing,
    /// That host has it.
    Held(u16),
    /// That host has claimed it.
    Claimed(u16),
}

impl Entry {
    const VACANT: Self =
        Self { name: Name([0; 20]), first: Mark::NOBODY, second: Mark::NOBODY, until: 0 };

    fn is_vacant(&self) -> bool {
        self.first == Mark::NOBODY
    }

    fn is_claim(&self) -> bool {
        self.second == Mark::CLAIM
    }

    /// Whether the entry is still valid.
    fn counts(&self, now: &Now<'_>) -> bool {
        self.until > now.tick && (now.counts(self.first) || now.counts(self.second))
    }

    /// The answer for the host with the mark `by`. Queries are spread over two holders by host
    /// and name.
    fn tell(&self, by: Mark, now: &Now<'_>) -> ClaimResult {
        if !self.counts(now) || self.is_claim() && self.first.host == by.host {
            return ClaimResult::Nothing;
        }
        if self.is_claim() {
            return ClaimResult::Claimed(self.first.host);
        }
        let [first, second] = [self.first, self.second].map(|mark| now.counts(mark));
        let is_odd = (u16::from(self.name.0[19]) ^ by.host) & 1 == 1;
        let prefers_second = self.second.host == by.host || is_odd && self.first.host != by.host;
        let chosen = if second && (prefers_second || !first) { self.second } else { self.first };
        ClaimResult::Held(chosen.host)
    }

    /// A holder other than `by`.
    fn holder_beside(&self, by: Mark, now: &Now<'_>) -> Mark {
        if self.until <= now.tick || self.is_claim() {
            return Mark::NOBODY;
        }
        let is_other = |mark: &Mark| mark.host != by.host && now.counts(*mark);
        [self.first, self.second].into_iter().find(is_other).unwrap_or(Mark::NOBODY)
    }
}

#[derive(Debug)]
pub(super) struct Table {
    buckets: Vec<Bucket>,
    buckets_max: usize,
    used: usize,
    evicted: u64,
}

impl Table {
    pub(super) fn new(buckets_max: usize) -> Self {
        Self { buckets: vec![EMPTY], buckets_max, used: 0, evicted: 0 }
    }

    /// The number of entries in use.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// The number of entries that were dropped, or not recorded, for want of room.
    pub(super) fn evicted(&self) -> u64 {
        self.evicted
    }

    pub(super) fn bytes(&self) -> usize {
        self.buckets.len() * size_of::<Bucket>()
    }

    pub(super) fn claim(
        &mut self,
        name: &Name,
        by: Mark,
        until: u32,
        now: &Now<'_>,
    ) -> ClaimResult {
        let claim = Entry { name: *name, first: by, second: Mark::CLAIM, until };
        let Some(entry) = self.find(name) else {
            self.note(claim, now);
            return ClaimResult::Nothing;
        };
        let found = entry.tell(by, now);
        if found == ClaimResult::Nothing {
            *entry = claim;
        }
        found
    }

    pub(super) fn hold(&mut self, name: &Name, by: Mark, until: u32, now: &Now<'_>) {
        let alone = Entry { name: *name, first: by, second: Mark::NOBODY, until };
        match self.find(name) {
            Some(entry) => *entry = Entry { second: entry.holder_beside(by, now), ..alone },
            None => self.note(alone, now),
        }
    }

    pub(super) fn release(&mut self, name: &Name, by: Mark) {
        let Some(entry) = self.find(name) else { return };
        if entry.second.host == by.host {
            entry.second = Mark::NOBODY;
        } else if entry.first.host == by.host {
            let is_last = entry.is_claim() || entry.second == Mark::NOBODY;
            let rest = Entry { first: entry.second, second: Mark::NOBODY, ..*entry };
            *entry = if is_last { Entry::VACANT } else { rest };
            self.used -= usize::from(is_last);
        }
    }

    /// The two buckets of a name; the same one twice if there is no other.
    fn homes(&self, name: &Name) -> [usize; 2] {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, ..] = name.0;
        let count = self.buckets.len();
        let first = scale([a, b, c, d, e, f, g, h], count);
        let second = first + 1 + scale([i, j, k, l, m, n, o, p], count - 1);
        [first, second % count]
    }

    fn find(&mut self, name: &Name) -> Option<&mut Entry> {
        let is_it = |entry: &Entry| entry.name == *name && !entry.is_vacant();
        let homes = self.homes(name);
        let bucket = homes.into_iter().find(|home| self.buckets[*home].iter().any(is_it))?;
        self.buckets[bucket].iter_mut().find(|entry| is_it(entry))
    }

    /// Adds an entry for a name that has none.
    fn note(&mut self, entry: Entry, now: &Now<'_>) {
        while !self.fit(entry, now) {
            // A hostile host may have made up names that meet in a few buckets.
            let is_crowded = self.used * 4 >= self.buckets.len() * WAYS;
            if self.buckets.len() >= self.buckets_max || !is_crowded {
                self.evict(entry);
                return;
            }
            self.grow(now);
        }
    }

    /// Puts the entry in a vacant or expired place. False if there is none.
    fn fit(&mut self, entry: Entry, now: &Now<'_>) -> bool {
        let is_free = |entry: &Entry| entry.is_vacant() || !entry.counts(now);
        let free = |home: &usize| self.buckets[*home].iter().filter(|entry| is_free(entry)).count();
        let [one, other] = self.homes(&entry.name);
        let home = if free(&other) > free(&one) { other } else { one };
        let Some(place) = self.buckets[home].iter_mut().find(|entry| is_free(entry)) else {
            return false;
        };
        self.used += usize::from(place.is_vacant());
        *place = entry;
        true
    }

    /// Evicts the entry that expires first, of equals the oldest, and appends the new one. Held
    /// content goes before claims, because a host may wait for claimed content. For the same
    /// reason, held content never takes a claim's place.
    fn evict(&mut self, entry: Entry) {
        self.evicted += 1;
        let worth = |entry: &Entry| (entry.is_claim(), entry.until);
        let least = |home: usize| {
            let entries = self.buckets[home].iter().enumerate();
            let (way, least) = entries.min_by_key(|(_, entry)| worth(entry)).expect("eight ways");
            (worth(least), home, way)
        };
        let [one, other] = self.homes(&entry.name).map(least);
        let (worth, home, way) = if other.0 < one.0 { other } else { one };
        if entry.is_claim() || !worth.0 {
            let bucket = &mut self.buckets[home];
            bucket.copy_within(way + 1.., way);
            bucket[WAYS - 1] = entry;
        }
    }

    /// Grows the table by half, without its expired entries.
    fn grow(&mut self, now: &Now<'_>) {
        let count = (self.buckets.len() + self.buckets.len().div_ceil(2)).min(self.buckets_max);
        let old = std::mem::replace(&mut self.buckets, vec![EMPTY; count]);
        self.used = 0;
        for entry in old.as_flattened().iter().filter(|entry| entry.counts(now)) {
            self.evicted += u64::from(!self.fit(*entry, now));
        }
    }
}

/// Maps bits evenly to `count` numbers.
#[expect(clippy::cast_possible_truncation, reason = "below the count, which is a usize")]
fn scale(bits: [u8; 8], count: usize) -> usize {
    ((u128::from(u64::from_le_bytes(bits)) * count as u128) >> 64) as usize
}
