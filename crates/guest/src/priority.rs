//! The priority of the helper's work among that of its guest.
//!
//! The budget bounds what it takes. Work that ran only when a CPU was idle got a few thousandths of
//! a busy one, and had found next to nothing when its time was up.

#![expect(unsafe_code, reason = "rustix has no call for scheduling policies and classes")]

use std::io;

use rustix::process::{getpriority_process, setpriority_process};

/// Gives another busy thread three quarters of the CPU that both want.
const NICE: i32 = 5;
/// `ioprio_set` for the calling thread.
const WHO_PROCESS: libc::c_long = 1;
/// The class of ordinary work; the kernel's headers call it `IOPRIO_CLASS_BE`.
const CLASS_BEST_EFFORT: libc::c_long = 2;
const CLASS_SHIFT: u32 = 13;
/// The last to be served in that class.
const LEVEL_LOWEST: libc::c_long = 7;

/// Makes the calling thread give way to others: when it wakes up it waits its turn, and then it
/// gets less of the CPU and the disks than they do.
///
/// # Errors
/// The error of what the system refuses; the rest is done.
pub fn give_way() -> io::Result<()> {
    let policy = set_policy();
    // Who has started it may have asked for less.
    let nice = getpriority_process(None).and_then(|nice| setpriority_process(None, nice.max(NICE)));
    let disk = set_disk_class();
    policy?;
    nice?;
    disk
}

fn set_policy() -> io::Result<()> {
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread, and the kernel copies the parameter, which outlives the
    // call.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const none) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set_disk_class() -> io::Result<()> {
    let class = (CLASS_BEST_EFFORT << CLASS_SHIFT) | LEVEL_LOWEST;
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

    /// With the idle policy it would get nothing of a CPU that others keep busy.
    #[test]
    fn a_thread_gives_way_and_does_not_starve() {
        let before = getpriority_process(None).unwrap();
        let made = std::thread::spawn(|| {
            give_way().unwrap();
            // SAFETY: 0 is the calling thread; no memory is involved.
            (unsafe { libc::sched_getscheduler(0) }, getpriority_process(None).unwrap())
        });
        assert_eq!(made.join().unwrap(), (libc::SCHED_BATCH, before.max(NICE)));
    }
}
