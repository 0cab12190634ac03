//! The data threads of one migration, and how they are scheduled.
//!
//! A data thread calls [`DataThreads::join`] when it starts. From then on the scheduling parameters
//! apply to it, including later changes. Threads that only lead or watch don't join, so a migration
//! responds however busy its host is.
//!
//! With a [`CpuFloor`], data threads with low priority run on idle CPUs only, as far as the floor
//! permits that (`keeper`).
//!
//! A panic of a data thread ends the migration: the data that it held is lost, and without it the
//! migration would only look slow.

mod class;
mod cpu_floor;
mod cpu_time;
mod cpus;
mod faults;
mod keeper;
mod thread;

use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use policy::yielding::Class;
use rustix::process::{Pid, getpriority_process, setpriority_process};
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use tracing::Span;
use tracing::span::EnteredSpan;

use keeper::Keeper;

pub use class::only_when_idle;
pub use cpu_floor::{CpuFloor, CpuFloorError};
pub use cpu_time::cpu_time;
pub use cpus::{Cpus, CpusError};
pub use faults::point;
pub use policy::yielding::CpuTime;
pub use thread::{Joined, migration_span, spawn};

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
    pub cpus: Option<Cpus>,
    /// The share of CPU time that they get among other threads, with low priority; beyond it they
    /// run on idle CPUs only. None: they are never restricted to idle CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_floor: Option<CpuFloor>,
}

/// The data threads of one migration at one of its ends.
pub struct DataThreads {
    /// Scheduling of the creating thread, which is that of the agent's other threads.
    base: Base,
    state: Arc<Mutex<State>>,
    /// Empty until there is a floor to keep.
    keeper: OnceLock<Keeper>,
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
    /// Members run on idle CPUs only, but not those that joined a moment ago.
    on_idle_cpus: bool,
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
        let (members, refused) = (Vec::new(), Vec::new());
        let state = State { params, members, refused, on_idle_cpus: false };
        let threads = Self {
            base,
            state: Arc::new(Mutex::new(state)),
            keeper: OnceLock::new(),
            about: OnceLock::new(),
            panicked: Box::new(panicked),
        };
        threads.keep_floor();
        Arc::new(threads)
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
        self.leave_idle_cpus(thread);
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
        // First, because a VM may be waiting for these threads.
        if state.floor().is_none() && state.on_idle_cpus {
            state.turn(Class::Normal);
        }
        for thread in state.members.clone() {
            if params.priority != before.priority {
                state.note(self.renice(thread, params.priority));
            }
            if params.cpus != before.cpus {
                state.note(self.pin(thread, params.cpus.as_ref()));
            }
        }
        drop(state);
        self.keep_floor();
    }

    /// Ends a restriction to idle CPUs at once, for a second at most: a VM may have stopped.
    pub fn hurry(&self) {
        let mut state = self.state.lock();
        if state.on_idle_cpus {
            state.turn(Class::Normal);
        }
    }

    /// Starts the thread that keeps the floor, if there is one to keep.
    fn keep_floor(&self) {
        if self.keeper.get().is_some() || self.state.lock().floor().is_none() {
            return;
        }
        match Keeper::start(&self.state) {
            // If there is one by now, this one ends.
            Ok(keeper) => drop(self.keeper.set(keeper)),
            Err(error) => {
                let why = format!("cpu-floor is not used: cannot start its thread ({error})");
                self.state.lock().note(Some(why));
            }
        }
    }

    /// Without it, a thread could be without a CPU while it holds the lock that the others need. A
    /// new thread has the class of the one that started it.
    fn leave_idle_cpus(&self, thread: Pid) {
        if self.keeper.get().is_some() {
            // Where that is refused, no thread is restricted.
            let _ = class::set(thread, Class::Normal);
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
    /// The floor that is kept now.
    fn floor(&self) -> Option<CpuFloor> {
        let is_low = self.params.priority == Priority::Low;
        self.params.cpu_floor.filter(|floor| is_low && *floor != CpuFloor::ALL)
    }

    /// Sets the class of all members.
    fn turn(&mut self, class: Class) {
        for thread in self.members.clone() {
            if let Err(error) = class::set(thread, class) {
                self.note(Some(format!("cpu-floor is not used: {error}")));
            }
        }
        self.on_idle_cpus = class == Class::Idle;
    }

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
        let Self { base, state, keeper: _, about: _, panicked: _ } = self;
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
        self.threads.leave_idle_cpus(self.thread);
        // Under the lock: the ID of a thread that has ended may be reused.
        let mut state = self.threads.state.lock();
        if let Some(place) = state.members.iter().position(|member| *member == self.thread) {
            state.members.swap_remove(place);
        }
        drop(state);
        // It may have been restricted again until then.
        self.threads.leave_idle_cpus(self.thread);
    }
}

#[cfg(test)]
mod tests;
