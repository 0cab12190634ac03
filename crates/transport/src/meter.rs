//! What the lanes count, for progress, policies and the report.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// One lane. All counters only grow.
#[derive(Debug, Default)]
pub struct LaneMeter {
    /// Bytes written to its sockets.
    pub wire_bytes: AtomicU64,
    /// Batches acknowledged.
    pub batches: AtomicU64,
    /// How often its connection died.
    pub deaths: AtomicU32,
    /// Nanoseconds in writes to the socket.
    pub(crate) writing_ns: AtomicU64,
    /// Nanoseconds encoding.
    pub(crate) encoding_ns: AtomicU64,
    /// Nanoseconds without a batch to send.
    pub(crate) waiting_ns: AtomicU64,
}

/// How lanes spent their time, summed over all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneTimes {
    /// In writes to sockets.
    pub writing: Duration,
    /// Encoding.
    pub encoding: Duration,
    /// Without a batch to send.
    pub waiting: Duration,
}

impl LaneMeter {
    pub(crate) fn times(&self) -> LaneTimes {
        LaneTimes {
            writing: Duration::from_nanos(self.writing_ns.load(Relaxed)),
            encoding: Duration::from_nanos(self.encoding_ns.load(Relaxed)),
            waiting: Duration::from_nanos(self.waiting_ns.load(Relaxed)),
        }
    }
}

impl std::iter::Sum for LaneTimes {
    fn sum<I: Iterator<Item = Self>>(times: I) -> Self {
        times.fold(Self::default(), |sum, one| Self {
            writing: sum.writing + one.writing,
            encoding: sum.encoding + one.encoding,
            waiting: sum.waiting + one.waiting,
        })
    }
}

impl std::ops::Sub for LaneTimes {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            writing: self.writing.saturating_sub(earlier.writing),
            encoding: self.encoding.saturating_sub(earlier.encoding),
            waiting: self.waiting.saturating_sub(earlier.waiting),
        }
    }
}

/// What the destination has acknowledged as placed, and how long there was
/// something to deliver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Pages that travelled as bytes, in guest bytes.
    pub body_bytes: u64,
    /// Fill pages, in guest bytes.
    pub fill_bytes: u64,
    /// Time in which at least one batch was under way.
    pub busy: Duration,
    /// Guest bytes (bodies) submitted and not yet placed.
    pub backlog_bytes: u64,
}

/// CPU time of the calling thread so far.
#[must_use]
pub fn thread_cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}
