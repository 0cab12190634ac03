//! The source's end of all lanes of one migration.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use data_threads::DataThreads;
use identity::{Closer, Security};
use page::Encoding;
use parking_lot::Mutex;
use wire::Token;

use crate::connect::Endpoint;
use crate::deltas::Deltas;
use crate::error::LanesError;
use crate::lane::{Lane, run_plain};
use crate::load::Load;
use crate::meter::{Delivered, LaneMeter, LaneTimes};
use crate::pacer::Pacer;
use crate::queue::{ASKED_MAX, Queue};
use crate::stale_filter::StaleFilter;

/// What lanes a migration gets.
#[derive(Clone, Debug)]
pub struct LanesPlan {
    /// One for each lane.
    pub endpoints: Vec<Endpoint>,
    /// The host they go to.
    pub peer: String,
    /// How they are made secure.
    pub security: Security,
    /// What they identify themselves with.
    pub token: Token,
    /// The encoding to begin with.
    pub encoding: Encoding,
    /// Looks at batches of pages before they are sent.
    pub stale_filter: Option<StaleFilter>,
    /// What the destination has. None: pages that are sent again go whole.
    pub deltas: Option<Arc<Deltas>>,
}

/// All lanes of a migration. Dropping it ends them.
#[derive(Debug)]
pub struct Lanes<X = Infallible> {
    shared: Arc<Shared<X>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What the threads of all lanes see.
#[derive(Debug)]
pub(crate) struct Shared<X> {
    pub(crate) queue: Arc<Queue<X>>,
    pub(crate) meters: Vec<LaneMeter>,
    pub(crate) pacers: Vec<Pacer>,
    pub(crate) encoding: AtomicU8,
    pub(crate) cpu_ns: AtomicU64,
    pub(crate) plan: LanesPlan,
    pub(crate) threads: Option<Arc<DataThreads>>,
    /// What ends each lane's connection, if it has one.
    connections: Mutex<Vec<Option<Closer>>>,
}

impl<X> Shared<X> {
    /// Lane `number` has a connection.
    pub(crate) fn connected(&self, number: usize, closer: Closer) {
        self.connections.lock()[number] = Some(closer);
        // The end may have come before there was anything to close.
        if self.queue.failure().is_some() {
            self.shut();
        }
    }

    /// It has none any more.
    pub(crate) fn disconnected(&self, number: usize) {
        self.connections.lock()[number] = None;
    }

    /// Ends everything now. Whoever reads or writes comes back at once, however slow
    /// the destination is.
    pub(crate) fn end(&self, error: LanesError) {
        self.queue.fail(error);
        self.pacers.iter().for_each(Pacer::stop);
        self.shut();
    }

    fn shut(&self) {
        self.connections.lock().iter().flatten().for_each(Closer::close);
    }
}

impl Lanes {
    /// Starts the lanes; they connect by themselves and again after a failure.
    ///
    /// # Errors
    /// If the system gives no threads.
    pub fn start(plan: LanesPlan) -> std::io::Result<Self> {
        let lanes = Self::new(plan, None);
        lanes.start_with(run_plain)?;
        Ok(lanes)
    }
}

impl<X: Send + 'static> Lanes<X> {
    /// Starts their threads, each of which `run`s one lane.
    ///
    /// # Errors
    /// If the system gives no threads.
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
    /// Lanes that carry nothing yet; their threads join `threads`.
    #[must_use]
    pub fn new(plan: LanesPlan, threads: Option<Arc<DataThreads>>) -> Self {
        let shared = Arc::new(Shared {
            queue: Arc::new(Queue::new()),
            meters: plan.endpoints.iter().map(|_| LaneMeter::default()).collect(),
            pacers: plan.endpoints.iter().map(|_| Pacer::new()).collect(),
            encoding: AtomicU8::new(plan.encoding as u8),
            cpu_ns: AtomicU64::new(0),
            connections: Mutex::new(vec![None; plan.endpoints.len()]),
            plan,
            threads,
        });
        Self { shared, threads: Mutex::new(Vec::new()) }
    }

    /// What they carry, and have delivered.
    #[must_use]
    pub fn queue(&self) -> &Arc<Queue<X>> {
        &self.shared.queue
    }

