//! The device state of VMs that move, where it is kept: at a destination until all pages are placed,
//! at a source that carries a migration while the destination compares them.
//!
//! Each VM has room for some of it. What is beyond that comes from a budget that all of them share:
//! it would otherwise be as much as there are migrations, and a VM that has none yet can be sent
//! with it.

use std::sync::Arc;

use parking_lot::Mutex;

/// The most device state of one VM, and of all of them beyond what each has by itself: the devices
/// of a large VM without VFIO have some MiB.
const TAILS_BYTES_MAX: usize = 256 << 20;
/// What each VM has by itself, about as much as its smallest part of the pool.
const OWN_BYTES: usize = 2 << 20;
/// Memory is obtained in steps of this size: a vector that doubles may take twice what is counted.
const STEP_BYTES: usize = 1 << 20;

/// Memory for the device state of all VMs that arrive, or of all that leave.
#[derive(Debug)]
pub(crate) struct TailBudget {
    total_bytes: usize,
    left_bytes: Mutex<usize>,
}

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
    bytes: Vec<u8>,
    budget: Arc<TailBudget>,
    borrowed_bytes: usize,
}

impl Default for TailBudget {
    fn default() -> Self {
        Self::new(TAILS_BYTES_MAX)
    }
}

impl TailBudget {
    pub(crate) fn new(total_bytes: usize) -> Self {
        Self { total_bytes, left_bytes: Mutex::new(total_bytes) }
    }
}

impl Tail {
    /// An empty one.
    pub(crate) fn new(budget: &Arc<TailBudget>) -> Self {
        Self { bytes: Vec::new(), budget: Arc::clone(budget), borrowed_bytes: 0 }
    }

    /// Appends a piece.
    pub(crate) fn push(&mut self, piece: &[u8]) -> Result<(), TailError> {
        let (bytes, max_bytes) = (self.bytes.len() + piece.len(), self.budget.total_bytes);
        if bytes > max_bytes {
            return Err(TailError::TooLarge { max_bytes });
        }
        if bytes > self.bytes.capacity() {
            let room = bytes.next_multiple_of(STEP_BYTES);
            self.borrow(room.saturating_sub(OWN_BYTES))?;
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

    /// Has this many bytes of the budget.
    fn borrow(&mut self, bytes: usize) -> Result<(), TailError> {
        let more = bytes.saturating_sub(self.borrowed_bytes);
        let max_bytes = self.budget.total_bytes;
        let mut left = self.budget.left_bytes.lock();
        *left = left.checked_sub(more).ok_or(TailError::Full { max_bytes })?;
        self.borrowed_bytes += more;
        Ok(())
    }
}

#[cfg(test)]
impl TailBudget {
    /// What all tails have together, beyond each one's own part.
    pub(crate) fn borrowed_bytes(&self) -> usize {
        self.total_bytes - *self.left_bytes.lock()
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        // Before others are promised it.
        self.bytes = Vec::new();
        *self.budget.left_bytes.lock() += self.borrowed_bytes;
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
        let budget = Arc::new(TailBudget::new(max_bytes));
        let mut tails: Vec<Tail> = (0..9).map(|_| Tail::new(&budget)).collect();
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
        assert_eq!(budget.borrowed_bytes(), 0);
    }

    #[test]
    fn no_more_memory_is_used_than_is_counted() {
        let budget = Arc::default();
        let mut tail = Tail::new(&budget);
        for _ in 0..5_000_000 {
            tail.push(&[1]).unwrap();
        }
        assert_eq!(tail.bytes().len(), 5_000_000);
        assert_eq!(tail.bytes.capacity(), OWN_BYTES + tail.borrowed_bytes);
    }
}
