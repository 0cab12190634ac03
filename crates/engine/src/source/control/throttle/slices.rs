//! Slows a VM by stopping it for a moment, again and again: where the host has
//! no cgroups that bound CPU time.
//!
//! QEMU ends the migration of a VM that stands still once it has nothing left to
//! hand over, whether it is held or not. That is welcome: the VM has to be
//! stopped at some time. But the end of such a slice must not have it run here
//! again. QEMU refuses that until its migration has ended, and it doesn't end
//! before the tap says so: which is said when no slice can end any more.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use parking_lot::{Condvar, Mutex};
use qemu::qmp::{Event, Qmp};

use super::Slicing;

/// One run and one stop. A stop flushes the VM's disks, which takes a
/// millisecond or two.
const PERIOD: Duration = Duration::from_millis(50);
/// A run shorter than this is hardly one.
const RUN_LEAST: Duration = Duration::from_millis(1);
/// QEMU sends the event of a stop before it answers; so long it may take to get here.
const TOLD_MAX: Duration = Duration::from_millis(100);

/// Tells stops of the VM that are for throttling it from all others.
#[derive(Debug, Default)]
pub(crate) struct OurStops(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Stops that QEMU will tell of: when each was asked for.
    untold: VecDeque<Instant>,
    /// One was asked for, whatever came of it.
    any: bool,
    /// A thread stops the VM and lets it run again.
    slicing: bool,
    /// QEMU has handed over all RAM.
    ended: bool,
    /// The last stop, if the VM does not run again after it.
    last: Option<Instant>,
}

impl OurStops {
    /// QEMU told of a stop at that time: whether it was for a slice. One that came
    /// before ours was asked for is its owner's.
    pub(crate) fn take_slice(&self, at: Instant) -> bool {
        let mut known = self.0.lock();
        let ours = known.untold.front().is_some_and(|asked| *asked <= at);
        if ours {
            known.untold.pop_front();
        }
        ours
    }

    /// A stop is about to be asked for.
    fn ask(&self, at: Instant) {
        let mut known = self.0.lock();
        known.any = true;
        known.untold.push_back(at);
    }

    /// When the VM was stopped for its switchover, if that was by us.
    pub(crate) fn last(&self) -> Option<Instant> {
        self.0.lock().last
    }

    /// Whether a VM that stands still may do so because of us.
    pub(crate) fn any(&self) -> bool {
        self.0.lock().any
    }

    /// QEMU has handed over all RAM. Whether it may end its migration at once.
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
    /// What says that QEMU may end its migration.
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

    /// The VM runs for this share of the time.
    pub(super) fn set(&self, share: f64) {
        self.shared.state.lock().share = share;
        self.shared.changed.notify_all();
    }
}

impl Drop for Slices {
    /// The VM runs, unless its owner has paused it or QEMU is done with it.
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
        // Whatever was asked of QEMU has been answered.
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
            // Its owner's pause is none of ours, nor is QEMU's own stop.
            if runs && !self.slice(stop, &events, &mut runs) {
                return;
            }
        }
    }

    /// Stops the VM for so long. Says whether to go on, and in `runs` how it is left.
    ///
    /// Its owner may say `stop` meanwhile, to a VM that stands still already: QEMU
    /// tells nobody of that, and there is nothing to know it by. What does show is
    /// taken as the owner's wish: a stop after a `cont`, and one just before ours.
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
        let Some(told) = told else {
            // It stood already.
            self.stops.0.lock().untold.retain(|untold| *untold != asked);
            return stopped.is_ok();
        };
        self.pause(time);
        if let Some(event) = events.try_iter().last() {
            // Its owner has let it run, and perhaps stopped it again.
            *runs = event.name == "RESUME";
            return true;
        }
        if self.stops.0.lock().ended || self.qmp.cont().is_err() {
            // QEMU is done with it: this was its last stop.
            self.stops.0.lock().last = Some(told.at);
            return false;
        }
        // Unless its owner stops it at once, which is told behind it.
        let _ = events.recv_timeout(TOLD_MAX);
        true
    }

    /// Lets it run for its part of a period, and longer while it isn't slowed.
    /// Says how long it is to stand then; none at the end.
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
    fn a_stop_that_came_before_ours_was_asked_for_is_its_owners() {
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
