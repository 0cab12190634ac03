//! Slows threads of a process down, and lets them go again whatever happens.
//!
//! The threads go into a cgroup of their own below the one they are in, so that
//! whatever holds for that one still holds for them. The group has a quota of
//! CPU time. When it is lifted they go back and the group goes.
//!
//! A program that is killed can't lift anything. So a note is on disk before the
//! group is made, and the next start of the program lifts what it finds there:
//! see [`Notes::left`].

#![forbid(unsafe_code)]

mod error;
mod group;
mod hierarchy;
mod note;
mod period;
mod used;

pub use error::QuotaError;
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
    group: Group,
    /// None once it is lifted.
    note: Option<Note>,
    threads: Vec<u32>,
    quota: Option<Quota>,
}

impl Slowed {
    /// Prepares to slow threads of the process `pid`. Nothing is slowed yet.
    ///
    /// # Errors
    /// If this host has no way to, which says why; nothing is left behind.
    pub fn new(notes: &Notes, pid: u32) -> Result<Self, QuotaError> {
        let group = Group::place(pid)?;
        let note = notes.write(pid, group.clone())?;
        let slowed = Self { pid, group, note: Some(note), threads: Vec::new(), quota: None };
        slowed.group.make()?;
        Ok(slowed)
    }

    /// What slows them, for a report.
    #[must_use]
    pub fn by(&self) -> String {
        self.group.by()
    }

    /// From now on this thread, too, shares what [`Slowed::set`] gives. One that is
    /// not the process's any more, as of a vCPU that was unplugged, is left alone.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn add(&mut self, thread: u32) -> Result<(), QuotaError> {
        let is_its = Path::new(&format!("/proc/{}/task/{thread}", self.pid)).exists();
        if is_its && !self.threads.contains(&thread) {
            self.group.add_thread(thread)?;
            self.threads.push(thread);
        }
        Ok(())
    }

    /// The threads together get `cpus` seconds of CPU a second at most, or what
    /// they want.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn set(&mut self, cpus: Option<f64>) -> Result<(), QuotaError> {
        let quota = cpus.map(Quota::of);
        if quota != self.quota {
            self.group.set(quota)?;
            self.quota = quota;
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
        self.group.lift()?;
        note.remove()?;
        self.note = None;
        Ok(())
    }
}

impl Drop for Slowed {
    fn drop(&mut self) {
        if let Err(error) = self.lift() {
            tracing::error!(%error, "threads may stay throttled until the agent starts again");
        }
    }
}
