//! The source's end of all lanes of one migration.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::Duration;

use data_threads::{DataThreads, Guard};
use page::Encoding;
use parking_lot::Mutex;

use crate::connect::Endpoint;
use crate::deltas::Deltas;
use crate::error::LanesError;
use crate::lane::{Lane, run_plain};
use crate::load::Load;
use crate::meter::{Delivered, LaneMeter, LaneTimes};
use crate::queue::{ASKED_MAX, Queue};
use crate::shared::{LanesPlan, Shared};

/// All lanes of a migration. Dropping it ends them.
#[derive(Debug)]
pub struct Lanes<X = Infallible> {
    shared: Arc<Shared<X>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Lanes {
    /// Starts the lanes; they connect, and reconnect after failures, by themselves.
    ///
    /// # Errors
    /// If no threads can be started.
    pub fn start(plan: LanesPlan) -> std::io::Result<Self> {
        let lanes = Self::new(plan, None);
        lanes.start_with(run_plain)?;
        Ok(lanes)
    }
}

impl<X: Send + 'static> Lanes<X> {
    /// Starts the lanes' threads, each of which `run`s one lane.
    ///
    /// # Errors
    /// If no threads can be started.
    pub fn start_with(
        &self,
        run: impl Fn(&Lane<'_, X>) + Clone + Send + 'static,
    ) -> std::io::Result<()> {
        for number in 0..self.shared.plan.endpoints.len() {
            let (shared, run) = (Arc::clone(&self.shared), run.clone());
            let thread = data_threads::spawn(format!("lane-{number}-send"), move || {
                run(&Lane { shared: &shared, number });
            })?;
            self.threads.lock().push(thread);
        }
        Ok(())
    }
}

impl<X> Lanes<X> {
    /// Creates lanes that carry nothing yet; their threads will join `threads`.
    #[must_use]
    pub fn new(plan: LanesPlan, threads: Option<Arc<DataThreads>>) -> Self {
        let shared = Arc::new(Shared::new(plan, threads));
        Self { shared, threads: Mutex::new(Vec::new()) }
    }

    /// The queue of the lanes, with their delivery counters.
    #[must_use]
    pub fn queue(&self) -> &Arc<Queue<X>> {
        &self.shared.queue
    }

    /// Hands a batch over. Never blocks: the pool bounds the number of batches.
    ///
    /// # Errors
    /// If the lanes failed or were stopped.
    pub fn submit(&self, load: impl Into<Load<X>>) -> Result<(), LanesError> {
        self.shared.queue.submit(load.into())
    }

    /// The barrier: blocks until every batch submitted so far is placed, or accepted
    /// by the destination's disk sink.
    ///
    /// # Errors
    /// If the lanes fail first.
    pub fn wait_drained(&self) -> Result<(), LanesError> {
        self.shared.queue.wait_drained()
    }

    /// Why the lanes failed, if they did.
    #[must_use]
    pub fn failure(&self) -> Option<LanesError> {
        self.shared.queue.failure()
    }

    /// The destination's disks have room for this many batches of blocks, counted from
    /// the first ever sent. More are not sent, and pages pass them. Until the first
    /// call there is no bound; the number never falls.
    pub fn set_block_room(&self, batches: u64) {
        self.shared.queue.set_block_room(batches);
    }

    /// Sets how bodies are encoded from now on.
    pub fn set_encoding(&self, encoding: Encoding) {
        self.shared.encoding.store(encoding as u8, Relaxed);
    }

    /// The destination's versions of pages, if pages can go as deltas.
    #[must_use]
    pub fn deltas(&self) -> Option<&Deltas> {
        self.shared.plan.deltas.as_deref()
    }

    /// Guest bytes of pages that were sent as deltas.
    #[must_use]
    pub fn delta_bytes(&self) -> u64 {
        self.deltas().map_or(0, Deltas::pages) * page::PAGE_BYTES as u64
    }

    /// Sets the most bytes a second that a lane writes from now on; none or 0:
    /// unpaced. A missing lane is ignored.
    pub fn set_pace(&self, lane: usize, bytes_per_s: Option<u64>) {
        if let Some(pacer) = self.shared.pacers.get(lane) {
            pacer.set(bytes_per_s);
        }
    }

    /// The delivery counters so far.
    #[must_use]
    pub fn delivered(&self) -> Delivered {
        self.shared.queue.delivered()
    }

    /// How each lane spent its time so far.
    pub fn times_by_lane(&self) -> impl Iterator<Item = LaneTimes> {
        self.shared.meters.iter().map(LaneMeter::times)
    }

    /// How the lanes spent their time so far.
    #[must_use]
    pub fn times(&self) -> LaneTimes {
        self.shared.meters.iter().map(LaneMeter::times).sum()
    }

