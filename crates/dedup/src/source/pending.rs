//! Pages whose names the destination has, and whose content it waits for from
//! elsewhere.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use page::BATCH_PAGES;

use super::reread::RereadPages;

/// Batches that were answered late before they were answered at all: on another
/// connection, so they may overtake each other.
const EARLY_MAX: usize = 4096;

/// By the ticket of the batch they are of.
#[derive(Debug, Default)]
pub(super) struct Pending {
    waiting: HashMap<u32, Waiting>,
    early: HashMap<u32, Early>,
    /// Nothing is waited for any more...
    has_given_up: bool,
    /// ... and what is said of these means nothing.
    given_up: HashSet<u32>,
    /// Batches that are asked for once more, by another ticket: what is said of
    /// the first one means nothing any more.
    void: usize,
    bytes: u64,
}

#[derive(Debug)]
struct Waiting {
    reread: RereadPages,
    bits: u128,
}

/// What was said of a batch too early.
#[derive(Debug, Default)]
struct Early {
    wanted: Vec<u8>,
    /// Whether that is all.
    is_over: bool,
}

/// What became of pages that were waited for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Resolved {
    /// Bytes of those that are placed.
    pub(super) placed_bytes: u64,
    /// Those that are wanted after all.
    pub(super) wanted: Option<RereadPages>,
    /// Whether none of its batch is waited for any more.
    pub(super) is_over: bool,
}

/// The peer says what can't be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nonsense;

impl Pending {
    /// Bytes of the pages that are waited for.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The destination waits for pages of a batch, by their bits in it. If it has
    /// said already what became of them, that is the answer.
    pub(super) fn wait(
        &mut self,
        ticket: u32,
        reread: RereadPages,
        bits: u128,
    ) -> Result<Option<Resolved>, Nonsense> {
        let mut waiting = Waiting { reread, bits };
        let early = self.early.remove(&ticket);
        let resolved = match early {
            Some(Early { wanted, is_over: true }) => return waiting.end(&wanted).map(Some),
            Some(Early { wanted, .. }) => Some(waiting.give(&wanted)?),
            None => None,
        };
        if self.has_given_up {
            if !self.given_up.insert(ticket) {
                return Err(Nonsense);
            }
            let given = resolved.and_then(|resolved| resolved.wanted);
            return Ok(Some(waiting.give_up(given)));
        }
        match self.waiting.entry(ticket) {
            Entry::Vacant(place) => {
                self.bytes += waiting.reread.bytes();
                place.insert(waiting);
                Ok(resolved)
            }
            Entry::Occupied(_) => Err(Nonsense),
        }
    }

    /// Waits for nothing any more. All that was waited for is wanted now.
    pub(super) fn give_up(&mut self) -> Vec<Resolved> {
        self.has_given_up = true;
        self.bytes = 0;
        let waiting = std::mem::take(&mut self.waiting);
        self.given_up.extend(waiting.keys());
        waiting.into_values().map(|waiting| waiting.give_up(None)).collect()
    }

    /// A batch of names was not answered on its connection, and goes again.
    pub(super) fn void(&mut self) {
        self.void += 1;
    }

    /// These, by their places in the batch, are wanted. It waits for no others of
    /// it, unless there are `more`.
    pub(super) fn late(
        &mut self,
        ticket: u32,
        mut wanted: Vec<u8>,
        more: bool,
    ) -> Result<Option<Resolved>, Nonsense> {
        if more && let Some(waiting) = self.waiting.get_mut(&ticket) {
            let resolved = waiting.give(&wanted)?;
            self.bytes -= resolved.wanted.as_ref().map_or(0, RereadPages::bytes);
            return Ok(Some(resolved));
        }
        if self.given_up.contains(&ticket) {
            if !more {
                self.given_up.remove(&ticket);
            }
            return Ok(None);
        }
        if let Some(waiting) = self.waiting.remove(&ticket) {
            self.bytes -= waiting.reread.bytes();
            return waiting.end(&wanted).map(Some);
        }
        let room = EARLY_MAX + self.void;
        let known = self.early.len();
        match self.early.entry(ticket) {
            Entry::Occupied(mut early) if !early.get().is_over => {
                let early = early.get_mut();
                early.wanted.append(&mut wanted);
                early.is_over = !more;
                if early.wanted.len() > BATCH_PAGES { Err(Nonsense) } else { Ok(None) }
            }
            Entry::Vacant(place) if known < room && wanted.len() <= BATCH_PAGES => {
                place.insert(Early { wanted, is_over: !more });
                Ok(None)
            }
            _ => Err(Nonsense),
        }
    }
}

impl Waiting {
    /// These are wanted; the others are still waited for.
    fn give(&mut self, wanted: &[u8]) -> Result<Resolved, Nonsense> {
        let given = self.reread.take(&mut self.bits, wanted).ok_or(Nonsense)?;
        Ok(Resolved { placed_bytes: 0, wanted: filled(given), is_over: false })
    }

    /// All of it is wanted, what is `given` already besides.
    fn give_up(self, given: Option<RereadPages>) -> Resolved {
        let mut all = self.reread;
        if let Some(given) = given {
            all.pages.extend(given.pages);
        }
        Resolved { placed_bytes: 0, wanted: filled(all), is_over: true }
    }

    /// These are wanted; the others are placed.
    fn end(mut self, wanted: &[u8]) -> Result<Resolved, Nonsense> {
        let given = self.reread.take(&mut self.bits, wanted).ok_or(Nonsense)?;
        let placed_bytes = self.reread.bytes();
        Ok(Resolved { placed_bytes, wanted: filled(given), is_over: true })
    }
}

