//! Slows threads of a process down, and lets them go again whatever happens.
//!
//! The threads go into a cgroup below the one they are in, so that whatever holds for
//! that one still holds for them: its own quota is not touched. libvirt gives each vCPU
//! a cgroup, so there may be several. Ours have a quota of CPU time. When it is lifted,
//! threads go back to where each was, and the groups go.
//!
//! A program that is killed can't lift anything. So a note is on disk before a
//! group is made, and the next start of the program lifts what it finds there:
//! see [`Notes::left`].
//!
//! It also knows what memory the cgroups of a process leave it: [`memory_left`].

#![forbid(unsafe_code)]

mod error;
mod group;
mod hierarchy;
mod memory;
mod note;
mod period;
mod used;

pub use error::QuotaError;
pub use memory::memory_left;
pub use note::{Left, Notes};
pub use period::{CPUS_MIN, Quota};
pub use used::{Used, used};

use std::path::Path;

use group::Group;
use note::Note;

/// Threads that are slowed, until this is lifted or dropped.
#[derive(Debug)]
pub struct Slowed {
    pid: u32,
    notes: Notes,
    /// One below each of the groups that the threads were in.
    groups: Vec<Members>,
    /// None once it is lifted.
    note: Option<Note>,
}

/// A group, and who of the process is in it.
#[derive(Debug)]
struct Members {
    group: Group,
    threads: Vec<u32>,
    quota: Option<Quota>,
    is_made: bool,
}

impl Slowed {
    /// Prepares to slow these threads of the process `pid`, and perhaps more of them
    /// later. Nothing is slowed yet.
    ///
    /// # Errors
    /// If this host has no way to, which says why; nothing is left behind.
    pub fn new(notes: &Notes, pid: u32, threads: &[u32]) -> Result<Self, QuotaError> {
        // With none of them, whether there is a way shows by the process itself.
        let threads = if threads.is_empty() { &[pid] } else { threads };
        let mut slowed = Self { pid, notes: notes.clone(), groups: Vec::new(), note: None };
        for thread in threads {
            slowed.place(*thread)?;
        }
        Ok(slowed)
    }

    /// What slows them, for a report.
    #[must_use]
    pub fn by(&self) -> String {
        self.groups.first().map(|members| members.group.by()).unwrap_or_default()
    }

    /// From now on this thread, too, shares what [`Slowed::set`] gives. One that is
    /// not the process's any more, as of a vCPU that was unplugged, is left alone.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn add(&mut self, thread: u32) -> Result<(), QuotaError> {
        let is_its = Path::new(&format!("/proc/{}/task/{thread}", self.pid)).exists();
        if is_its && !self.groups.iter().any(|members| members.threads.contains(&thread)) {
            let members = self.place(thread)?;
            members.group.add_thread(thread)?;
            members.threads.push(thread);
        }
        Ok(())
    }

    /// The group for a thread, which is made if it is the first from where it is.
    fn place(&mut self, thread: u32) -> Result<&mut Members, QuotaError> {
        let group = Group::place(self.pid, thread)?;
        let known = self.groups.iter().position(|members| members.group.is_at(&group));
        if known.is_none() {
            let (threads, quota, is_made) = (Vec::new(), None, false);
            self.groups.push(Members { group, threads, quota, is_made });
            let groups = self.groups.iter().map(|members| members.group.clone()).collect();
            self.note = Some(self.notes.write(self.pid, groups)?);
        }
        let at = known.unwrap_or(self.groups.len() - 1);
        let members = &mut self.groups[at];
        if !members.is_made {
            // Half made, it goes with the others, or is made the next time.
            members.group.make()?;
            members.is_made = true;
        }
        Ok(members)
    }

    /// The threads together get `cpus` seconds of CPU a second at most, or what
    /// they want. Those in several groups get the same each.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn set(&mut self, cpus: Option<f64>) -> Result<(), QuotaError> {
        let all: usize = self.groups.iter().map(|members| members.threads.len()).sum();
        for members in self.groups.iter_mut().filter(|members| !members.threads.is_empty()) {
            let part = members.threads.len() as f64 / all as f64;
            let quota = cpus.map(|cpus| Quota::of(cpus * part));
            if quota != members.quota {
                members.group.set(quota)?;
                members.quota = quota;
            }
        }
        Ok(())
    }

    /// Lets all of them go. Doing it again does nothing.
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

/// Lifts each, whatever becomes of the others.
fn lift_all<'g>(groups: impl Iterator<Item = &'g Group>) -> Result<(), QuotaError> {
    groups.map(Group::lift).fold(Ok(()), Result::and)
}

impl Drop for Slowed {
    fn drop(&mut self) {
        if let Err(error) = self.lift() {
            tracing::error!(%error, "threads may stay throttled until the agent starts again");
        }
    }
}
