//! What the threads of a migration's lanes share at the source.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use data_threads::DataThreads;
use identity::{Closer, Security};
use page::Encoding;
use parking_lot::Mutex;
use wire::Token;

use crate::connect::Endpoint;
use crate::deltas::Deltas;
use crate::error::LanesError;
use crate::meter::LaneMeter;
use crate::pacer::Pacer;
use crate::queue::Queue;
use crate::stale_filter::StaleFilter;

/// The plan of a migration's lanes.
#[derive(Clone, Debug)]
pub struct LanesPlan {
    /// One endpoint per lane.
    pub endpoints: Vec<Endpoint>,
    /// The destination host.
    pub peer: String,
    /// How connections are secured.
    pub security: Security,
    /// The token that identifies the lanes.
    pub token: Token,
    /// The initial encoding.
    pub encoding: Encoding,
    /// Filters batches of pages before they are sent.
    pub stale_filter: Option<StaleFilter>,
    /// The destination's versions of pages. None: pages that are sent again go whole.
    pub deltas: Option<Arc<Deltas>>,
}

/// State shared by the threads of all lanes.
#[derive(Debug)]
pub(crate) struct Shared<X> {
    pub(crate) queue: Arc<Queue<X>>,
    pub(crate) meters: Vec<LaneMeter>,
    pub(crate) pacers: Vec<Pacer>,
    pub(crate) encoding: AtomicU8,
    pub(crate) cpu_ns: AtomicU64,
    pub(crate) plan: LanesPlan,
    pub(crate) threads: Option<Arc<DataThreads>>,
    /// The handle that closes each lane's connection, if it has one.
    connections: Mutex<Vec<Option<Closer>>>,
}

impl<X> Shared<X> {
    pub(crate) fn new(plan: LanesPlan, threads: Option<Arc<DataThreads>>) -> Self {
        Self {
            queue: Arc::new(Queue::new()),
            meters: plan.endpoints.iter().map(|_| LaneMeter::default()).collect(),
            pacers: plan.endpoints.iter().map(|_| Pacer::new()).collect(),
            encoding: AtomicU8::new(plan.encoding as u8),
            cpu_ns: AtomicU64::new(0),
            connections: Mutex::new(vec![None; plan.endpoints.len()]),
            plan,
            threads,
        }
    }

    /// Notes that lane `number` has a connection.
    pub(crate) fn connected(&self, number: usize, closer: Closer) {
        self.connections.lock()[number] = Some(closer);
        // The lanes may have ended before there was a connection to close.
        if self.queue.failure().is_some() {
            self.shut();
        }
    }

    /// Notes that lane `number` has lost its connection.
    pub(crate) fn disconnected(&self, number: usize) {
        self.connections.lock()[number] = None;
        self.meters[number].set_round_trip(None);
        // The next connection starts with a small window.
        self.meters[number].window_bytes.store(0, Relaxed);
    }

    /// Ends everything now. Threads that read or write return at once, however slow
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
