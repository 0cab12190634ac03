//! How far a process has ended that was killed.
//!
//! A thread that has begun to end never returns to its program, and a process with a deadly signal
//! gets no new thread. So when all of its threads have begun to end, its program does nothing any
//! more. Then the kernel takes its memory apart, which takes longer the more it has mapped, and
//! closes its files, the last one that was opened first. One of `vhost`, opened after its tap,
//! holds the memory until then.

use std::fs;

use super::{Process, proc_path, stat_at};

/// How far a process has to have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Its program does nothing any more. The kernel may still have its memory and its files.
    Halted,
    /// It has exited, and nothing is left of it.
    Exited,
}

/// Among a thread's flags: it has begun to end (`PF_EXITING` in Linux's `sched.h`).
const ENDING: u64 = 0x4;
/// Where its flags are in `stat`, counted from the third field.
const FLAGS: usize = 6;
/// Where the number of threads is.
const THREADS: usize = 17;

impl Process {
    /// Whether its program does nothing any more: it has exited, or is about to.
    #[must_use]
    pub fn has_halted(&self) -> bool {
        has_ended(self.id.pid, Until::Halted) || !self.is_alive()
    }
}

/// Whether a process that was killed has ended so far, as far as that is seen before its exit.
pub(super) fn has_ended(pid: u32, until: Until) -> bool {
    match until {
        Until::Halted => all_threads_end(pid),
        Until::Exited => false,
    }
}

/// Whether all threads of a process that gets no new ones have begun to end. False if they can't be
/// read.
fn all_threads_end(pid: u32) -> bool {
    let Some(threads) = threads(pid) else { return false };
    // A list that is read while threads end may lack others. So of the list, as many have to end as
    // the process has threads afterwards. One that is not there any more, or can't be read, counts
    // as missing.
    let Some(count) = field(pid, "stat", THREADS) else { return false };
    let flags = |thread: &u32| field(pid, &format!("task/{thread}/stat"), FLAGS);
    let ending = threads.iter().filter_map(flags).filter(|flags| flags & ENDING != 0).count();
    ending > 0 && ending as u64 == count
}

fn threads(pid: u32) -> Option<Vec<u32>> {
    let entries = fs::read_dir(proc_path(pid, "task")).ok()?;
    entries.map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

fn field(pid: u32, file: &str, nth: usize) -> Option<u64> {
    stat_at(&proc_path(pid, file)).ok()?.split_ascii_whitespace().nth(nth)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn a_process_that_runs_is_not_about_to_end() {
        let us = std::process::id();
        // It waits, as a QEMU's threads do.
        let (tell, told) = channel::<()>();
        let waiting = thread::spawn(move || told.recv());
        assert!(threads(us).unwrap().len() >= 2);
        assert!(field(us, "stat", THREADS).unwrap() >= 2);
        for until in [Until::Halted, Until::Exited] {
            assert!(!has_ended(us, until), "{until:?}");
        }
        drop(tell);
        waiting.join().unwrap().unwrap_err();
    }

    #[test]
    fn what_has_ended_and_was_not_reaped_runs_no_more() {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id();
        let state = || stat_at(&proc_path(pid, "stat")).unwrap();
        while !state().starts_with(" Z") {
            thread::yield_now();
        }
        assert_eq!(threads(pid).unwrap(), [pid]);
        assert!(has_ended(pid, Until::Halted));
        child.wait().unwrap();
        assert!(!has_ended(pid, Until::Halted), "nothing is known of it");
    }
}
