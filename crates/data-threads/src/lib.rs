//! The data threads of one migration, and how they are scheduled.
//!
//! A data thread calls [`DataThreads::join`] when it starts. From then on the scheduling parameters
//! apply to it, including later changes. Threads that only lead or watch don't join, so a migration
//! responds however busy its host is.
//!
//! A panic of a data thread ends the migration: the data that it held is lost, and without it the
//! migration would only look slow.

#![forbid(unsafe_code)]

mod cpus;
mod faults;
mod thread;

use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustix::process::{Pid, getpriority_process, setpriority_process};
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use tracing::Span;
use tracing::span::EnteredSpan;

pub use cpus::{Cpus, CpusError};
pub use faults::point;
pub use thread::{migration_span, spawn};

/// Distance of their nice value from the agent's own: about a third of an even share of a contended
/// CPU, or three times one. When all CPUs are busy, the migration takes the same CPU time from
/// others however long it lasts: a smaller share only makes it last longer.
const NICE_STEP: i32 = 5;
const NICE: std::ops::RangeInclusive<i32> = -20..=19;

/// What goes first when CPUs are contended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// VMs and all other processes.
    #[default]
    Low,
    /// No preference.
    Normal,
    /// The migration.
    High,
}

impl Priority {
    fn nice(self, base: i32) -> i32 {
        let nice = match self {
            Self::Low => base + NICE_STEP,
            Self::Normal => base,
            Self::High => base - NICE_STEP,
        };
        nice.clamp(*NICE.start(), *NICE.end())
    }
}

/// How all data threads of a migration are scheduled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedParams {
    /// What goes first when CPUs are contended.
    pub priority: Priority,
    /// The CPUs that they run on; none means those of the agent.
    #[serde(default)]
    pub cpus: Option<Cpus>,
}

/// The data threads of one migration at one of its ends.
pub struct DataThreads {
    /// Scheduling of the creating thread, which is that of the agent's other threads.
    base: Base,
    state: Mutex<State>,
    /// The log span for threads that were started before the migration was known.
    about: OnceLock<Span>,
    /// Called with the name of each thread that panics.
    panicked: Box<dyn Fn(&str) + Send + Sync>,
}

#[derive(Debug)]
struct Base {
    nice: i32,
    /// None if the system doesn't report them.
    cpus: Option<CpuSet>,
}

#[derive(Debug)]
struct State {
    params: SchedParams,
    members: Vec<Pid>,
    refused: Vec<String>,
}

/// A thread's membership, kept until the thread ends.
#[must_use = "the thread leaves its threads when this is dropped"]
pub struct Member {
    threads: Arc<DataThreads>,
    thread: Pid,
    _guard: Guard,
    _about: Option<EnteredSpan>,
    /// Keeps a member on the thread that joined.
    _of_this_thread: PhantomData<*const ()>,
}

/// Reports a panic of its thread, until it is dropped.
#[must_use = "a panic is reported only while this is there"]
pub struct Guard(Arc<DataThreads>);

impl DataThreads {
    /// Without threads yet. Call it on a thread with the scheduling of the agent's other threads. A
    /// thread that panics calls `panicked` with its name.
    #[must_use]
    pub fn new(params: SchedParams, panicked: impl Fn(&str) + Send + Sync + 'static) -> Arc<Self> {
        let base = Base {
            nice: getpriority_process(None).unwrap_or(0),
            cpus: sched_getaffinity(None).ok(),
        };
        let state = State { params, members: Vec::new(), refused: Vec::new() };
        let (state, about) = (Mutex::new(state), OnceLock::new());
        Arc::new(Self { base, state, about, panicked: Box::new(panicked) })
    }

    /// For a thread that the migration depends on, but that keeps the scheduling of the agent's
    /// other threads.
    pub fn guard(self: &Arc<Self>) -> Guard {
        Guard(Arc::clone(self))
    }

    /// The migration is known now: threads that join from now on log in this span.
    pub fn are_about(&self, span: Span) {
        // The span never changes.
        let _ = self.about.set(span);
    }

    /// Makes the calling thread a data thread.
    pub fn join(self: &Arc<Self>) -> Member {
        let thread = gettid();
        let mut state = self.state.lock();
        state.members.push(thread);
        // A new thread has the agent's scheduling, so there is nothing to undo.
        let params = state.params.clone();
        if params.priority != Priority::Normal {
            state.note(self.renice(thread, params.priority));
        }
        if params.cpus.is_some() {
            state.note(self.pin(thread, params.cpus.as_ref()));
        }
        drop(state);
        let threads = Arc::clone(self);
        let about = self.about.get().filter(|_| Span::current().is_none());
        let about = about.map(|span| span.clone().entered());
        Member {
            threads,
            thread,
            _guard: self.guard(),
            _about: about,
            _of_this_thread: PhantomData,
        }
    }

    /// Changes the parameters, also for threads that have joined.
    pub fn set(&self, params: &SchedParams) {
        let mut state = self.state.lock();
        let before = std::mem::replace(&mut state.params, params.clone());
        for thread in state.members.clone() {
            if params.priority != before.priority {
                state.note(self.renice(thread, params.priority));
            }
            if params.cpus != before.cpus {
                state.note(self.pin(thread, params.cpus.as_ref()));
            }
        }
    }

