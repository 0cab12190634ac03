//! The thread that has data threads run on idle CPUs only, as far as their floor permits that.
//!
//! It is a thread of its own because it must not wait for a lock that data threads hold longer than
//! for moments: one that runs on idle CPUs only may be without a CPU while it holds one.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;
use policy::yielding::{CpuTime, Yielding};
use rustix::process::Pid;
use rustix::thread::gettid;

use crate::{Joined, State, class, cpu_time, spawn};

const EVERY: Duration = Duration::from_secs(1);

/// Ends its thread when it is dropped.
pub(crate) struct Keeper {
    _stop: Sender<()>,
    _thread: Joined,
}

impl Keeper {
    pub(crate) fn start(state: &Arc<Mutex<State>>) -> io::Result<Self> {
        let (stop, stopped) = channel();
        let state = Arc::clone(state);
        let thread = spawn("cpu-floor", move || keep(&state, &stopped))?;
        Ok(Self { _stop: stop, _thread: thread.into() })
    }
}

fn keep(state: &Mutex<State>, stopped: &Receiver<()>) {
    if let Some(why) = impossible() {
        state.lock().note(Some(format!("cpu-floor is not used: {why}")));
        return;
    }
    let (mut yielding, mut times) = (Yielding::default(), Times::default());
    while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
        let (floor, members) = {
            let state = state.lock();
            (state.floor(), state.members.clone())
        };
        let Some(floor) = floor else {
            (yielding, times) = (Yielding::default(), Times::default());
            continue;
        };
        let used = times.used(&members);
        let class = yielding.next(floor.share(), used);
        tracing::trace!(?class, ?used, "data threads");
        let mut state = state.lock();
        // Meanwhile the VM may have been stopped.
        if state.floor().is_some() {
            state.turn(class);
        }
    }
}

/// Why the system can't keep a floor.
fn impossible() -> Option<String> {
    if time_of(gettid()).is_none() {
        return Some("this kernel does not count how long threads wait for a CPU".to_owned());
    }
    let error = class::try_on_this_thread().err()?;
    Some(format!(
        "the system does not let threads return from idle CPUs ({error}); the agent needs \
         CAP_SYS_NICE, or a higher RLIMIT_NICE (LimitNICE= in its unit)"
    ))
}

fn time_of(thread: Pid) -> Option<CpuTime> {
    cpu_time(NonZeroU32::new(thread.as_raw_nonzero().get().unsigned_abs())?)
}

/// The CPU time of each thread at the last query.
#[derive(Default)]
struct Times(HashMap<Pid, CpuTime>);

impl Times {
    /// What `members` have used since the last query.
    fn used(&mut self, members: &[Pid]) -> CpuTime {
        let time = |thread: &Pid| Some((*thread, time_of(*thread)?));
        let now: HashMap<Pid, CpuTime> = members.iter().filter_map(time).collect();
        let mut used = CpuTime::default();
        for (thread, time) in &now {
            let more = added(self.0.get(thread).copied(), *time, || is_runnable(*thread));
            used.ran += more.ran;
            used.waited += more.waited;
        }
        self.0 = now;
        used
    }
}

/// What a thread has used since the last query; one that is new here, since its start.
///
/// The kernel adds a wait when it ends. So a thread that is runnable, and has neither run nor ended
/// a wait, counts as one that has waited all the time.
fn added(before: Option<CpuTime>, now: CpuTime, is_runnable: impl FnOnce() -> bool) -> CpuTime {
    if before == Some(now) {
        let waited = if is_runnable() { EVERY } else { Duration::ZERO };
        return CpuTime { waited, ..CpuTime::default() };
    }
    let before = before.unwrap_or_default();
    CpuTime {
        ran: now.ran.saturating_sub(before.ran),
        waited: now.waited.saturating_sub(before.waited),
    }
}

/// Whether a thread of this process runs or waits for a CPU.
fn is_runnable(thread: Pid) -> bool {
    let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    fs::read_to_string(path).is_ok_and(|stat| state_of(&stat) == Some('R'))
}

/// The state follows the thread's name, which may have any characters.
fn state_of(stat: &str) -> Option<char> {
    stat.rsplit_once(") ")?.1.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_threads_used_is_counted_since_the_last_query() {
        const SOME: Duration = Duration::from_millis(5);
        let mut times = Times::default();
        assert_eq!(times.used(&[]), CpuTime::default());
        let ran = || time_of(gettid()).unwrap().ran;
        while ran() < SOME {}
        let all = times.used(&[gettid()]).ran;
        assert!(all >= SOME, "{all:?}");
        while ran() < all + SOME {}
        let more = times.used(&[gettid()]).ran;
        assert!(more >= SOME && all + more <= ran(), "{all:?} {more:?}");
        let nobody = Pid::from_raw(i32::MAX).unwrap();
        assert_eq!(times.used(&[nobody]), CpuTime::default());
    }

    #[test]
    fn a_wait_that_has_not_ended_counts() {
        let time = |ran, waited| CpuTime {
            ran: Duration::from_millis(ran),
            waited: Duration::from_millis(waited),
        };
        for (before, now, is_runnable, expected) in [
            (None, time(3, 4), true, time(3, 4)),
            (Some(time(3, 4)), time(5, 9), true, time(2, 5)),
            (Some(time(3, 4)), time(3, 4), true, time(0, 1000)),
            (Some(time(3, 4)), time(3, 4), false, time(0, 0)),
            // The number of a thread that has ended is used again.
            (Some(time(3, 4)), time(1, 5), false, time(0, 1)),
        ] {
            assert_eq!(added(before, now, || is_runnable), expected, "{before:?} {now:?}");
        }
    }

    #[test]
    fn a_thread_that_sleeps_is_not_runnable() {
        let ((tell, told), (end, ended)) = (channel(), channel::<()>());
        let sleeper = std::thread::spawn(move || {
            tell.send(gettid()).unwrap();
            let _ = ended.recv();
        });
        let thread = told.recv().unwrap();
        while is_runnable(thread) {
            std::thread::yield_now();
        }
        assert!(is_runnable(gettid()));
        drop(end);
        sleeper.join().unwrap();
    }

    #[test]
    fn a_name_may_look_like_a_state() {
        assert_eq!(state_of("12 (a) R (b) S 1 2"), Some('S'));
        assert_eq!(state_of("12 (lane-0-send) R 1"), Some('R'));
        assert_eq!(state_of("12"), None);
    }
}
