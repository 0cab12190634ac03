//! Pages whose names the destination has, and whose content it waits for from
//! elsewhere.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::namer::Unkept;

/// Batches that were answered late before they were answered at all: on another
/// connection, so they may overtake each other.
const EARLY_MAX: usize = 4096;

/// By the ticket of the batch they are of.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    waiting: HashMap<u32, Waiting>,
    early: HashMap<u32, Vec<u8>>,
    /// Batches that are asked for once more, by another ticket: what is said of
    /// the first one means nothing any more.
    void: usize,
    bytes: u64,
}

#[derive(Debug)]
struct Waiting {
    unkept: Unkept,
    bits: u128,
}

/// What became of pages that were waited for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Resolved {
    /// Bytes of those that are placed.
    pub(crate) placed_bytes: u64,
    /// Those that are wanted after all.
    pub(crate) wanted: Option<Unkept>,
}

/// The peer says what can't be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Nonsense;

impl Pending {
    /// Bytes of the pages that are waited for.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The destination waits for pages of a batch, by their bits in it. If it has
    /// said already what became of them, that is the answer.
    pub(crate) fn wait(
        &mut self,
        ticket: u32,
        unkept: Unkept,
        bits: u128,
    ) -> Result<Option<Resolved>, Nonsense> {
        let waiting = Waiting { unkept, bits };
        if let Some(wanted) = self.early.remove(&ticket) {
            return resolve(waiting, &wanted).map(Some);
        }
        match self.waiting.entry(ticket) {
            Entry::Vacant(place) => {
                self.bytes += waiting.unkept.bytes();
                place.insert(waiting);
                Ok(None)
            }
            Entry::Occupied(_) => Err(Nonsense),
        }
    }

    /// A batch of names was not answered on its connection, and goes again.
    pub(crate) fn void(&mut self) {
        self.void += 1;
    }

    /// It waits no more: these, by their places in the batch, are wanted.
    pub(crate) fn late(
        &mut self,
        ticket: u32,
        wanted: Vec<u8>,
    ) -> Result<Option<Resolved>, Nonsense> {
        if let Some(waiting) = self.waiting.remove(&ticket) {
            self.bytes -= waiting.unkept.bytes();
            return resolve(waiting, &wanted).map(Some);
        }
        if self.early.len() >= EARLY_MAX + self.void || self.early.insert(ticket, wanted).is_some()
        {
            return Err(Nonsense);
        }
        Ok(None)
    }
}

fn resolve(waiting: Waiting, wanted: &[u8]) -> Result<Resolved, Nonsense> {
    let Waiting { mut unkept, bits } = waiting;
    let all_bytes = unkept.bytes();
    unkept.keep(bits, wanted).ok_or(Nonsense)?;
    let placed_bytes = all_bytes.checked_sub(unkept.bytes()).ok_or(Nonsense)?;
    let wanted = Some(unkept).filter(|unkept| unkept.bytes() > 0);
    Ok(Resolved { placed_bytes, wanted })
}

#[cfg(test)]
mod tests {
    use page::{BlockId, Epoch, PageIndex};

    use super::*;

    fn unkept(pages: &[u32]) -> Unkept {
        let pages = pages.iter().copied().map(PageIndex).collect();
        Unkept { block: BlockId(0), epoch: Epoch(1), pages }
    }

    #[test]
    fn whichever_answer_comes_first() {
        let expected = Resolved { placed_bytes: 4096, wanted: Some(unkept(&[7])) };
        let mut pending = Pending::default();
        assert_eq!(pending.wait(1, unkept(&[5, 7]), 0b1010), Ok(None));
        assert_eq!(pending.bytes(), 8192);
        assert_eq!(pending.late(1, vec![3]), Ok(Some(expected)));
        assert_eq!(pending.bytes(), 0);
        let expected = Resolved { placed_bytes: 8192, wanted: None };
        assert_eq!(pending.late(2, vec![]), Ok(None));
        assert_eq!(pending.wait(2, unkept(&[5, 7]), 0b1010), Ok(Some(expected)));
    }

    #[test]
    fn what_can_not_be_is_refused_and_bounded() {
        let mut pending = Pending::default();
        pending.wait(1, unkept(&[5]), 0b10).unwrap();
        assert_eq!(pending.wait(1, unkept(&[5]), 0b10), Err(Nonsense));
        assert_eq!(pending.late(1, vec![0]), Err(Nonsense), "it was placed before");
        assert_eq!(pending.late(2, vec![]), Ok(None));
        assert_eq!(pending.late(2, vec![]), Err(Nonsense));
        // One page twice.
        pending.wait(3, unkept(&[5]), 0b10).unwrap();
        assert_eq!(pending.late(3, vec![1, 1]), Err(Nonsense));
        let refused =
            (10..).take(2 * EARLY_MAX).find(|ticket| pending.late(*ticket, vec![]).is_err());
        assert!(refused.is_some());
    }
}
