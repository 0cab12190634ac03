//! Lets the guest report what of its memory is free before QEMU sends it.
//!
//! QEMU takes free page hints during its first pass, under a lock that its migration thread holds
//! while it sends, and takes again at once. A guest may have to wait for a second with what it has
//! to say, and its free memory is sent meanwhile. So QEMU sends next to nothing at first, for as
//! long as the guest lends memory quickly.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use data_threads::{DataThreads, Joined};
use qemu::outgoing::Outgoing;
use qemu::qmp::QmpError;

/// Time between two looks at what QEMU still has to send.
const LOOK: Duration = Duration::from_millis(10);
/// The guest goes on if it lends so much within [`PATIENCE`]: 5 Gbit/s.
const LENT_BYTES: u64 = 64 << 20;
const PATIENCE: Duration = Duration::from_millis(100);
/// From then on QEMU sends while the guest lends, as it would by itself.
const LONGEST: Duration = Duration::from_secs(3);

/// Holds QEMU back until it is dropped or the guest has lent what is free.
pub(crate) struct Hinting {
    _thread: Joined,
    stopped: Arc<AtomicBool>,
}

impl Hinting {
    /// Holds a QEMU back that is about to start. None if it can't be: it then sends at once.
    ///
    /// # Errors
    /// If QEMU would stay held back.
    pub(crate) fn begin(
        outgoing: &Arc<Outgoing>,
        threads: &Arc<DataThreads>,
    ) -> Result<Option<Self>, QmpError> {
        if let Err(error) = outgoing.hold_back(true) {
            tracing::warn!(%error, "QEMU doesn't wait for the guest's report of free memory");
            return outgoing.hold_back(false).map(|()| None);
        }
        let stopped = Arc::<AtomicBool>::default();
        let waiting = Waiting { outgoing: Arc::clone(outgoing), stopped: Arc::clone(&stopped) };
        let guard = threads.guard();
        let run = move || {
            let _guard = guard;
            waiting.run();
        };
        match data_threads::spawn("hinting", run) {
            Ok(thread) => Ok(Some(Self { _thread: thread.into(), stopped })),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "cannot start a thread to wait for the guest's report of free memory"
                );
                outgoing.hold_back(false).map(|()| None)
            }
        }
    }
}

impl Drop for Hinting {
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
    }
}

struct Waiting {
    outgoing: Arc<Outgoing>,
    stopped: Arc<AtomicBool>,
}

impl Waiting {
    fn run(&self) {
        let (began, mut lending) = (Instant::now(), None);
        while !self.is_stopped() && began.elapsed() < LONGEST {
            thread::sleep(LOOK);
            match self.outgoing.progress() {
                // It has not connected, or not started.
                Ok(progress) if progress.dirty_sync_count == 0 => {}
                Ok(progress) => {
                    let (now, left) = (Instant::now(), progress.remaining_bytes);
                    let lending = lending.get_or_insert(Lending { since: now, mark: left });
                    if !lending.goes_on(now, left) {
                        break;
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "cannot query the guest's free-page hints");
                    break;
                }
            }
        }
        self.let_go();
        tracing::debug!(after = ?began.elapsed(), "QEMU may send");
    }

    /// Without this QEMU would never get done, so it is tried until the migration has ended.
    fn let_go(&self) {
        while !self.is_stopped() {
            match self.outgoing.hold_back(false) {
                Ok(()) => return,
                Err(error) => tracing::warn!(%error, "cannot stop holding QEMU back; retrying"),
            }
            thread::sleep(PATIENCE);
        }
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }
}

/// What the guest has lent lately.
struct Lending {
    since: Instant,
    /// What QEMU had left then.
    mark: u64,
}

impl Lending {
    fn goes_on(&mut self, now: Instant, left: u64) -> bool {
        if self.mark.saturating_sub(left) >= LENT_BYTES {
            *self = Self { since: now, mark: left };
        }
        now - self.since < PATIENCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_is_held_back_only_while_the_guest_lends_quickly() {
        let start = Instant::now();
        let mut lending = Lending { since: start, mark: 8 << 30 };
        let mut look = |ms: u64, lent: u64| {
            lending.goes_on(start + Duration::from_millis(ms), (8 << 30) - lent)
        };
        assert!(look(90, LENT_BYTES - 1), "it may just have been asked");
        assert!(look(95, LENT_BYTES));
        assert!(look(190, 2 * LENT_BYTES - 1));
        assert!(!look(195, 2 * LENT_BYTES - 1), "too slow for a fast network");
    }
}
