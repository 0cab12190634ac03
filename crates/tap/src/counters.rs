//! What the tap has read so far.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Monotonic counters, updated once per batch.
#[derive(Debug, Default)]
pub struct Counters {
    /// Pages with bodies.
    pub body_pages: AtomicU64,
    /// Pages of one repeated byte.
    pub fill_pages: AtomicU64,
    /// Bytes read from QEMU on all channels.
    pub stream_bytes: AtomicU64,
    cpu_ns: AtomicU64,
}

impl Counters {
    /// CPU time of the tap's threads that have ended.
    #[must_use]
    pub fn cpu(&self) -> Duration {
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
