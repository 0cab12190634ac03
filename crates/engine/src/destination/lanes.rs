//! The lanes of one arrival: they may connect before the block list is known,
//! and end with the arrival.

use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};
use placer::Placer;
use transport::{BlockSink, LaneEnd, receive, thread_cpu};

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
}

impl ArrivingLanes {
    pub(crate) fn new(broken: Sender<String>) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), broken, cpu_ns: AtomicU64::new(0) }
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
        let outcome = receive(stream, || self.placer(), || self.disks());
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
