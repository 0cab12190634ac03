//! Which VM on this host has which content: a table from names to places.
//!
//! A place is a page of a VM that runs here or is arriving. The index keeps no copies: an entry
//! is a hint, as old as the last look at the page. So [`Index::find`] copies the page and names
//! the copy, and has found it only if that is the name asked for.
//!
//! # What it costs
//! For each page of a member, at least 12 bytes of the table, and 4 for the page's last name; 0.4
//! % of RAM. The table stores 32 bits of a name (`table`), and the check, which is needed anyway,
//! does the rest. Where a scanner keeps whole names ([`EarlierNames`]), these have a bound of their
//! own.
//!
//! # Locks
//! A lock is held while a bucket is copied or an entry written, but never while a holder reads,
//! which may take any time. A member that leaves while it is being read stays until the copy is
//! made. The table is made smaller one lock's part at a time and, where much is indexed, by another
//! thread, so no caller waits for a large member that leaves.

mod members;
mod table;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::thread;

use page::{BATCH_PAGES, PAGE_BYTES, Reserve};

use self::members::{Living, Numbers, Seats};
use self::table::{Hint, MemberPage, Table};
use crate::earlier_names::EARLIER_NAMES_BYTES_MAX;
use crate::fingerprint::FingerprintKey;
use crate::{EarlierNames, Key, Name, Sample};

pub(crate) use self::members::Seat;

/// With members of fewer pages in all, those of 8 GiB, a member leaves within milliseconds.
const FEW_PAGES: u64 = 1 << 21;

/// A VM's RAM, to be copied from. Pages are numbered over all its blocks, in any way that the
/// caller of [`Index::join`] chooses.
pub trait Holder: Send + Sync {
    /// Copies a page of [`PAGE_BYTES`]. False if it can't any more.
    fn read(&self, page: u64, into: &mut [u8]) -> bool;

    /// Copies pages in order until one can't be copied. Returns how many were.
    fn read_many(&self, pages: &[u64], into: &mut [u8]) -> usize {
        let mut done = 0;
        for (page, into) in pages.iter().zip(into.chunks_exact_mut(PAGE_BYTES)) {
            if !self.read(*page, into) {
                break;
            }
            done += 1;
        }
        done
    }

    /// Marks which of the pages from `first` on, one for each of `present`, have memory behind
    /// them. The others have a file's content, or none; reading them might give them memory.
    fn present(&self, first: u64, present: &mut [bool]) {
        let _ = first;
        present.fill(true);
    }
}

/// The content of this host, by name.
pub struct Index {
    table: Table,
    seats: Seats,
    living: Living,
    numbers: Arc<Numbers>,
    /// The table does not grow for more pages than this.
    pages_max: u64,
    /// How many pages the members have.
    covered: AtomicU64,
    /// The key of content that VMs of other hosts may have, too.
    common: OnceLock<Key>,
    /// None if the system had no random bytes for it: then no earlier names are kept.
    fingerprint_key: Option<Arc<FingerprintKey>>,
    /// For the earlier names of all members.
    earlier_names: Arc<Reserve>,
}

impl Index {
    /// An index for a host with up to `pages_max` pages of RAM. It grows as members join.
    #[must_use]
    pub fn new(pages_max: u64) -> Arc<Self> {
        Arc::new(Self {
            table: Table::new(),
            seats: Seats::new(),
            living: Living::default(),
            numbers: Numbers::new(),
            pages_max,
            covered: AtomicU64::new(0),
            common: OnceLock::new(),
            fingerprint_key: FingerprintKey::draw().ok().map(Arc::from),
            earlier_names: Reserve::new(EARLIER_NAMES_BYTES_MAX),
        })
    }

    /// Sets the key of the domain that VMs of all hosts belong to, unless they have one of their
    /// own. Only the first call counts.
    pub fn set_common(&self, key: Key) {
        let _ = self.common.set(key);
    }

