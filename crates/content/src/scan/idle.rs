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
    set_policy_idle()?;
    Ok(nice?)
}

#[expect(unsafe_code, reason = "rustix has no call for scheduling policies")]
fn set_policy_idle() -> io::Result<()> {
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread, and the kernel copies the parameter, which lives until
    // then.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const none) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