fn filled(reread: RereadPages) -> Option<RereadPages> {
    Some(reread).filter(|reread| reread.bytes() > 0)
}

#[cfg(test)]
mod tests {
    use page::{BlockId, Epoch, PageIndex};

    use super::*;

    fn reread(pages: &[u32]) -> RereadPages {
        let pages = pages.iter().copied().map(PageIndex).collect();
        RereadPages::new(BlockId(0), Epoch(1), pages)
    }

    #[test]
    fn whichever_answer_comes_first() {
        let expected = Resolved { placed_bytes: 4096, wanted: Some(reread(&[7])), is_over: true };
        let mut pending = Pending::default();
        assert_eq!(pending.wait(1, reread(&[5, 7]), 0b1010), Ok(None));
        assert_eq!(pending.bytes(), 8192);
        assert_eq!(pending.late(1, vec![3], false), Ok(Some(expected)));
        assert_eq!(pending.bytes(), 0);
        let expected = Resolved { placed_bytes: 8192, wanted: None, is_over: true };
        assert_eq!(pending.late(2, vec![], false), Ok(None));
        assert_eq!(pending.wait(2, reread(&[5, 7]), 0b1010), Ok(Some(expected)));
    }

    #[test]
    fn some_are_wanted_while_others_still_wait() {
        let some = |pages: &[u32]| Resolved {
            placed_bytes: 0,
            wanted: Some(reread(pages)),
            is_over: false,
        };
        let last = |pages: &[u32], placed_bytes| Resolved {
            placed_bytes,
            wanted: filled(reread(pages)),
            is_over: true,
        };
        // In the first batch after it is known that they wait, in the second before,
        // in the third in between.
        let pages = || reread(&[3, 4, 5, 6]);
        let mut pending = Pending::default();
        assert_eq!(pending.wait(1, pages(), 0b1111_0000), Ok(None));
        assert_eq!(pending.late(1, vec![6, 5], true), Ok(Some(some(&[5, 4]))));
        assert_eq!(pending.bytes(), 8192);
        assert_eq!(pending.late(1, vec![5], true), Err(Nonsense), "it was given");
        assert_eq!(pending.late(1, vec![4], false), Ok(Some(last(&[3], 4096))));
        assert_eq!(pending.late(2, vec![7], true), Ok(None));
        assert_eq!(pending.late(2, vec![4], true), Ok(None));
        assert_eq!(pending.late(2, vec![5], false), Ok(None));
        assert_eq!(pending.wait(2, pages(), 0b1111_0000), Ok(Some(last(&[6, 3, 4], 4096))));
        assert_eq!(pending.late(3, vec![7], true), Ok(None));
        assert_eq!(pending.wait(3, pages(), 0b1111_0000), Ok(Some(some(&[6]))));
        assert_eq!(pending.bytes(), 3 * 4096);
        assert_eq!(pending.late(3, vec![], false), Ok(Some(last(&[], 3 * 4096))));
        assert_eq!(pending.bytes(), 0);
    }

    #[test]
    fn who_has_given_up_wants_all_of_it_and_hears_of_it_no_more() {
        let all = |pages: &[u32]| Resolved {
            placed_bytes: 0,
            wanted: filled(reread(pages)),
            is_over: true,
        };
        let pages = || reread(&[3, 4, 5]);
        let mut pending = Pending::default();
        assert_eq!(pending.wait(1, pages(), 0b111), Ok(None));
        assert_eq!(pending.wait(2, pages(), 0b111), Ok(None));
        assert!(pending.late(1, vec![0], true).unwrap().is_some());
        assert_eq!(pending.late(3, vec![1], true), Ok(None));
        let mut given_up = pending.give_up();
        given_up.sort_by_key(|resolved| resolved.wanted.as_ref().map(|all| all.pages.len()));
        assert_eq!(given_up, [all(&[4, 5]), all(&[3, 4, 5])]);
        assert_eq!(pending.bytes(), 0);
        // Known after that, with a part of it named before.
        assert_eq!(pending.wait(3, pages(), 0b111), Ok(Some(all(&[3, 5, 4]))));
        for ticket in [1, 2, 3] {
            assert_eq!(pending.late(ticket, vec![2], true), Ok(None));
            assert_eq!(pending.late(ticket, vec![], false), Ok(None));
        }
        assert_eq!(pending.bytes(), 0);
        assert_eq!(pending.wait(4, pages(), 0b111), Ok(Some(all(&[3, 4, 5]))));
        assert_eq!(pending.wait(4, pages(), 0b111), Err(Nonsense));
    }

    #[test]
    fn what_can_not_be_is_refused_and_bounded() {
        let mut pending = Pending::default();
        pending.wait(1, reread(&[5]), 0b10).unwrap();
        assert_eq!(pending.wait(1, reread(&[5]), 0b10), Err(Nonsense));
        assert_eq!(pending.late(1, vec![0], false), Err(Nonsense), "it was placed before");
        assert_eq!(pending.late(2, vec![], false), Ok(None));
        assert_eq!(pending.late(2, vec![], false), Err(Nonsense));
        // One page twice.
        pending.wait(3, reread(&[5]), 0b10).unwrap();
        assert_eq!(pending.late(3, vec![1, 1], false), Err(Nonsense));
        let refused =
            (10..).take(2 * EARLY_MAX).find(|ticket| pending.late(*ticket, vec![], false).is_err());
        assert!(refused.is_some());
    }
}
