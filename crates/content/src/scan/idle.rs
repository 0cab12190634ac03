//! The priority of a thread that runs only on an otherwise idle CPU.

use std::io;

use rustix::process::setpriority_process;
use rustix::thread::gettid;

const NICE_MAX: i32 = 19;

/// Makes the calling thread run only when its CPU is idle. The nice value is for a system that
/// refuses that policy, and for its effect among groups of threads.
pub(super) fn only_when_idle() -> io::Result<()> {
    // The kernel takes a thread's number for a process's here.
    let nice = setpriority_process(Some(gettid()), NICE_MAX);
    data_threads::only_when_idle()?;
    Ok(nice?)
}
