//! Throttles threads of a process, and releases them whatever happens.
//!
//! The threads go into a cgroup below their current one, so that the current one's limits still
//! apply to them, and its own quota stays untouched. libvirt gives each vCPU a cgroup, so there may
//! be several. Our groups have a quota of CPU time. When it is lifted, each thread returns to the
//! group that it came from, and our groups are removed.
//!
//! A program that is killed can't lift anything. So a note is written to disk before a group is
//! made, and the program's next start lifts what the note names: see [`Notes::left`].
//!
//! [`memory_left`] tells how much memory the cgroups of a process leave it, and [`memory_room`]
//! what another process in them can get. [`cpu_weights`] tells which of them share out CPU time
//! between two processes.

#![forbid(unsafe_code)]

mod error;
mod group;
mod hierarchy;
mod memory;
mod note;
mod period;
mod scheduling;
mod used;
mod weights;

pub use error::{NoteError, QuotaError};
pub use memory::{memory_left, memory_room};
pub use note::{Left, Notes};
pub use period::{CPUS_MIN, Quota};
pub use used::{Used, used};
pub use weights::cpu_weights;

use std::path::Path;

use group::Group;
use note::Note;
use scheduling::is_real_time;

/// Threads that are throttled until this is lifted or dropped.
#[derive(Debug)]
pub struct Throttled {
    pid: u32,
    notes: Notes,
    /// One below each of the groups that the threads were in.
    groups: Vec<Members>,
    /// None once it is lifted.
    note: Option<Note>,
}

/// A thread is assumed to want at least this much, in seconds of CPU time a second.
const WANT_LEAST: f64 = 1e-3;

/// A group, and the process's threads in it.
#[derive(Debug)]
struct Members {
    group: Group,
    threads: Vec<u32>,
    quota: Option<Quota>,
    /// Whether the group has this quota. Setting one can fail half-way.
    is_set: bool,
    is_made: bool,
}

impl Throttled {
    /// Prepares to throttle these threads of the process `pid`; others can be added later.
    /// Throttles none yet.
    ///
    /// # Errors
    /// If this host can't throttle them, with the reason; nothing is left behind.
    pub fn new(notes: &Notes, pid: u32, threads: &[u32]) -> Result<Self, QuotaError> {
        let groups = places(pid, threads)?;
        let mut slowed = Self { pid, notes: notes.clone(), groups: Vec::new(), note: None };
        slowed.prepare(groups.iter())?;
        for members in &mut slowed.groups {
            members.make()?;
        }
        Ok(slowed)
    }

    /// The mechanism that throttles them, for a report.
    #[must_use]
    pub fn by(&self) -> String {
        self.groups.first().map(|members| members.group.by()).unwrap_or_default()
    }

