//! What the tap's threads have done so far.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Batches that were handed on.
    pub(crate) batches: AtomicU64,
    cpu_ns: AtomicU64,
}

impl Counters {
    /// CPU time of the tap's threads that have ended.
    pub(crate) fn cpu(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Relaxed))
    }

    /// Each thread calls this as it ends.
    pub(crate) fn add_thread_cpu(&self) {
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let used =
            Duration::new(used.tv_sec.unsigned_abs(), u32::try_from(used.tv_nsec).unwrap_or(0));
        self.cpu_ns.fetch_add(u64::try_from(used.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }
}
