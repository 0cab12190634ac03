//! Lets the destination's storage catch up with the mirrors before the VM stops.
//!
//! A mirror has caught up when the disk tap has accepted everything. That data may
//! still be in buffers, on lanes, in the sink and in the destination's page cache,
//! which on slow storage takes seconds to write. So it is flushed while the VM
//! runs, until a flush is short.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvError, Sender, bounded, never};
use data_threads::Guard;
use disk::DiskSource;
use policy::mirror::Behind;

/// Interval between flushes while memory is not ready yet: little was written
/// since, and a flush costs the storage something.
const EVERY: Duration = Duration::from_secs(2);

/// The state by which the thread that watches the mirrors decides.
pub(crate) struct Settle {
    ask: Sender<()>,
    /// Receives the duration of each flush of all disks; to be passed to [`Settle::receive`].
    pub(crate) done: Receiver<Duration>,
    behind: Behind,
    flush: Flush,
    /// By the last flush: it was short, or no shorter one is to be expected.
    may_stop: bool,
}

/// The last flush that was requested.
#[derive(Debug, PartialEq, Eq)]
enum Flush {
    Never,
    UnderWay,
    Ended(Instant),
}

impl Settle {
    /// Starts the thread that flushes. It ends once this is dropped and the sources
    /// have ended.
    pub(crate) fn start(
        sources: Vec<Arc<DiskSource>>,
        guard: Option<Guard>,
    ) -> std::io::Result<(Self, JoinHandle<()>)> {
        let (ask, asked) = bounded::<()>(1);
        let (tell, done) = bounded(1);
        let flush = move || {
            let _guard = guard;
            for () in asked {
                data_threads::point();
                let begun = Instant::now();
                // A failed flush ends the migration in another way.
                if sources.iter().any(|source| source.flush().is_err())
                    || tell.send(begun.elapsed()).is_err()
                {
                    return;
                }
            }
        };
        let thread = data_threads::spawn("disk-settle", flush)?;
        let behind = Behind::default();
        Ok((Self { ask, done, behind, flush: Flush::Never, may_stop: false }, thread))
    }

    /// Notes the end of a flush.
    pub(crate) fn receive(&mut self, took: Result<Duration, RecvError>) {
        let Ok(took) = took else {
            // It failed. A channel without a sender would always have something to say.
            self.done = never();
            return;
        };
        tracing::debug!(?took, "disks flushed at the destination");
        (self.behind, self.may_stop) = self.behind.next(took);
        self.flush = Flush::Ended(Instant::now());
    }

    /// Whether the VM may stop as far as its disks are concerned; `caught_up` tells
    /// whether their mirrors have caught up.
    pub(crate) fn may_stop(&mut self, caught_up: bool) -> bool {
        if !caught_up {
            return false;
        }
        let is_due = match self.flush {
            Flush::Never => true,
            Flush::UnderWay => false,
            Flush::Ended(at) => !self.may_stop || at.elapsed() >= EVERY,
        };
        if is_due && self.ask.try_send(()).is_ok() {
            self.flush = Flush::UnderWay;
        }
        self.may_stop
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::TryRecvError;
    use disk::Carry;
    use page::{BlockBatch, DiskId, Pool, SLOT_BYTES};
    use transport::LanesError;

    use super::*;

    #[derive(Debug)]
    struct NoLanes;

    impl Carry for NoLanes {
        fn submit(&self, _: BlockBatch) -> Result<(), LanesError> {
            unreachable!("nothing is written")
        }
    }

    /// The thread that watches the mirrors waits for the end of flushes among other things.
    #[test]
    fn after_a_flush_that_failed_there_is_nothing_to_wait_for() {
        let (pool, carry) = (Pool::new(SLOT_BYTES), Arc::new(NoLanes) as Arc<dyn Carry>);
        let full = |_: DiskId| Err("no space left".to_owned());
        let source = Arc::new(DiskSource::new(DiskId(0), "d0", 512, pool, carry, full));
        let (mut settle, thread) = Settle::start(vec![source], None).unwrap();
        assert!(!settle.may_stop(true));
        thread.join().unwrap();
        let took = settle.done.recv();
        assert_eq!(took, Err(RecvError));
        settle.receive(took);
        assert_eq!(settle.done.try_recv(), Err(TryRecvError::Empty));
        assert!(!settle.may_stop(true));
    }

    #[test]
    fn disks_are_flushed_once_mirrors_have_caught_up_and_not_again_at_once() {
        let (mut settle, thread) = Settle::start(Vec::new(), None).unwrap();
        assert!(!settle.may_stop(false));
        assert_eq!(settle.flush, Flush::Never);
        assert!(!settle.may_stop(true), "a flush is requested");
        let took = settle.done.recv();
        settle.receive(took);
        assert!(settle.may_stop(true));
        assert!(settle.flush != Flush::UnderWay, "the last one is not old");
        assert!(!settle.may_stop(false), "one fell behind again");
        drop(settle);
        thread.join().unwrap();
    }
}
