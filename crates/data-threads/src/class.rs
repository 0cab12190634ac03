//! How threads compete for CPUs.

use std::io;

use policy::yielding::Class;
use rustix::process::Pid;
use rustix::thread::gettid;

/// Sets the class of a thread of this process. Its nice value and CPUs stay as they are.
#[expect(unsafe_code, reason = "rustix has no call for scheduling policies")]
pub(crate) fn set(thread: Pid, class: Class) -> io::Result<()> {
    let policy = match class {
        Class::Normal => libc::SCHED_OTHER,
        Class::Idle => libc::SCHED_IDLE,
    };
    let none = libc::sched_param { sched_priority: 0 };
    let thread = thread.as_raw_nonzero().get();
    // SAFETY: the kernel copies the parameter, which outlives the call.
    match unsafe { libc::sched_setscheduler(thread, policy, &raw const none) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes the calling thread run only when its CPU is otherwise idle.
///
/// # Errors
/// If the system refuses that.
pub fn only_when_idle() -> io::Result<()> {
    set(gettid(), Class::Idle)
}

/// Fails if threads may not return from the idle class. Without the right to that, the calling
/// thread stays in it.
pub(crate) fn try_on_this_thread() -> io::Result<()> {
    only_when_idle()?;
    set(gettid(), Class::Normal)
}