    /// Bytes of buffers that lanes can use at once: on each lane the window, one batch
    /// being written, one waiting for it, and one being filled. If a stage `asks` the
    /// destination, also the batches that wait for answers.
    #[must_use]
    pub fn useful_bytes(&self, asks: bool) -> u64 {
        let slot = page::SLOT_BYTES as u64;
        let asking = if asks { ASKED_MAX as u64 * slot } else { 0 };
        let windows = self.shared.meters.iter().map(LaneMeter::window_bytes);
        asking + windows.map(|window| window + 3 * slot).sum::<u64>()
    }

    /// The round trip of the longest path; zero if none is known.
    ///
    /// Of the lanes on one path the shortest counts: a lane that had to connect again, while the
    /// others kept a queue on the path full, has not seen it without.
    #[must_use]
    pub fn round_trip(&self) -> Duration {
        let known = || self.meters().filter_map(|(path, meter)| Some((path, meter.round_trip()?)));
        let shortest = |path: Endpoint| {
            let same = known().filter(|(other, _)| *other == path);
            same.map(|(_, time)| time).min()
        };
        known().filter_map(|(path, _)| shortest(path)).max().unwrap_or_default()
    }

    /// The number of paths, which lanes may share.
    #[must_use]
    pub fn paths(&self) -> usize {
        let paths = &self.shared.plan.endpoints;
        let is_first = |(nth, path): &(usize, &Endpoint)| !paths[..*nth].contains(path);
        paths.iter().enumerate().filter(is_first).count()
    }

    /// Each lane's endpoint and counters.
    pub fn meters(&self) -> impl Iterator<Item = (Endpoint, &LaneMeter)> {
        self.shared.plan.endpoints.iter().copied().zip(&self.shared.meters)
    }

    /// For a thread that the lanes' migration depends on; none if their threads are nobody's.
    #[must_use]
    pub fn guard(&self) -> Option<Guard> {
        self.shared.threads.as_ref().map(DataThreads::guard)
    }

    /// Bytes written on all lanes.
    #[must_use]
    pub fn wire_bytes(&self) -> u64 {
        self.shared.meters.iter().map(|meter| meter.wire_bytes.load(Relaxed)).sum()
    }

    /// Accepts no more batches: lanes end once everything is delivered.
    pub fn close(&self) {
        self.shared.queue.close();
    }

    /// Ends the lanes in an orderly way: everything submitted is delivered first.
    /// Returns the CPU time that their threads used.
    pub fn finish(&self) -> Duration {
        self.close();
        self.join()
    }

    /// Ends the lanes and their connections now. Waits for nothing, so that the caller
    /// need not wait for a destination that reads slowly.
    pub fn shut(&self) {
        self.shared.end(LanesError::Stopped);
    }

    /// As [`Lanes::shut`], and waits for the lanes' threads. Returns the CPU time that
    /// they used.
    pub fn stop(&self) -> Duration {
        self.shut();
        self.join()
    }

    fn join(&self) -> Duration {
        for thread in self.threads.lock().drain(..) {
            // A lane that panicked has logged why; the others end as well.
            let _ = thread.join();
        }
        Duration::from_nanos(self.shared.cpu_ns.load(Relaxed))
    }
}

impl<X> Drop for Lanes<X> {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use identity::Security;
    use wire::Token;

    use super::*;

    /// A lane to each of these ports.
    fn lanes(ports: &[u16]) -> Lanes {
        let path = |port: &u16| Endpoint { local: None, remote: ([127, 0, 0, 1], *port).into() };
        let plan = LanesPlan {
            endpoints: ports.iter().map(path).collect(),
            peer: String::new(),
            security: Security::Plaintext,
            token: Token([1; 16]),
            encoding: Encoding::Raw,
            stale_filter: None,
            deltas: None,
        };
        Lanes::new(plan, None)
    }

    #[test]
    fn the_round_trip_is_that_of_the_longest_path() {
        let lanes = lanes(&[1, 2, 1, 2]);
        let ms = Duration::from_millis;
        assert_eq!(lanes.round_trip(), Duration::ZERO);
        for (lane, noted_ms, expected_ms) in [
            (0, Some(20), 20),
            // The other path is shorter.
            (1, Some(1), 20),
            // A queue on the same path.
            (2, Some(300), 20),
            (0, None, 300),
            (2, None, 1),
        ] {
            lanes.shared.meters[lane].set_round_trip(noted_ms.map(ms));
            assert_eq!(lanes.round_trip(), ms(expected_ms), "{lane} {noted_ms:?}");
        }
    }

    #[test]
    fn a_lane_without_a_connection_has_no_window() {
        let lanes = lanes(&[1]);
        let at_first = lanes.useful_bytes(false);
        lanes.shared.meters[0].window_bytes.store(1 << 30, Relaxed);
        assert!(lanes.useful_bytes(false) > at_first);
        lanes.shared.disconnected(0);
        assert_eq!(lanes.useful_bytes(false), at_first);
    }
}
