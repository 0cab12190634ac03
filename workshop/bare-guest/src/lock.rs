//! A lock between two CPUs.
#![expect(unsafe_code, reason = "a lock is what makes the sharing sound")]

use core::cell::UnsafeCell;
use core::hint;
use core::sync::atomic::{AtomicBool, Ordering};

/// A value that one CPU uses at a time. The other one spins, for as long as a few pages take.
#[derive(Debug)]
pub struct Lock<T> {
    is_held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: only the holder of the lock uses the value, so one CPU at a time does, and the value may
// be sent from one to the other.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Releases the lock, also when the code that uses the value panics.
struct Held<'l>(&'l AtomicBool);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T> Lock<T> {
    /// A lock around this value.
    #[must_use]
    pub const fn new(value: T) -> Self {
        Self { is_held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Calls `act` with the value while the other CPU can't use it. A nested call would wait for
    /// ever.
    pub fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        while self.is_held.swap(true, Ordering::Acquire) {
            hint::spin_loop();
        }
        let _held = Held(&self.is_held);
        // SAFETY: the lock is held until `act` has returned, and excludes all other accesses.
        act(unsafe { &mut *self.value.get() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let count = Lock::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        count.with(|count| *count = std::hint::black_box(*count) + 1);
                    }
                });
            }
        });
        assert_eq!(count.with(|count| *count), 40_000);
    }
}