    /// What the system has refused since the last call, for the operator.
    #[must_use]
    pub fn refused(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().refused)
    }

    fn renice(&self, thread: Pid, priority: Priority) -> Option<String> {
        let nice = priority.nice(self.base.nice);
        // Linux accepts a thread ID as the process here.
        let error = setpriority_process(Some(thread), nice).err()?;
        let name = format!("{priority:?}").to_lowercase();
        Some(format!(
            "priority {name} is not used: the system refuses nice {nice} ({error}); the agent \
             needs CAP_SYS_NICE, or a higher RLIMIT_NICE (LimitNICE= in its unit)"
        ))
    }

    fn pin(&self, thread: Pid, cpus: Option<&Cpus>) -> Option<String> {
        let set = match cpus {
            Some(cpus) => cpus.set(),
            None => self.base.cpus?,
        };
        let error = sched_setaffinity(Some(thread), &set).err()?;
        let wanted = cpus.map_or_else(|| "all".to_owned(), ToString::to_string);
        let why = match (error, &self.base.cpus) {
            (rustix::io::Errno::INVAL, Some(own)) => {
                format!("the agent has only {}", Cpus::of(own))
            }
            _ => error.to_string(),
        };
        Some(format!("CPUs {wanted} are not used: {why}"))
    }
}

impl State {
    /// Many threads meet the same refusal; it is recorded once.
    fn note(&mut self, refused: Option<String>) {
        if let Some(refused) = refused
            && !self.refused.contains(&refused)
        {
            self.refused.push(refused);
        }
    }
}

impl fmt::Debug for DataThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { base, state, about: _, panicked: _ } = self;
        f.debug_struct("DataThreads")
            .field("base", base)
            .field("state", state)
            .finish_non_exhaustive()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            (self.0.panicked)(std::thread::current().name().unwrap_or("without a name"));
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Under the lock: the ID of a thread that has ended may be reused.
        let mut state = self.threads.state.lock();
        if let Some(place) = state.members.iter().position(|member| *member == self.thread) {
            state.members.swap_remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use std::thread;

    use super::*;

    fn nice(thread: Pid) -> i32 {
        getpriority_process(Some(thread)).unwrap()
    }

    fn cpus(thread: Pid) -> String {
        Cpus::of(&sched_getaffinity(Some(thread)).unwrap()).to_string()
    }

    /// Calls `meanwhile` with a data thread's ID while that thread runs.
    fn with_member(threads: &Arc<DataThreads>, meanwhile: impl FnOnce(Pid)) {
        let ((tell, told), (end, over)) = (channel(), channel::<()>());
        thread::scope(|scope| {
            scope.spawn(move || {
                let _member = threads.join();
                tell.send(gettid()).unwrap();
                let _ = over.recv();
            });
            meanwhile(told.recv().unwrap());
            drop(end);
        });
    }

    fn params(priority: Priority, cpus: Option<&str>) -> SchedParams {
        SchedParams { priority, cpus: cpus.map(|list| list.parse().unwrap()) }
    }

    #[test]
    fn a_thread_gets_the_terms_when_it_joins_and_when_they_change() {
        let all = cpus(gettid());
        let own = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| own.is_set(*cpu)).unwrap().to_string();
        let before = nice(gettid());
        let threads = DataThreads::new(params(Priority::Low, Some(&first)), |_| {});
        with_member(&threads, |thread| {
            assert_eq!(nice(thread), Priority::Low.nice(before));
            assert_eq!(cpus(thread), first);
            threads.set(&params(Priority::Low, None));
            assert_eq!((nice(thread), cpus(thread)), (Priority::Low.nice(before), all));
        });
        // A thread that has not joined is unchanged, and one that has left is forgotten.
        assert_eq!(nice(gettid()), before);
        assert!(threads.state.lock().members.is_empty());
        assert_eq!(threads.refused(), Vec::<String>::new());
    }

    #[test]
    fn a_refusal_is_said_once_and_in_words() {
        let nobody_has = (CpuSet::MAX_CPU - 1).to_string();
        let threads = DataThreads::new(params(Priority::Low, Some(&nobody_has)), |_| {});
        with_member(&threads, |_| with_member(&threads, |_| {}));
        let refused = threads.refused();
        let [refused] = refused.as_slice() else { panic!("{refused:?}") };
        assert!(refused.contains(&nobody_has) && refused.contains("only"), "{refused}");
        assert!(threads.refused().is_empty());
    }

    #[test]
    fn a_panic_of_a_thread_is_reported_and_an_ordinary_end_is_not() {
        let (tell, told) = channel();
        let threads = DataThreads::new(SchedParams::default(), move |name| {
            tell.send(name.to_owned()).unwrap();
        });
        for (name, panics) in [("member", true), ("guarded", true), ("ordinary", false)] {
            let threads = Arc::clone(&threads);
            let run = move || {
                let _member = (name != "guarded").then(|| threads.join());
                let _guard = threads.guard();
                assert!(!panics, "on purpose");
            };
            let ended = thread::Builder::new().name(name.to_owned()).spawn(run).unwrap().join();
            assert_eq!(ended.is_err(), panics);
        }
        let mut names: Vec<String> = told.try_iter().collect();
        names.dedup();
        assert_eq!(names, ["member", "guarded"]);
    }

    #[test]
    fn nice_values_stay_where_there_are_any() {
        for (priority, base, nice) in [
            (Priority::Low, 0, 5),
            (Priority::Low, 15, 19),
            (Priority::Normal, 5, 5),
            (Priority::High, 0, -5),
            (Priority::High, -18, -20),
        ] {
            assert_eq!(priority.nice(base), nice, "{priority:?} from {base}");
        }
    }
}
