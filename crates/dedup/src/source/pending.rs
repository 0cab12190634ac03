//! Pages whose names the destination has, and whose content it awaits from another provider.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use page::{BATCH_PAGES, PageSet};

use super::reread::RereadPages;

/// Awaited pages, by their batch's ticket.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// The last ticket.
    last: u32,
    /// Batches that have a ticket, and are neither answered nor void.
    unanswered: usize,
    waiting: HashMap<u32, Waiting>,
    /// Late reports on batches that have no answer yet. Answers and reports come by different
    /// connections, so one may overtake the other. A batch that queries a slow directory holds up
    /// the answers to all after it.
    early: HashMap<u32, Early>,
    /// Waiting has ended...
    has_given_up: bool,
    /// ... and reports on these batches mean nothing.
    given_up: HashSet<u32>,
    /// Batches that were queried again with another ticket: reports on the first ticket mean
    /// nothing.
    void: usize,
    bytes: u64,
}

#[derive(Debug)]
struct Waiting {
    reread: RereadPages,
    /// Their places in the batch.
    set: PageSet,
}

/// A report on a batch that has no answer yet.
#[derive(Debug, Default)]
struct Early {
    wanted: Vec<u8>,
    /// Whether the report is complete.
    is_over: bool,
}

/// What happened to pages that were awaited.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Resolved {
    /// The bytes of pages that are placed.
    pub(super) placed_bytes: u64,
    /// The pages that are wanted after all.
    pub(super) wanted: Option<RereadPages>,
    /// Whether no page of the batch is awaited any more.
    pub(super) is_over: bool,
}

/// The peer's message is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nonsense;

impl Pending {
    /// The bytes of the pages that are awaited.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether all batches that have a ticket are answered, and no page of theirs is awaited.
    pub(super) fn is_settled(&self) -> bool {
        self.unanswered == 0 && self.bytes == 0
    }

    /// A new batch's ticket.
    pub(super) fn ticket(&mut self) -> u32 {
        self.unanswered += 1;
        self.last = self.last.wrapping_add(1);
        self.last
    }

    /// A batch that has a ticket is answered.
    pub(super) fn answered(&mut self) {
        self.unanswered -= 1;
    }