    /// Effects a batch over. Never blocks: the pool bounds how many there are.
    ///
    /// # Errors
    /// If the lanes failed or were stopped.
    pub fn submit(&self, load: impl Into<Load<X>>) -> Result<(), LanesError> {
        self.shared.queue.submit(load.into())
    }

    /// The barrier: blocks until every batch submitted so far is placed, or
    /// taken over by the destination's disk sink.
    ///
    /// # Errors
    /// If the lanes fail first.
    pub fn wait_drained(&self) -> Result<(), LanesError> {
        self.shared.queue.wait_drained()
    }

    /// Why they failed, if they did.
    #[must_use]
    pub fn failure(&self) -> Option<LanesError> {
        self.shared.queue.failure()
    }

    /// The destination's disks have room for so many batches of blocks, all that
    /// were ever sent counted. More are not sent, and pages pass them by. Until
    /// this is called there is no bound, and what was said once stays.
    pub fn set_block_room(&self, batches: u64) {
        self.shared.queue.set_block_room(batches);
    }

    /// How bodies are encoded from now on.
    pub fn set_encoding(&self, encoding: Encoding) {
        self.shared.encoding.store(encoding as u8, Relaxed);
    }

    /// What is known of the pages that the destination has, if they can go as deltas.
    #[must_use]
    pub fn deltas(&self) -> Option<&Deltas> {
        self.shared.plan.deltas.as_deref()
    }

    /// Pages, in bytes, that were sent as deltas.
    #[must_use]
    pub fn delta_bytes(&self) -> u64 {
        self.deltas().map_or(0, Deltas::pages) * page::PAGE_BYTES as u64
    }

    /// The most bytes a second that a lane writes from now on; none or 0:
    /// unpaced. A lane that there isn't has no pace.
    pub fn set_pace(&self, lane: usize, bytes_per_s: Option<u64>) {
        if let Some(pacer) = self.shared.pacers.get(lane) {
            pacer.set(bytes_per_s);
        }
    }

    /// Each lane's pace.
    pub fn paces(&self) -> impl Iterator<Item = Option<u64>> {
        self.shared.pacers.iter().map(Pacer::bytes_per_s)
    }

    /// What is delivered so far.
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

    /// Bytes of buffers that lanes can use at once: what may be in flight on each, one
    /// batch that it writes, one that waits for it, and one that is being filled. If a
    /// stage `asks` the destination, also what waits for answers.
    #[must_use]
    pub fn useful_bytes(&self, asks: bool) -> u64 {
        let slot = page::SLOT_BYTES as u64;
        let asking = if asks { ASKED_MAX as u64 * slot } else { 0 };
        let windows = self.shared.meters.iter().map(LaneMeter::window_bytes);
        asking + windows.map(|window| window + 3 * slot).sum::<u64>()
    }

    /// Each lane's ends and counters.
    pub fn meters(&self) -> impl Iterator<Item = (Endpoint, &LaneMeter)> {
        self.shared.plan.endpoints.iter().copied().zip(&self.shared.meters)
    }

    /// Bytes written on all lanes.
    #[must_use]
    pub fn wire_bytes(&self) -> u64 {
        self.shared.meters.iter().map(|meter| meter.wire_bytes.load(Relaxed)).sum()
    }

    /// Nothing more will be submitted: lanes end once all is delivered.
    pub fn close(&self) {
        self.shared.queue.close();
    }

    /// Ends the lanes in order: all that was submitted is delivered first.
    /// Returns the CPU time that their threads used.
    pub fn finish(&self) -> Duration {
        self.close();
        self.join()
    }

    /// Ends the lanes now, and their connections. Does not wait for anything, so
    /// that others need not wait for a destination that reads slowly.
    pub fn shut(&self) {
        self.shared.end(LanesError::Stopped);
    }

    /// As [`Lanes::shut`], and waits for the lanes' threads. Returns the CPU time
    /// that they used.
    pub fn stop(&self) -> Duration {
        self.shut();
        self.join()
    }

    fn join(&self) -> Duration {
        for thread in self.threads.lock().drain(..) {
            // A lane that panicked has printed why; the others end as well.
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