    /// Adds a VM with so many pages, whose content is found with `key`, until the guard is
    /// dropped. None if there are 4095 members already.
    #[must_use = "the member leaves when this is dropped"]
    pub fn join(self: &Arc<Self>, holder: Arc<dyn Holder>, key: Key, pages: u64) -> Option<Member> {
        let number = self.numbers.take(|| self.table.sweep(&self.living))?;
        let fingerprint_key = self.fingerprint_key.clone();
        let earlier_names = EarlierNames::new(fingerprint_key, pages, &self.earlier_names);
        let numbers = Arc::clone(&self.numbers);
        let seat = Arc::new(Seat::new(number, holder, key, pages, earlier_names, numbers));
        self.covered.fetch_add(seat.pages(), Relaxed);
        self.fit();
        self.seats.set(number, Some(Arc::clone(&seat)));
        self.living.set(number, true);
        Some(Member { index: Arc::clone(self), seat: Some(seat) })
    }

    /// Fits the table to the current members.
    fn fit(&self) {
        self.table.fit(|| self.covered.load(Relaxed).min(self.pages_max), &self.living);
    }

    /// Looks for the content of each of `names` and copies it to its place in `into`. `found`
    /// tells for each name whether it was found; the number of these is returned. The rest of
    /// `into` is undefined.
    ///
    /// # Panics
    /// If `into` does not have one page for each name.
    pub fn find(&self, names: &[Name], key: &Key, into: &mut [u8], found: &mut Vec<bool>) -> usize {
        assert_eq!(into.len(), names.len() * PAGE_BYTES, "a page for each name");
        found.clear();
        found.resize(names.len(), false);
        let batches = names.chunks(BATCH_PAGES).zip(into.chunks_mut(BATCH_PAGES * PAGE_BYTES));
        for ((names, into), found) in batches.zip(found.chunks_mut(BATCH_PAGES)) {
            self.find_batch(names, key, into, found);
        }
        found.iter().filter(|found| **found).count()
    }

    /// Whether a member seems to have the content; nothing is read.
    #[must_use]
    pub fn has(&self, name: &Name) -> bool {
        self.table.places(Hint::of(name), &self.living).next().is_some()
    }

    /// The current members.
    pub(crate) fn seats(&self) -> impl Iterator<Item = Arc<Seat>> {
        self.living.all().filter_map(|member| self.seats.of(member))
    }

    /// Whether another VM is in this member's domain, as far as is known here.
    pub(crate) fn has_others_like(&self, seat: &Seat) -> bool {
        let is_alike = |other: Arc<Seat>| other.number != seat.number && other.key == seat.key;
        self.common.get() == Some(&seat.key) || self.seats().any(is_alike)
    }

    /// Notes the pages' current names. `changed` is called for those that had another name, or
    /// none.
    pub(crate) fn note(&self, seat: &Seat, named: &[(u64, Name)], mut changed: impl FnMut(Name)) {
        // A member that has left can't be found, but should not fill buckets either.
        if !self.living.has(seat.number) {
            return;
        }
        for (page, name) in named {
            let hint = Hint::of(name);
            let Some((page, before)) = seat.replace(*page, Some(hint)) else { continue };
            let place = MemberPage { member: seat.number, page };
            if let Some(before) = before.filter(|before| *before != hint) {
                self.table.take(before, place);
            }
            if before != Some(hint) {
                changed(*name);
            }
            self.table.put(hint, place, &self.living);
        }
    }

    /// Notes that the page has no content that is worth a name.
    pub(crate) fn forget(&self, seat: &Seat, page: u64) {
        let Some((page, Some(before))) = seat.replace(page, None) else { return };
        self.table.take(before, MemberPage { member: seat.number, page });
    }

    fn find_batch(&self, names: &[Name], key: &Key, into: &mut [u8], found: &mut [bool]) {
        let mut places = [None; BATCH_PAGES];
        for (place, name) in places.iter_mut().zip(names) {
            *place = self.table.places(Hint::of(name), &self.living).next();
        }
        let mut at = 0;
        while at < names.len() {
            // Adjacent names of one member are one read.
            let member = |place: &Option<MemberPage>| place.map(|place| place.member);
            let same = |place: &&Option<MemberPage>| member(place) == member(&places[at]);
            let run = at..at + places[at..names.len()].iter().take_while(same).count();
            let bytes = run.start * PAGE_BYTES..run.end * PAGE_BYTES;
            at = run.end;
            let (names, places) = (&names[run.clone()], &places[run.clone()]);
            self.find_run(names, places, key, &mut into[bytes], &mut found[run]);
        }
    }

