//! The device state of VMs that move, where it is kept: at a destination until all pages are placed,
//! at a source that carries a migration while the destination compares them.
//!
//! Each VM has room for some of it. What is beyond that comes from a budget that all of them share:
//! it would otherwise be as much as there are migrations, and a VM that has none yet can be sent
//! with it.

use std::sync::Arc;

use page::{Borrowed, Reserve};

/// The most device state of one VM, and of all of them beyond what each has by itself: the devices
/// of a large VM without VFIO have some MiB.
pub(crate) const TAILS_BYTES_MAX: usize = 256 << 20;
/// What each VM has by itself, about as much as its smallest part of the pool.
const OWN_BYTES: usize = 2 << 20;
/// Memory is obtained in steps of this size: a vector that doubles may take twice what is counted.
const STEP_BYTES: usize = 1 << 20;

/// Why a VM's device state is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TailError {
    #[error("the VM's device state is larger than {} MiB", max_bytes >> 20)]
    TooLarge { max_bytes: usize },
    #[error(
        "the device state of VMs that arrive there takes all of the {} MiB that it can: move the \
         VM again when they have arrived",
        max_bytes >> 20
    )]
    Full { max_bytes: usize },
    #[error("there is no memory for the VM's device state")]
    NoMemory,
}

/// The device state of one VM.
#[derive(Debug)]
pub(crate) struct Tail {
    // Freed before others are promised its memory.
    bytes: Vec<u8>,
    memory: Borrowed,
    max_bytes: usize,
}

impl Tail {
    /// An empty one.
    pub(crate) fn new(reserve: &Arc<Reserve>) -> Self {
        let memory = Borrowed::new(reserve, OWN_BYTES);
        Self { bytes: Vec::new(), memory, max_bytes: reserve.bytes() }
    }

    /// Appends a piece.
    pub(crate) fn push(&mut self, piece: &[u8]) -> Result<(), TailError> {
        let (bytes, max_bytes) = (self.bytes.len() + piece.len(), self.max_bytes);
        if bytes > max_bytes {
            return Err(TailError::TooLarge { max_bytes });
        }
        if bytes > self.bytes.capacity() {
            let room = bytes.next_multiple_of(STEP_BYTES);
            if !self.memory.grow_to(room) {
                return Err(TailError::Full { max_bytes });
            }
            let more = room - self.bytes.len();
            self.bytes.try_reserve_exact(more).map_err(|_| TailError::NoMemory)?;
        }
        self.bytes.extend_from_slice(piece);
        Ok(())
    }

    /// What was appended.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static PIECE: [u8; 1 << 20] = [7; 1 << 20];

    /// Appends pieces until that is refused.
    fn fill(tail: &mut Tail) -> TailError {
        loop {
            if let Err(error) = tail.push(&PIECE) {
                return error;
            }
        }
    }

    #[test]
    fn all_tails_together_have_a_limit_and_each_has_its_own_part() {
        let max_bytes = 16 << 20;
        let reserve = Reserve::new(max_bytes);
        let mut tails: Vec<Tail> = (0..9).map(|_| Tail::new(&reserve)).collect();
        assert_eq!(fill(&mut tails[0]), TailError::TooLarge { max_bytes });
        let full = TailError::Full { max_bytes };
        assert!(tails[1..].iter_mut().all(|tail| fill(tail) == full));
        let kept: usize = tails.iter().map(|tail| tail.bytes().len()).sum();
        assert_eq!(kept, max_bytes + 9 * OWN_BYTES);
        assert!(tails.iter().all(|tail| tail.bytes().len() >= OWN_BYTES));

        // What ends leaves its room to others.
        drop(tails.remove(0));
        tails[0].push(&PIECE).unwrap();
        drop(tails);
        assert_eq!(reserve.borrowed_bytes(), 0);
    }

    #[test]
    fn no_more_memory_is_used_than_is_counted() {
        let reserve = Reserve::new(TAILS_BYTES_MAX);
        let mut tail = Tail::new(&reserve);
        for _ in 0..5_000_000 {
            tail.push(&[1]).unwrap();
        }
        assert_eq!(tail.bytes().len(), 5_000_000);
        assert_eq!(tail.bytes.capacity(), tail.memory.bytes());
    }
}
