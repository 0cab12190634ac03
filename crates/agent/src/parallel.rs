//! Work for many VMs or hosts in parallel, by a bounded number of threads.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

/// Threads for work that mostly waits for another program: of a few hundred VMs whose QEMUs all
/// hang for half a second, a list still takes a few seconds.
const THREADS_MAX: usize = 64;

/// Applies `work` to all in parallel, because each may have to wait.
pub(crate) fn at_once<T: Sync, R: Send>(all: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    by_threads(THREADS_MAX, all, work)
}

/// Applies `work` to all, by this many threads at most, of which the caller's is one.
///
/// If no other can be started, that one does it all.
pub(crate) fn by_threads<T: Sync, R: Send>(
    threads_max: usize,
    all: &[T],
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let share = || {
        let mut done = Vec::new();
        loop {
            let nth = next.fetch_add(1, Relaxed);
            let Some(one) = all.get(nth) else { return done };
            done.push((nth, work(one)));
        }
    };
    let mut done = thread::scope(|scope| {
        let spawn = |nth| {
            let thread = thread::Builder::new().name(format!("parallel-{nth}"));
            thread.spawn_scoped(scope, share).ok()
        };
        let threads: Vec<_> = (1..threads_max.min(all.len())).map_while(spawn).collect();
        let mut done = share();
        for thread in threads {
            done.extend(thread.join().unwrap_or_else(|fault| resume_unwind(fault)));
        }
        done
    });
    done.sort_unstable_by_key(|(nth, _)| *nth);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::SeqCst;

    use super::*;

    #[test]
    fn hundreds_are_done_by_a_few_in_their_order() {
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let all: Vec<usize> = (0..300).collect();
        let done = by_threads(8, &all, |number| {
            most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
            thread::yield_now();
            now.fetch_sub(1, SeqCst);
            number * 2
        });
        assert!(done.iter().enumerate().all(|(nth, result)| *result == nth * 2), "{done:?}");
        assert_eq!(done.len(), all.len());
        assert!(most.into_inner() <= 8);
        assert!(at_once(&Vec::<u32>::new(), |number| *number).is_empty());
    }
}