    /// Finds names at places of one member, or else anywhere.
    fn find_run(
        &self,
        names: &[Name],
        places: &[Option<MemberPage>],
        key: &Key,
        into: &mut [u8],
        found: &mut [bool],
    ) {
        let Some(Some(MemberPage { member, .. })) = places.first() else { return };
        let read = self.seats.of(*member).filter(|seat| seat.key == *key).map_or(0, |seat| {
            let mut pages = [0; BATCH_PAGES];
            for (page, place) in pages.iter_mut().zip(places.iter().flatten()) {
                *page = u64::from(place.page);
            }
            seat.holder.read_many(&pages[..places.len()], into)
        });
        let each = names.iter().zip(places.iter().flatten());
        let each = each.zip(into.chunks_exact_mut(PAGE_BYTES)).zip(found).enumerate();
        for (nth, (((name, place), into), found)) in each {
            *found = nth < read && self.is_right(name, *place, key, into)
                || self.find_one(name, key, into);
        }
    }

    /// Finds a name at any of its places.
    fn find_one(&self, name: &Name, key: &Key, into: &mut [u8]) -> bool {
        for place in self.table.places(Hint::of(name), &self.living) {
            let Some(seat) = self.seats.of(place.member).filter(|seat| seat.key == *key) else {
                continue;
            };
            if !seat.holder.read(u64::from(place.page), into) {
                self.table.take(Hint::of(name), place);
            } else if self.is_right(name, place, key, into) {
                return true;
            }
        }
        false
    }

    /// Whether `copy`, made of `place`, has this name. A wrong entry is removed, unless it is
    /// right for another name with the same hint.
    fn is_right(&self, name: &Name, place: MemberPage, key: &Key, copy: &[u8]) -> bool {
        let copied = key.name(copy);
        if copied == *name {
            return true;
        }
        if Hint::of(&copied) != Hint::of(name) {
            self.table.take(Hint::of(name), place);
        }
        false
    }
}

/// How much of a member is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scanned {
    /// How many times a scanner has scanned all of its pages.
    pub rounds: u64,
    /// How many pages have a name: those that were noted, and not forgotten.
    pub named: u64,
}

/// A VM's membership in the index. When it is dropped, all its entries become invalid at once. If
/// the index is large, another thread drops its holder, which may unmap a terabyte, and makes the
/// table smaller, if it covers less than half of what it did: what is left of it is written once.
pub struct Member {
    index: Arc<Index>,
    /// None once it leaves.
    seat: Option<Arc<Seat>>,
}

impl Member {
    fn seat(&self) -> &Seat {
        self.seat.as_deref().expect("it has not left")
    }

    /// Notes the pages' current names.
    pub fn note(&self, named: &[(u64, Name)]) {
        self.index.note(self.seat(), named, |_| {});
    }

    /// The names that a scanner made of this member's pages.
    #[must_use]
    pub fn earlier_names(&self) -> Arc<EarlierNames> {
        Arc::clone(&self.seat().earlier_names)
    }

    /// A sample of this member's known content: one in `one_in`.
    #[must_use]
    pub fn sample(&self, one_in: u32) -> Sample {
        Sample::of(self.seat().hints(), one_in)
    }

    /// Whether any page of this member has a name. May search the notes of all pages.
    #[must_use]
    pub fn has_names(&self) -> bool {
        self.seat().hints().next().is_some()
    }

    /// How much of this member is known. It counts the notes of all pages, so do not call it for
    /// each batch.
    #[must_use]
    pub fn scanned(&self) -> Scanned {
        self.seat().scanned()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let Some(seat) = self.seat.take() else { return };
        self.index.living.set(seat.number, false);
        self.index.seats.set(seat.number, None);
        let before = self.index.covered.fetch_sub(seat.pages(), Relaxed);
        if before < FEW_PAGES {
            return self.index.fit();
        }
        let index = Arc::clone(&self.index);
        let leave = move || {
            index.fit();
            drop(seat);
        };
        // If no thread can be started, the table keeps its size until another member leaves.
        let _ = thread::Builder::new().name("leave".to_owned()).spawn(leave);
    }
}

#[cfg(test)]
mod tests;
