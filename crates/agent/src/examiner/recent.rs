//! Facts that are collected once for all who ask within a second.
//!
//! To describe its VMs an agent queries all their QEMUs, and another host may ask for that at will.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long facts are given again.
const KEPT: Duration = Duration::from_secs(1);

/// What was collected last.
pub(super) struct Recent<T> {
    kept: Duration,
    last: Mutex<Option<(Instant, T)>>,
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self { kept: KEPT, last: Mutex::default() }
    }
}

impl<T: Clone> Recent<T> {
    /// What was collected within the last second, or else what `collect` returns. Callers that come
    /// meanwhile wait for the same.
    pub(super) fn get(&self, collect: impl FnOnce() -> T) -> T {
        let mut last = self.last.lock();
        if let Some((at, recent)) = &*last
            && at.elapsed() < self.kept
        {
            return recent.clone();
        }
        let collected = collect();
        *last = Some((Instant::now(), collected.clone()));
        collected
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::thread;

    use super::*;

    #[test]
    fn many_callers_cause_one_collection() {
        let count = AtomicUsize::new(0);
        let collect = || count.fetch_add(1, SeqCst);
        let recent = Recent { kept: Duration::from_secs(3600), ..Recent::default() };
        thread::scope(|scope| {
            let callers: Vec<_> = (0..20).map(|_| scope.spawn(|| recent.get(collect))).collect();
            assert!(callers.into_iter().all(|caller| caller.join().unwrap() == 0));
        });
        assert_eq!(count.load(SeqCst), 1);
        // What is too old is collected again.
        let recent = Recent { kept: Duration::ZERO, ..Recent::default() };
        assert_eq!([recent.get(collect), recent.get(collect)], [1, 2]);
    }
}
