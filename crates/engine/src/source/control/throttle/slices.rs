//! Throttles a VM by stopping it for moments, on hosts without cgroups that bound CPU
//! time.
//!
//! QEMU ends the migration of a stopped VM once it has nothing left to hand over,
//! whether it is held or not. That is welcome, since the VM has to be stopped at some
//! time. But the end of such a stop must not resume the VM here. QEMU refuses that
//! until its migration has ended, and its migration doesn't end before the tap allows
//! it, which it does only when no stop can end any more.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use parking_lot::{Condvar, Mutex};
use qemu::qmp::{Event, Qmp, QmpError};

use super::Slicing;

/// One run and one stop. A stop flushes the VM's disks, which takes a millisecond or
/// two.
const PERIOD: Duration = Duration::from_millis(50);
/// Shortest useful run.
const RUN_LEAST: Duration = Duration::from_millis(1);
/// QEMU sends the event of a stop before it answers the command; this is the longest
/// it may take to arrive.
const TOLD_MAX: Duration = Duration::from_millis(100);

/// Distinguishes throttling stops of the VM from all others.
#[derive(Debug, Default)]
pub(crate) struct OurStops(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Times of requested stops whose events are outstanding.
    untold: VecDeque<Instant>,
    /// A stop was requested, whatever its result.
    any: bool,
    /// A thread is stopping and resuming the VM.
    slicing: bool,
    /// QEMU has handed over all RAM.
    ended: bool,
    /// The last stop, if the VM is not resumed after it.
    last: Option<Instant>,
}

impl OurStops {
    /// Whether a stop event at this time was for throttling. A stop before the agent
    /// requested one is its owner's.
    pub(crate) fn take_slice(&self, at: Instant) -> bool {
        let mut known = self.0.lock();
        let ours = known.untold.front().is_some_and(|asked| *asked <= at);
        if ours {
            known.untold.pop_front();
        }
        ours
    }

    /// Notes a stop that is about to be requested.
    fn ask(&self, at: Instant) {
        let mut known = self.0.lock();
        known.any = true;
        known.untold.push_back(at);
    }

    /// When the VM was stopped for its switchover, if a throttling stop did it.
    pub(crate) fn last(&self) -> Option<Instant> {
        self.0.lock().last
    }

    /// Whether throttling may be why the VM is stopped.
    pub(crate) fn any(&self) -> bool {
        self.0.lock().any
    }

    /// Notes that QEMU has handed over all RAM. Returns whether it may end its
    /// migration at once.
    pub(crate) fn end(&self) -> bool {
        let mut known = self.0.lock();
        known.ended = true;
        !known.slicing
    }
}

pub(super) struct Slices {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    qmp: Arc<Qmp>,
    stops: Arc<OurStops>,
    /// Allows QEMU to end its migration.
    tap: tap::Stopper,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    share: f64,
    over: bool,
}

