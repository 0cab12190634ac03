//! Places for what callers hold for long: so many in all, and fewer for each caller.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// The places, and who has how many.
pub(crate) struct Shares {
    all_max: usize,
    of_one_max: usize,
    /// By the caller's name; callers without a place are removed.
    taken: Mutex<HashMap<String, usize>>,
}

/// A place, which is free again when this is dropped.
pub(crate) struct Share {
    shares: Arc<Shares>,
    name: String,
}

impl Shares {
    pub(crate) fn new(all_max: usize, of_one_max: usize) -> Arc<Self> {
        Arc::new(Self { all_max, of_one_max, taken: Mutex::default() })
    }

    /// Takes a place for a caller; none if all are taken, or all that one caller may have.
    pub(crate) fn take(self: &Arc<Self>, name: &str) -> Option<Share> {
        let mut taken = self.taken.lock();
        let all: usize = taken.values().sum();
        let of_one = taken.get(name).copied().unwrap_or_default();
        if all >= self.all_max || of_one >= self.of_one_max {
            return None;
        }
        taken.insert(name.to_owned(), of_one + 1);
        Some(Share { shares: Arc::clone(self), name: name.to_owned() })
    }

    /// How many places are free.
    #[cfg(test)]
    pub(crate) fn free(&self) -> usize {
        self.all_max - self.taken.lock().values().sum::<usize>()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.shares.taken.lock();
        if let Some(count) = taken.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_caller_takes_all_places() {
        let shares = Shares::new(5, 3);
        let mut anns: Vec<Share> = (0..3).map(|_| shares.take("ann").unwrap()).collect();
        assert!(shares.take("ann").is_none());
        let bobs: Vec<Share> = (0..2).map(|_| shares.take("bob").unwrap()).collect();
        assert!(shares.take("bob").is_none(), "all are taken");
        anns.pop();
        anns.push(shares.take("ann").unwrap());
        drop((anns, bobs));
        assert_eq!((shares.free(), shares.taken.lock().len()), (5, 0));
    }
}
