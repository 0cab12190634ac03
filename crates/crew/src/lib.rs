//! The threads of one migration that carry data, and what of the CPUs they get.
//!
//! Such a thread says [`Crew::join`] when it starts; from then on the crew's
//! terms hold for it, also those that come later. Threads that only lead or
//! watch don't join, so a migration answers however busy its host is.

#![forbid(unsafe_code)]

mod cpus;

use std::marker::PhantomData;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::process::{Pid, getpriority_process, setpriority_process};
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

pub use cpus::{Cpus, CpusError};

/// How far the crew's nice value is from the agent's own: about a tenth of an
/// even share of a CPU that others want, or ten times one.
const NICE_STEP: i32 = 10;
const NICE: std::ops::RangeInclusive<i32> = -20..=19;

/// Who goes first where there are fewer CPUs than threads that want them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// VMs and everybody else.
    #[default]
    Low,
    /// Nobody.
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

/// What holds for all threads of a crew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// Who goes first.
    pub priority: Priority,
    /// The CPUs they run on; none for those of the agent.
    #[serde(default)]
    pub cpus: Option<Cpus>,
}

/// The threads of one migration that carry data, at one of its ends.
#[derive(Debug)]
pub struct Crew {
    /// What the thread had that made the crew, as the agent's others have.
    base: Base,
    state: Mutex<State>,
}

#[derive(Debug)]
struct Base {
    nice: i32,
    /// None if the system doesn't say.
    cpus: Option<CpuSet>,
}

#[derive(Debug)]
struct State {
    terms: Terms,
    members: Vec<Pid>,
    refused: Vec<String>,
}

/// A thread's place in a crew: kept until the thread ends.
#[derive(Debug)]
#[must_use = "the thread leaves its crew when this is dropped"]
pub struct Member {
    crew: Arc<Crew>,
    thread: Pid,
    /// The thread that joined is the one that leaves.
    _of_this_thread: PhantomData<*const ()>,
}

impl Crew {
    /// A crew without threads yet, to be made on a thread that runs as the
    /// agent's others do.
    #[must_use]
    pub fn new(terms: Terms) -> Arc<Self> {
        let base = Base {
            nice: getpriority_process(None).unwrap_or(0),
            cpus: sched_getaffinity(None).ok(),
        };
        let state = State { terms, members: Vec::new(), refused: Vec::new() };
        Arc::new(Self { base, state: Mutex::new(state) })
    }

    /// The calling thread is one of the crew from now on.
    pub fn join(self: &Arc<Self>) -> Member {
        let thread = gettid();
        let mut state = self.state.lock();
        state.members.push(thread);
        // A thread starts as the agent's others are: nothing to undo.
        let terms = state.terms.clone();
        if terms.priority != Priority::Normal {
            state.note(self.renice(thread, terms.priority));
        }
        if terms.cpus.is_some() {
            state.note(self.pin(thread, terms.cpus.as_ref()));
        }
        drop(state);
        Member { crew: Arc::clone(self), thread, _of_this_thread: PhantomData }
    }

    /// Other terms from now on, for those who have joined too.
    pub fn set(&self, terms: &Terms) {
        let mut state = self.state.lock();
        let before = std::mem::replace(&mut state.terms, terms.clone());
        for thread in state.members.clone() {
            if terms.priority != before.priority {
                state.note(self.renice(thread, terms.priority));
            }
            if terms.cpus != before.cpus {
                state.note(self.pin(thread, terms.cpus.as_ref()));
            }
        }
    }

    /// What the system refused since this was last asked, for the operator.
    #[must_use]
    pub fn refused(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().refused)
    }

    fn renice(&self, thread: Pid, priority: Priority) -> Option<String> {
        let nice = priority.nice(self.base.nice);
        // To the kernel a thread's number is a process's here.
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
    /// Many threads meet the same refusal; it is said once.
    fn note(&mut self, refused: Option<String>) {
        if let Some(refused) = refused
            && !self.refused.contains(&refused)
        {
            self.refused.push(refused);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Under the lock: a number of a thread that has ended may be another's.
        let mut state = self.crew.state.lock();
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

    /// A thread that is in `crew` while `meanwhile` looks at it.
    fn with_member(crew: &Arc<Crew>, meanwhile: impl FnOnce(Pid)) {
        let ((tell, told), (end, over)) = (channel(), channel::<()>());
        thread::scope(|scope| {
            scope.spawn(move || {
                let _member = crew.join();
                tell.send(gettid()).unwrap();
                let _ = over.recv();
            });
            meanwhile(told.recv().unwrap());
            drop(end);
        });
    }

    fn terms(priority: Priority, cpus: Option<&str>) -> Terms {
        Terms { priority, cpus: cpus.map(|list| list.parse().unwrap()) }
    }

    #[test]
    fn a_thread_gets_the_terms_when_it_joins_and_when_they_change() {
        let all = cpus(gettid());
        let own = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| own.is_set(*cpu)).unwrap().to_string();
        let before = nice(gettid());
        let crew = Crew::new(terms(Priority::Low, Some(&first)));
        with_member(&crew, |thread| {
            assert_eq!(nice(thread), Priority::Low.nice(before));
            assert_eq!(cpus(thread), first);
            crew.set(&terms(Priority::Low, None));
            assert_eq!((nice(thread), cpus(thread)), (Priority::Low.nice(before), all));
        });
        // Whoever did not join is as before; who has left is forgotten.
        assert_eq!(nice(gettid()), before);
        assert!(crew.state.lock().members.is_empty());
        assert_eq!(crew.refused(), Vec::<String>::new());
    }

    #[test]
    fn a_refusal_is_said_once_and_in_words() {
        let nobody_has = (CpuSet::MAX_CPU - 1).to_string();
        let crew = Crew::new(terms(Priority::Low, Some(&nobody_has)));
        with_member(&crew, |_| with_member(&crew, |_| {}));
        let refused = crew.refused();
        let [refused] = refused.as_slice() else { panic!("{refused:?}") };
        assert!(refused.contains(&nobody_has) && refused.contains("only"), "{refused}");
        assert!(crew.refused().is_empty());
    }

    #[test]
    fn nice_values_stay_where_there_are_any() {
        for (priority, base, nice) in [
            (Priority::Low, 0, 10),
            (Priority::Low, 15, 19),
            (Priority::Normal, 5, 5),
            (Priority::High, 0, -10),
            (Priority::High, -15, -20),
        ] {
            assert_eq!(priority.nice(base), nice, "{priority:?} from {base}");
        }
    }
}
