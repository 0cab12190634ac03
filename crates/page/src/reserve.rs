//! Memory that many parts of an agent share, and that none of them waits for.
//!
//! Each part has some by itself, enough to continue. What it uses beyond that it borrows, and where
//! nothing is left it does with less. Parts that can't do with less share a
//! [`Budget`](crate::Budget), and wait.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Bytes that can be borrowed.
#[derive(Debug)]
pub struct Reserve {
    total_bytes: usize,
    left_bytes: AtomicUsize,
}

/// What one part may use: its own bytes, and those that it has borrowed. Dropping it gives these
/// back.
#[derive(Debug)]
pub struct Borrowed {
    reserve: Arc<Reserve>,
    own_bytes: usize,
    borrowed_bytes: usize,
}

impl Reserve {
    /// A reserve of so many bytes.
    #[must_use]
    pub fn new(total_bytes: usize) -> Arc<Self> {
        Arc::new(Self { total_bytes, left_bytes: AtomicUsize::new(total_bytes) })
    }

    /// Bytes of the whole reserve.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.total_bytes
    }

    /// Bytes that are borrowed.
    #[must_use]
    pub fn borrowed_bytes(&self) -> usize {
        self.total_bytes - self.left_bytes.load(Relaxed)
    }

    fn take(&self, bytes: usize) -> bool {
        let less = |left: usize| left.checked_sub(bytes);
        self.left_bytes.fetch_update(Acquire, Relaxed, less).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.left_bytes.fetch_add(bytes, Release);
    }
}

impl Borrowed {
    /// Nothing is borrowed yet; `own_bytes` never need to be.
    #[must_use]
    pub fn new(reserve: &Arc<Reserve>, own_bytes: usize) -> Self {
        Self { reserve: Arc::clone(reserve), own_bytes, borrowed_bytes: 0 }
    }

    /// Bytes that may be used.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.own_bytes + self.borrowed_bytes
    }

    /// Borrows until `bytes` may be used. False, and nothing changes, if so much is not left.
    pub fn grow_to(&mut self, bytes: usize) -> bool {
        let more = bytes.saturating_sub(self.bytes());
        let grows = more == 0 || self.reserve.take(more);
        self.borrowed_bytes += if grows { more } else { 0 };
        grows
    }

    /// Gives back what is borrowed beyond `bytes`.
    pub fn shrink_to(&mut self, bytes: usize) {
        let less = self.bytes().saturating_sub(bytes).min(self.borrowed_bytes);
        self.borrowed_bytes -= less;
        if less > 0 {
            self.reserve.give_back(less);
        }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.reserve.give_back(self.borrowed_bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn each_has_its_own_and_all_together_no_more_than_there_is() {
        let reserve = Reserve::new(10);
        let [mut one, mut other] = [(); 2].map(|()| Borrowed::new(&reserve, 3));
        assert!(one.grow_to(3) && one.grow_to(11));
        assert_eq!((one.bytes(), reserve.borrowed_bytes()), (11, 8));
        assert!(!other.grow_to(6) && other.grow_to(5) && other.grow_to(2));
        assert_eq!((other.bytes(), reserve.borrowed_bytes()), (5, 10));
        one.shrink_to(9);
        assert!(other.grow_to(7));
        one.shrink_to(0);
        assert_eq!((one.bytes(), reserve.borrowed_bytes()), (3, 4));
        drop((one, other));
        assert_eq!((reserve.bytes(), reserve.borrowed_bytes()), (10, 0));
    }

    #[test]
    fn many_threads_borrow_no_more_than_there_is() {
        let reserve = Reserve::new(10);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let mut borrowed = Borrowed::new(&reserve, 0);
                        borrowed.grow_to(4);
                        assert!(reserve.borrowed_bytes() <= 10);
                    }
                });
            }
        });
        assert_eq!(reserve.borrowed_bytes(), 0);
    }
}