impl Slices {
    pub(super) fn start(slicing: &Slicing) -> std::io::Result<Self> {
        let Slicing { qmp, stops, tap } = slicing;
        let shared = Arc::new(Shared {
            qmp: Arc::clone(qmp),
            stops: Arc::clone(stops),
            tap: tap.clone(),
            state: Mutex::new(State { share: 1.0, over: false }),
            changed: Condvar::new(),
        });
        let thread = data_threads::spawn("slices", {
            let shared = Arc::clone(&shared);
            move || shared.run()
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Lets the VM run for this share of the time.
    pub(super) fn set(&self, share: f64) {
        self.shared.state.lock().share = share;
        self.shared.changed.notify_all();
    }
}

impl Drop for Slices {
    /// Leaves the VM running, unless its owner has paused it or QEMU has finished
    /// with it.
    fn drop(&mut self) {
        self.shared.state.lock().over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        {
            let mut known = self.stops.0.lock();
            if known.ended {
                return;
            }
            known.slicing = true;
        }
        self.slices();
        let ended = {
            let mut known = self.stops.0.lock();
            known.slicing = false;
            known.ended
        };
        // Every QMP command has been answered.
        if ended {
            self.tap.let_finish();
        }
    }

    fn slices(&self) {
        let events = self.qmp.events_named(&["STOP", "RESUME"]);
        let mut runs = true;
        while let Some(stop) = self.wait_run() {
            for event in events.try_iter() {
                runs = event.name == "RESUME";
            }
            // An owner's pause is not the agent's, nor is QEMU's own stop.
            if runs && !self.slice(stop, &events, &mut runs) {
                return;
            }
        }
    }

    /// Stops the VM for `time`. Returns whether to continue, and sets `runs` to the
    /// VM's state.
    ///
    /// The owner may send `stop` meanwhile, to a VM that is already stopped: QEMU
    /// reports no event for that, and it can't be detected. What is visible is taken
    /// as the owner's intent: a stop after a `cont`, and one just before the agent's.
    fn slice(&self, time: Duration, events: &Receiver<Event>, runs: &mut bool) -> bool {
        let asked = Instant::now();
        self.stops.ask(asked);
        let stopped = self.qmp.stop();
        let until = Instant::now() + TOLD_MAX;
        let told = loop {
            match events.recv_deadline(until) {
                Ok(event) if event.name == "STOP" && event.at >= asked => break Some(event),
                Ok(event) => *runs = event.name == "RESUME",
                Err(_) => break None,
            }
        };
        let told = match (told, stopped) {
            (Some(told), _) => {
                self.pause(time);
                told
            }
            // QEMU's main loop is blocked, for example by storage. QEMU stops the VM once it
            // is unblocked, and the agent has to resume it.
            (None, Err(QmpError::Timeout { .. })) => match self.wait_stop(asked, events) {
                Some(late) => late,
                None => return false,
            },
            (None, stopped) => {
                // It was already stopped.
                self.stops.0.lock().untold.retain(|untold| *untold != asked);
                return stopped.is_ok();
            }
        };
        if let Some(event) = events.try_iter().last() {
            // The owner has resumed it, and perhaps stopped it again.
            *runs = event.name == "RESUME";
            return true;
        }
        if self.stops.0.lock().ended || self.qmp.cont().is_err() {
            // QEMU has finished with it: this was its last stop.
            self.stops.0.lock().last = Some(told.at);
            return false;
        }
        // Events come before the answer.
        let seen: Vec<Event> = events.try_iter().collect();
        match seen.last() {
            None => drop(events.recv_timeout(TOLD_MAX)),
            // The owner resumed and stopped it just before, and this has undone the stop.
            Some(last) if last.name == "RESUME" && seen.iter().any(|one| one.name == "STOP") => {
                *runs = false;
                return self.qmp.stop().is_ok();
            }
            Some(last) => *runs = last.name == "RESUME",
        }
        true
    }

    /// Waits for the event of a stop that QEMU has not answered. None once throttling or
    /// QEMU's migration is over: the stop may still happen later, and counts as the agent's
    /// then, too.
    fn wait_stop(&self, asked: Instant, events: &Receiver<Event>) -> Option<Event> {
        let is_it = |event: &Event| event.name == "STOP" && event.at >= asked;
        while !self.state.lock().over && !self.stops.0.lock().ended {
            match events.recv_timeout(TOLD_MAX) {
                Ok(event) if is_it(&event) => return Some(event),
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        events.try_iter().find(is_it)
    }

    /// Lets the VM run for its part of a period, and longer while it isn't throttled.
    /// Returns the length of the next stop; none at the end.
    fn wait_run(&self) -> Option<Duration> {
        let begun = Instant::now();
        let mut state = self.state.lock();
        loop {
            if state.over || self.stops.0.lock().ended {
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
        while !state.over && state.share < 1.0 {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_before_the_agents_request_is_the_owners() {
        let (stops, first) = (OurStops::default(), Instant::now());
        let after = |ms| first + Duration::from_millis(ms);
        assert!(!stops.take_slice(first), "nothing was asked for");
        stops.0.lock().untold.extend([after(10), after(60)]);
        assert!(!stops.take_slice(after(9)));
        assert!(stops.take_slice(after(11)));
        assert!(!stops.take_slice(after(30)), "between two slices");
        assert!(stops.take_slice(after(60)));
        assert!(!stops.take_slice(after(61)));
    }
}
