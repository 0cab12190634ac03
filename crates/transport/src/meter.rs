//! Counters of the lanes, for progress, policies and the report.

use std::num::NonZeroU32;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use data_threads::CpuTime;

use crate::window;

/// Counters of one lane, all monotonic.
#[derive(Debug, Default)]
pub struct LaneMeter {
    /// Bytes written to its sockets.
    pub wire_bytes: AtomicU64,
    /// Batches acknowledged.
    pub batches: AtomicU64,
    /// Bytes of buffers that may be in flight on its connection, as of the last
    /// acknowledgement.
    pub(crate) window_bytes: AtomicU64,
    /// The shortest round trip of its connection, in microseconds; 0 while it is not known.
    round_trip_us: AtomicU64,
    /// Times its connection died.
    pub deaths: AtomicU32,
    spent_ns: [AtomicU64; 4],
    /// For how long the peers of its connections had no room in their sockets.
    peer_full_ns: AtomicU64,
    doing: AtomicU8,
    since_ns: AtomicU64,
    /// The sender thread's kernel id; 0 before it starts.
    thread: AtomicU32,
}

/// The activity of a lane's sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doing {
    Waiting = 0,
    Encoding = 1,
    Writing = 2,
    /// What is in flight has to arrive first.
    WaitingForRoom = 3,
}

/// How lanes spent their time, summed over all lanes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneTimes {
    /// In writes to sockets, or before them, until enough of what is in flight has arrived.
    pub writing: Duration,
    /// Of that, while it was the peer that took nothing: its socket was full, or as much was in
    /// flight as the path needs.
    pub for_peer: Duration,
    /// Encoding.
    pub encoding: Duration,
    /// Waiting for a batch.
    pub waiting: Duration,
    /// Of these, runnable without a CPU.
    pub for_cpu: Duration,
    /// Of these, on a CPU.
    pub running: Duration,
}

impl LaneMeter {
    /// Bytes of buffers that may be in flight on its connection.
    pub(crate) fn window_bytes(&self) -> u64 {
        self.window_bytes.load(Relaxed).max(window::LEAST_BYTES)
    }

    /// The shortest round trip of its connection; none if it has none, or it is not known.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        let time = Duration::from_micros(self.round_trip_us.load(Relaxed));
        Some(time).filter(|time| !time.is_zero())
    }

    /// Sets the round trip of a new connection; none if there is no connection. Only the lane's
    /// own thread calls this.
    pub(crate) fn set_round_trip(&self, time: Option<Duration>) {
        let time_us = time.map_or(0, |time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
        self.round_trip_us.store(time_us, Relaxed);
    }

    /// Notes a round trip of the same connection. The shortest ever counts: the kernel forgets
    /// after minutes, and a path that was full all that time has none without a queue. Only the
    /// lane's own thread calls this.
    pub(crate) fn note_round_trip(&self, time: Option<Duration>) {
        self.set_round_trip(self.round_trip().into_iter().chain(time).min());
    }

    /// Notes for how much longer the peer had no room.
    pub(crate) fn note_peer_full(&self, more: Duration) {
        self.peer_full_ns.fetch_add(u64::try_from(more.as_nanos()).unwrap_or(0), Relaxed);
    }

    /// Notes the sender's next activity. Only its own thread calls this.
    pub(crate) fn turn_to(&self, next: Doing) {
        let now = now_ns();
        let spent = now - self.since_ns.swap(now, Relaxed);
        let before = self.doing.swap(next as u8, Relaxed);
        self.spent_ns[usize::from(before)].fetch_add(spent, Relaxed);
    }

    /// Notes the start of the sender on a connection. The time since the one before counts for
    /// what was done last.
    pub(crate) fn begin(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.thread.store(thread.unsigned_abs(), Relaxed);
        let _ = self.since_ns.compare_exchange(0, now_ns(), Relaxed, Relaxed);
        self.turn_to(Doing::Waiting);
    }

    /// The times so far, including the current activity.
    pub(crate) fn times(&self) -> LaneTimes {
        let since = self.since_ns.load(Relaxed);
        if since == 0 {
            return LaneTimes::default();
        }
        let doing = self.doing.load(Relaxed);
        let unfinished = now_ns().saturating_sub(since);
        let spent = |what: Doing| {
            let more = if doing == what as u8 { unfinished } else { 0 };
            Duration::from_nanos(self.spent_ns[what as usize].load(Relaxed) + more)
        };
        let (writing, room) = (spent(Doing::Writing), spent(Doing::WaitingForRoom));
        let CpuTime { ran, waited } = self.cpu();
        let peer_full = Duration::from_nanos(self.peer_full_ns.load(Relaxed));
        LaneTimes {
            writing: writing + room,
            for_peer: room + peer_full.min(writing),
            encoding: spent(Doing::Encoding),
            waiting: spent(Doing::Waiting),
            for_cpu: waited,
            running: ran,
        }
    }

    /// The current sender thread's; a new thread starts at zero.
    fn cpu(&self) -> CpuTime {
        let thread = NonZeroU32::new(self.thread.load(Relaxed));
        thread.and_then(data_threads::cpu_time).unwrap_or_default()
    }
}