    /// The destination awaits pages of a batch, at the places in `set`. If it has reported on
    /// them already, that is the result.
    pub(super) fn wait(
        &mut self,
        ticket: u32,
        reread: RereadPages,
        set: PageSet,
    ) -> Result<Option<Resolved>, Nonsense> {
        let mut waiting = Waiting { reread, set };
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

    /// Ends all waiting. All awaited pages are wanted now.
    pub(super) fn give_up(&mut self) -> Vec<Resolved> {
        self.has_given_up = true;
        self.bytes = 0;
        let waiting = std::mem::take(&mut self.waiting);
        self.given_up.extend(waiting.keys());
        waiting.into_values().map(|waiting| waiting.give_up(None)).collect()
    }

    /// A batch was not answered on its connection, and is queried again.
    pub(super) fn void(&mut self) {
        self.unanswered -= 1;
        self.void += 1;
    }

    /// These pages, by their indices in the batch, are wanted. The others are placed, or still
    /// awaited if there are `more`.
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
        let room = self.unanswered + self.void;
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
    /// These are wanted; the others are still awaited.
    fn give(&mut self, wanted: &[u8]) -> Result<Resolved, Nonsense> {
        let given = self.reread.take(&mut self.set, wanted).ok_or(Nonsense)?;
        Ok(Resolved { placed_bytes: 0, wanted: filled(given), is_over: false })
    }

    /// All of it is wanted, in addition to what is `given` already.
    fn give_up(self, given: Option<RereadPages>) -> Resolved {
        let mut all = self.reread;
        if let Some(given) = given {
            all.pages.extend(given.pages);
        }
        Resolved { placed_bytes: 0, wanted: filled(all), is_over: true }
    }

    /// These are wanted; the others are placed.
    fn end(mut self, wanted: &[u8]) -> Result<Resolved, Nonsense> {
        let given = self.reread.take(&mut self.set, wanted).ok_or(Nonsense)?;
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

    fn set(bits: u128) -> PageSet {
        PageSet::from_bits(bits)
    }

    fn reread(pages: &[u32]) -> RereadPages {
        let pages = pages.iter().copied().map(PageIndex).collect();
        RereadPages::new(BlockId(0), Epoch(1), pages)
    }

    /// The state after this many tickets were issued.
    fn issued(tickets: u32) -> Pending {
        let mut pending = Pending::default();
        for ticket in 1..=tickets {
            assert_eq!(pending.ticket(), ticket);
        }
        pending
    }

    #[test]
    fn whichever_answer_comes_first() {
        let expected = Resolved { placed_bytes: 4096, wanted: Some(reread(&[7])), is_over: true };
        let mut pending = issued(2);
        assert_eq!(pending.wait(1, reread(&[5, 7]), set(0b1010)), Ok(None));
        assert_eq!(pending.bytes(), 8192);
        assert_eq!(pending.late(1, vec![3], false), Ok(Some(expected)));
        assert_eq!(pending.bytes(), 0);
        let expected = Resolved { placed_bytes: 8192, wanted: None, is_over: true };
        assert_eq!(pending.late(2, vec![], false), Ok(None));
        assert_eq!(pending.wait(2, reread(&[5, 7]), set(0b1010)), Ok(Some(expected)));
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
        // The reports come after the answer for the first batch, before it for the second, and
        // around it for the third.
        let pages = || reread(&[3, 4, 5, 6]);
        let mut pending = issued(3);
        assert_eq!(pending.wait(1, pages(), set(0b1111_0000)), Ok(None));
        assert_eq!(pending.late(1, vec![6, 5], true), Ok(Some(some(&[5, 4]))));
        assert_eq!(pending.bytes(), 8192);
        assert_eq!(pending.late(1, vec![5], true), Err(Nonsense), "it was given");
        assert_eq!(pending.late(1, vec![4], false), Ok(Some(last(&[3], 4096))));
        assert_eq!(pending.late(2, vec![7], true), Ok(None));
        assert_eq!(pending.late(2, vec![4], true), Ok(None));
        assert_eq!(pending.late(2, vec![5], false), Ok(None));
        assert_eq!(pending.wait(2, pages(), set(0b1111_0000)), Ok(Some(last(&[6, 3, 4], 4096))));
        assert_eq!(pending.late(3, vec![7], true), Ok(None));
        assert_eq!(pending.wait(3, pages(), set(0b1111_0000)), Ok(Some(some(&[6]))));
        assert_eq!(pending.bytes(), 3 * 4096);
        assert_eq!(pending.late(3, vec![], false), Ok(Some(last(&[], 3 * 4096))));
        assert_eq!(pending.bytes(), 0);
    }

    #[test]
    fn after_giving_up_all_pages_are_wanted_and_reports_ignored() {
        let all = |pages: &[u32]| Resolved {
            placed_bytes: 0,
            wanted: filled(reread(pages)),
            is_over: true,
        };
        let pages = || reread(&[3, 4, 5]);
        let mut pending = issued(4);
        assert_eq!(pending.wait(1, pages(), set(0b111)), Ok(None));
        assert_eq!(pending.wait(2, pages(), set(0b111)), Ok(None));
        assert!(pending.late(1, vec![0], true).unwrap().is_some());
        assert_eq!(pending.late(3, vec![1], true), Ok(None));
        let mut given_up = pending.give_up();
        given_up.sort_by_key(|resolved| resolved.wanted.as_ref().map(|all| all.pages.len()));
        assert_eq!(given_up, [all(&[4, 5]), all(&[3, 4, 5])]);
        assert_eq!(pending.bytes(), 0);
        // Answered after that, with a partial report before.
        assert_eq!(pending.wait(3, pages(), set(0b111)), Ok(Some(all(&[3, 5, 4]))));
        for ticket in [1, 2, 3] {
            assert_eq!(pending.late(ticket, vec![2], true), Ok(None));
            assert_eq!(pending.late(ticket, vec![], false), Ok(None));
        }
        assert_eq!(pending.bytes(), 0);
        assert_eq!(pending.wait(4, pages(), set(0b111)), Ok(Some(all(&[3, 4, 5]))));
        assert_eq!(pending.wait(4, pages(), set(0b111)), Err(Nonsense));
    }

    #[test]
    fn invalid_messages_are_refused() {
        let mut pending = issued(3);
        pending.wait(1, reread(&[5]), set(0b10)).unwrap();
        assert_eq!(pending.wait(1, reread(&[5]), set(0b10)), Err(Nonsense));
        assert_eq!(pending.late(1, vec![0], false), Err(Nonsense), "it was placed before");
        assert_eq!(pending.late(2, vec![], false), Ok(None));
        assert_eq!(pending.late(2, vec![], false), Err(Nonsense));
        // The same page twice.
        pending.wait(3, reread(&[5]), set(0b10)).unwrap();
        assert_eq!(pending.late(3, vec![1, 1], false), Err(Nonsense));
    }

    /// On a lane, answers keep their order: a batch that queries a slow directory holds up all
    /// answers after it, but not later reports on them.
    #[test]
    fn only_open_tickets_may_have_reports_before_their_answers() {
        const TICKETS: u32 = 10_000;
        let mut pending = issued(TICKETS);
        for ticket in 1..=TICKETS {
            assert_eq!(pending.late(ticket, vec![], false), Ok(None));
        }
        assert_eq!(pending.late(TICKETS + 1, vec![], false), Err(Nonsense));
        for ticket in 1..=TICKETS {
            pending.answered();
            assert!(pending.wait(ticket, reread(&[5]), set(0b10)).unwrap().is_some());
        }
        assert_eq!(pending.late(1, vec![], false), Err(Nonsense), "it is over");
        // A batch whose answer was lost with its connection.
        assert_eq!(pending.ticket(), TICKETS + 1);
        pending.void();
        assert_eq!(pending.late(TICKETS + 1, vec![], false), Ok(None));
    }
}
