//! The lanes of one arrival: they may connect before the block list is known,
//! and end with the arrival.

use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crew::{Crew, Terms};
use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};
use placer::Placer;
use transport::{BlockSink, LaneEnd, receive_counted, thread_cpu};

use crate::network::{Flow, Network, Way};

/// More lanes than a source makes: a bound on what it can have us count.
const LANES_MAX: usize = 64;

#[derive(Default)]
struct State {
    placer: Option<Arc<Placer>>,
    disks: Option<Arc<dyn BlockSink>>,
    over: bool,
    streams: Vec<TcpStream>,
    running: usize,
}

/// What lanes of one migration share with its arrival.
pub(crate) struct ArrivingLanes {
    state: Mutex<State>,
    changed: Condvar,
    /// Where a lane tells what ends the migration.
    broken: Sender<String>,
    cpu_ns: AtomicU64,
    crew: Arc<Crew>,
    network: Arc<Network>,
    migration: u64,
    /// By number, from its first connection on.
    counted: Mutex<Vec<Option<Counted>>>,
}

/// What a lane has brought, whichever of its connections did, and by which NIC.
struct Counted {
    received_bytes: Arc<AtomicU64>,
    flow: Option<Flow>,
}

impl ArrivingLanes {
    pub(crate) fn new(broken: Sender<String>, network: &Arc<Network>) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            broken,
            cpu_ns: AtomicU64::new(0),
            crew: Crew::new(Terms::default()),
            network: Arc::clone(network),
            migration: network.migration(),
            counted: Mutex::default(),
        }
    }

    /// The threads that serve lanes and disks.
    pub(crate) fn crew(&self) -> &Arc<Crew> {
        &self.crew
    }

    /// At each lane's number, the place of its NIC.
    pub(crate) fn places(&self) -> Vec<Option<u16>> {
        let place =
            |counted: &Option<Counted>| u16::try_from(counted.as_ref()?.flow.as_ref()?.place).ok();
        self.counted.lock().iter().map(place).collect()
    }

    /// Where to count what lane `number` brings, which comes by `stream` now.
    fn counter(&self, stream: &TcpStream, number: u16) -> Arc<AtomicU64> {
        let number = usize::from(number);
        let mut counted = self.counted.lock();
        if number >= LANES_MAX {
            return Arc::default();
        }
        if counted.len() <= number {
            counted.resize_with(number + 1, || None);
        }
        let lane = counted[number].get_or_insert_with(|| {
            let received_bytes = Arc::new(AtomicU64::new(0));
            let bytes = Arc::clone(&received_bytes);
            let flow = stream.local_addr().ok().and_then(|address| {
                let counter = move || bytes.load(Relaxed);
                let joined = self.network.join(Way::In, self.migration, address.ip(), counter);
                joined.inspect_err(|error| tracing::warn!(%error, "a lane is not paced")).ok()
            });
            Counted { received_bytes, flow }
        });
        Arc::clone(&lane.received_bytes)
    }

    /// The block list is known: batches can be placed.
    pub(crate) fn open(&self, placer: Arc<Placer>) {
        self.state.lock().placer = Some(placer);
        self.changed.notify_all();
    }

    /// Serves one connection to its end, on its own thread.
    pub(crate) fn carry(&self, stream: &TcpStream, number: u16) {
        {
            let mut state = self.state.lock();
            let Ok(clone) = stream.try_clone() else { return };
            if state.over {
                return;
            }
            state.streams.push(clone);
            state.running += 1;
        }
        let member = self.crew.join();
        let received_bytes = self.counter(stream, number);
        let (placer, disks) = (|| self.placer(), || self.disks());
        let outcome = receive_counted(stream, placer, disks, &received_bytes);
        drop(member);
        // A peer in the middle of a write learns that nobody reads any more.
        let _ = stream.shutdown(Shutdown::Both);
        match outcome {
            Ok(()) => {}
            Err(error) if error.only_this_lane() => {
                tracing::info!(lane = number, %error, "lane ended");
            }
            Err(error) => {
                // Only the first matters; a full channel has one already.
                let _ = self.broken.try_send(error.to_string());
            }
        }
        let cpu = u64::try_from(thread_cpu().as_nanos()).unwrap_or(u64::MAX);
        self.cpu_ns.fetch_add(cpu, Relaxed);
        self.state.lock().running -= 1;
        self.changed.notify_all();
    }

    /// Where to tell what ends the migration.
    pub(crate) fn broken(&self) -> Sender<String> {
        self.broken.clone()
    }

    /// The VM's disks come too. Said before any lane can come.
    pub(crate) fn with_disks(&self, disks: Arc<dyn BlockSink>) {
        self.state.lock().disks = Some(disks);
    }

    fn disks(&self) -> Result<Arc<dyn BlockSink>, LaneEnd> {
        self.state.lock().disks.clone().ok_or(LaneEnd::NoDisks)
    }

    fn placer(&self) -> Option<Arc<Placer>> {
        let mut state = self.state.lock();
        while state.placer.is_none() && !state.over {
            self.changed.wait(&mut state);
        }
        state.placer.clone().filter(|_| !state.over)
    }

    /// Ends all lanes, and waits until none writes any more: a lane that the
    /// source gave up long ago may still hold half of a batch that has since
    /// arrived by another.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.over = true;
        for stream in state.streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.changed.notify_all();
        while state.running > 0 {
            self.changed.wait(&mut state);
        }
        if let Some(placer) = state.placer.take() {
            placer.close();
        }
    }

    /// CPU time of the lanes' threads that have ended.
    pub(crate) fn cpu(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Relaxed))
    }
}
