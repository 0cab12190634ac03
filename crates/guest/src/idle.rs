//! Makes a thread run only when the system is otherwise idle.

#![expect(unsafe_code, reason = "rustix has no call for scheduling policies and classes")]

use std::io;

use rustix::process::setpriority_process;

const NICE_MAX: i32 = 19;
/// `ioprio_set` for the calling thread.
const WHO_PROCESS: libc::c_long = 1;
/// The idle class; the kernel's headers call it `IOPRIO_CLASS_IDLE`.
const CLASS_IDLE: libc::c_long = 3;
const CLASS_SHIFT: u32 = 13;

/// Makes the calling thread use the CPU and the disks only when nothing else wants them. The nice
/// value is for systems that refuse the idle policy.
///
/// # Errors
/// The error of what the system refuses; the rest is done.
pub fn only_when_idle() -> io::Result<()> {
    let nice = setpriority_process(None, NICE_MAX);
    let policy = set_policy();
    let disk = set_disk_class();
    nice?;
    policy.and(disk)
}

fn set_policy() -> io::Result<()> {
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread, and the kernel copies the parameter, which outlives the
    // call.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const none) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set_disk_class() -> io::Result<()> {
    let class = CLASS_IDLE << CLASS_SHIFT;
    let this: libc::c_long = 0;
    // SAFETY: the arguments are three numbers; no memory is involved.
    match unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, this, class) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_made_idle() {
        let made = std::thread::spawn(|| {
            only_when_idle().unwrap();
            // SAFETY: 0 is the calling thread; no memory is involved.
            unsafe { libc::sched_getscheduler(0) }
        });
        assert_eq!(made.join().unwrap(), libc::SCHED_IDLE);
    }
}