/// Nanoseconds since the first call, never 0.
fn now_ns() -> u64 {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    let passed = FIRST.get_or_init(Instant::now).elapsed();
    u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX).saturating_add(1)
}

impl std::iter::Sum for LaneTimes {
    fn sum<I: Iterator<Item = Self>>(times: I) -> Self {
        times.fold(Self::default(), |sum, one| Self {
            writing: sum.writing + one.writing,
            for_peer: sum.for_peer + one.for_peer,
            encoding: sum.encoding + one.encoding,
            waiting: sum.waiting + one.waiting,
            for_cpu: sum.for_cpu + one.for_cpu,
            running: sum.running + one.running,
        })
    }
}

impl std::ops::Sub for LaneTimes {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            writing: self.writing.saturating_sub(earlier.writing),
            for_peer: self.for_peer.saturating_sub(earlier.for_peer),
            encoding: self.encoding.saturating_sub(earlier.encoding),
            waiting: self.waiting.saturating_sub(earlier.waiting),
            for_cpu: self.for_cpu.saturating_sub(earlier.for_cpu),
            running: self.running.saturating_sub(earlier.running),
        }
    }
}

/// What the destination has acknowledged, and for how long pages were in flight.
///
/// Disk blocks are counted separately: RAM's convergence, and what remains of it
/// when the VM stops, depend on pages alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Pages delivered as bytes, in guest bytes.
    pub body_bytes: u64,
    /// Pages that the destination had already, or got from another host, a disk or
    /// another VM's source, in guest bytes.
    pub found_bytes: u64,
    /// Undelivered pages that the destination awaits from other providers, in guest bytes.
    pub awaited_bytes: u64,
    /// Fill pages, in guest bytes.
    pub fill_bytes: u64,
    /// Time during which at least one batch of pages was in flight.
    pub busy: Duration,
    /// Guest bytes (bodies) submitted and not yet placed.
    pub backlog_bytes: u64,
    /// Bytes of pages that the stale filter or the deltas dropped.
    pub dropped_bytes: u64,
    /// Batches of pages delivered.
    pub batches: u64,
    /// Disk data, before encoding.
    pub block_bytes: u64,
    /// Zero disk blocks, sent as such.
    pub block_zero_bytes: u64,
    /// Disk data submitted and not yet accepted.
    pub block_backlog_bytes: u64,
    /// Batches of disk blocks held back because the destination has no room for
    /// them.
    pub blocks_held: u64,
}

/// CPU time of the calling thread so far.
#[must_use]
pub fn thread_cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_connection_takes_no_time_back() {
        let meter = LaneMeter::default();
        meter.begin();
        meter.turn_to(Doing::Writing);
        let before = std::iter::repeat_with(|| meter.times());
        let before = before.map(|times| times.writing).find(|time| !time.is_zero()).unwrap();
        meter.begin();
        assert!(meter.times().writing >= before);
    }

    #[test]
    fn the_shortest_round_trip_of_a_connection_is_kept() {
        let (meter, ms) = (LaneMeter::default(), Duration::from_millis);
        assert_eq!(meter.round_trip(), None);
        for (noted, expected) in [(None, None), (Some(20), Some(20)), (None, Some(20))] {
            meter.note_round_trip(noted.map(ms));
            assert_eq!(meter.round_trip(), expected.map(ms));
        }
        for (noted, expected) in [(30, 20), (10, 10), (400, 10)] {
            meter.note_round_trip(Some(ms(noted)));
            assert_eq!(meter.round_trip(), Some(ms(expected)));
        }
        meter.set_round_trip(Some(ms(30)));
        assert_eq!(meter.round_trip(), Some(ms(30)), "another connection");
        meter.set_round_trip(None);
        assert_eq!(meter.round_trip(), None);
    }
}
