//! Slows a VM by stopping it for a moment, again and again: where the host has
//! no cgroups that bound CPU time.
//!
//! Only while QEMU can't end its migration: one that does while the VM stands
//! still for a slice would have it given up, and the end of the slice would
//! have it run here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use parking_lot::{Condvar, Mutex};
use qemu::qmp::{Event, Qmp};

/// One run and one stop. A stop flushes the VM's disks, which takes a
/// millisecond or two.
const PERIOD: Duration = Duration::from_millis(50);
/// A run shorter than this is hardly one.
const RUN_LEAST: Duration = Duration::from_millis(1);
/// QEMU tells of a stop before it answers; this is for the way to us.
const TOLD_MAX: Duration = Duration::from_millis(100);

/// Stops that QEMU tells of and that are ours, not the VM's owner's.
#[derive(Debug, Default)]
pub(crate) struct OurStops {
    slices: AtomicU32,
    /// The VM is stopped for its switchover, by us.
    last: AtomicBool,
}

impl OurStops {
    /// QEMU has told of a stop: whether it was for a slice.
    pub(crate) fn take_slice(&self) -> bool {
        self.slices.fetch_update(SeqCst, SeqCst, |count| count.checked_sub(1)).is_ok()
    }

    /// Whether one that was not for a slice is for the switchover.
    pub(crate) fn is_last(&self) -> bool {
        self.last.load(SeqCst)
    }
}

/// How slicing ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Running,
    Stopped,
}

pub(super) struct Slices {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    qmp: Arc<Qmp>,
    stops: Arc<OurStops>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    share: f64,
    end: Option<End>,
}

impl Slices {
    pub(super) fn start(qmp: Arc<Qmp>, stops: Arc<OurStops>) -> std::io::Result<Self> {
        let state = Mutex::new(State { share: 1.0, end: None });
        let shared = Arc::new(Shared { qmp, stops, state, changed: Condvar::new() });
        let thread = thread::Builder::new().name("slices".to_owned()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.run()
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The VM runs for this share of the time.
    pub(super) fn set(&self, share: f64) {
        self.shared.state.lock().share = share;
        self.shared.changed.notify_all();
    }
}

impl Slices {
    /// The VM stands still when this returns, for QEMU to end its migration.
    pub(super) fn stop_for_good(&mut self) {
        self.end(End::Stopped);
    }

    fn end(&mut self, end: End) {
        self.shared.state.lock().end.get_or_insert(end);
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Slices {
    /// The VM runs, unless its owner has paused it, or it was stopped for good.
    fn drop(&mut self) {
        self.end(End::Running);
    }
}

impl Shared {
    fn run(&self) {
        let events = self.qmp.events_named(&["STOP", "RESUME"]);
        let mut runs = true;
        while let Some(stop) = self.wait_run() {
            for event in events.try_iter() {
                runs = event.name == "RESUME";
            }
            // Its owner's pause is none of ours.
            if runs && !self.slice(stop, &events) {
                return;
            }
        }
        if self.state.lock().end == Some(End::Stopped) {
            self.stops.last.store(true, SeqCst);
            if let Err(error) = self.qmp.stop() {
                // QEMU stops it by itself a moment later.
                tracing::warn!(%error, "the VM is not stopped");
            }
        }
    }

    /// Stops the VM for so long. Says whether to go on.
    fn slice(&self, time: Duration, events: &Receiver<Event>) -> bool {
        self.stops.slices.fetch_add(1, SeqCst);
        let stopped = self.qmp.stop();
        let told = events.recv_timeout(TOLD_MAX);
        if !told.is_ok_and(|event| event.name == "STOP") {
            // It stood already.
            let _ = self.stops.take_slice();
            return stopped.is_ok();
        }
        self.pause(time);
        if let Err(error) = self.qmp.cont() {
            tracing::error!(%error, "the VM does not go on after a slice");
            return false;
        }
        let _ = events.recv_timeout(TOLD_MAX);
        true
    }

    /// Lets it run for its part of a period, and longer while it isn't slowed.
    /// Says how long it is to stand then; none at the end.
    fn wait_run(&self) -> Option<Duration> {
        let begun = Instant::now();
        let mut state = self.state.lock();
        loop {
            if state.end.is_some() {
                return None;
            }
            if state.share >= 1.0 {
                self.changed.wait(&mut state);
                continue;
            }
            let run = PERIOD.mul_f64(state.share.max(0.0)).max(RUN_LEAST);
            if self.changed.wait_until(&mut state, begun + run).timed_out() {
                return Some(PERIOD.saturating_sub(run));
            }
        }
    }

    fn pause(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut state = self.state.lock();
        while state.end.is_none() && state.share < 1.0 {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }
}