    /// Adds threads to those that share the quota of [`Throttled::set`]. A thread that is not the
    /// process's any more, such as that of an unplugged vCPU, is left alone.
    ///
    /// # Errors
    /// If the system refuses. The other threads are added nonetheless, unless the note can't be
    /// written.
    pub fn add(&mut self, threads: impl IntoIterator<Item = u32>) -> Result<(), QuotaError> {
        let is_known =
            |thread: u32| self.groups.iter().any(|members| members.threads.contains(&thread));
        let is_its = |thread: u32| Path::new(&format!("/proc/{}/task/{thread}", self.pid)).exists();
        let mut outcome = Ok(());
        let mut placed = Vec::new();
        for thread in threads {
            if is_known(thread) || !is_its(thread) {
                continue;
            }
            match place(self.pid, thread) {
                Ok(group) => placed.push((thread, group)),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        self.prepare(placed.iter().map(|(_, group)| group))?;
        for (thread, group) in placed {
            outcome = outcome.and(self.put(thread, &group));
        }
        outcome
    }

    /// Takes up the groups that are not known yet, once a note on disk names them: a group without
    /// a note would outlast a program that is killed. There is one note for all, because a VM may
    /// have hundreds of vCPUs, each in a group of its own.
    fn prepare<'g>(&mut self, groups: impl Iterator<Item = &'g Group>) -> Result<(), QuotaError> {
        let mut more: Vec<Group> = Vec::new();
        for group in groups {
            let mut known = self.groups.iter().map(|members| &members.group).chain(&more);
            if !known.any(|known| known.is_at(group)) {
                more.push(group.clone());
            }
        }
        if more.is_empty() {
            return Ok(());
        }
        let known = self.groups.iter().map(|members| &members.group);
        let all = known.chain(&more).cloned().collect();
        self.note = Some(self.notes.write(self.pid, all)?);
        self.groups.extend(more.into_iter().map(Members::of));
        Ok(())
    }

    /// Moves a thread to its group, which is made for the first one.
    fn put(&mut self, thread: u32, group: &Group) -> Result<(), QuotaError> {
        let its = self.groups.iter_mut().find(|members| members.group.is_at(group));
        let Some(members) = its else { return Ok(()) };
        members.make()?;
        members.group.add_thread(thread)?;
        members.threads.push(thread);
        Ok(())
    }

    /// Limits the threads together to `cpus` seconds of CPU time a second; none means no limit.
    /// Each group gets a share that is proportional to what its threads want, in seconds of CPU time
    /// a second: with equal shares a busy thread would get less than its part, and an idle one have
    /// time to spare.
    ///
    /// # Errors
    /// If the system refuses. The other groups get their share nonetheless.
    pub fn set(&mut self, cpus: Option<f64>, wants: impl Fn(u32) -> f64) -> Result<(), QuotaError> {
        let of = |members: &Members| -> f64 {
            members.threads.iter().map(|thread| wants(*thread).max(WANT_LEAST)).sum()
        };
        let all: f64 = self.groups.iter().map(of).sum();
        let mut outcome = Ok(());
        for members in self.groups.iter_mut().filter(|members| !members.threads.is_empty()) {
            let quota = cpus.map(|cpus| Quota::of(cpus * of(members) / all));
            if quota != members.quota || !members.is_set {
                let set = members.group.set(quota);
                (members.quota, members.is_set) = (quota, set.is_ok());
                outcome = outcome.and(set);
            }
        }
        outcome
    }

    /// Releases all threads. Calling it again does nothing.
    ///
    /// # Errors
    /// If the system refuses. The note stays, so that the next start of the
    /// program tries again.
    pub fn lift(&mut self) -> Result<(), QuotaError> {
        let Some(note) = &self.note else { return Ok(()) };
        lift_all(self.groups.iter().map(|members| &members.group))?;
        note.remove()?;
        self.note = None;
        Ok(())
    }
}

impl Members {
    fn of(group: Group) -> Self {
        Self { group, threads: Vec::new(), quota: None, is_set: true, is_made: false }
    }

    /// Makes the group. One that is only half made is lifted with the others, or made the next
    /// time.
    fn make(&mut self) -> Result<(), QuotaError> {
        if !self.is_made {
            self.group.make()?;
            self.is_made = true;
        }
        Ok(())
    }
}

/// Whether these threads of the process `pid` could be throttled. Changes nothing.
///
/// # Errors
/// If this host can't throttle them, with the reason.
pub fn check(pid: u32, threads: &[u32]) -> Result<(), QuotaError> {
    places(pid, threads)?.iter().try_for_each(Group::check)
}

/// The locations of the groups for these threads. Without threads, the process itself shows whether
/// the host can throttle.
fn places(pid: u32, threads: &[u32]) -> Result<Vec<Group>, QuotaError> {
    let threads = if threads.is_empty() { &[pid] } else { threads };
    threads.iter().map(|thread| place(pid, *thread)).collect()
}

/// The place of the group for a thread that a quota can throttle.
fn place(pid: u32, thread: u32) -> Result<Group, QuotaError> {
    if is_real_time(pid, thread) {
        return Err(QuotaError::RealTime { thread });
    }
    Group::place(pid, thread)
}

/// Lifts each group, even if another fails.
fn lift_all<'g>(groups: impl Iterator<Item = &'g Group>) -> Result<(), QuotaError> {
    groups.map(Group::lift).fold(Ok(()), Result::and)
}

impl Drop for Throttled {
    fn drop(&mut self) {
        if let Err(error) = self.lift() {
            tracing::error!(%error, "threads may stay throttled until the agent starts again");
        }
    }
}
