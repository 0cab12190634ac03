//! How the kernel schedules a thread.

use std::fs;

/// `SCHED_FIFO`, `SCHED_RR` and `SCHED_DEADLINE`.
const REAL_TIME: [u32; 3] = [1, 2, 6];
/// The number of the policy among the fields of `stat`.
const POLICY: usize = 41;
/// The number of the first field after the thread's name.
const STATE: usize = 3;

/// Whether the thread has a real-time policy. The kernel's quotas of CPU time don't apply to it.
pub(crate) fn is_real_time(pid: u32, thread: u32) -> bool {
    let stat = fs::read(format!("/proc/{pid}/task/{thread}/stat")).unwrap_or_default();
    policy(&String::from_utf8_lossy(&stat)).is_some_and(|policy| REAL_TIME.contains(&policy))
}

/// The policy, from a thread's `stat`. The thread's name in it is in parentheses, and may contain
/// spaces and parentheses.
fn policy(stat: &str) -> Option<u32> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(POLICY - STATE)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From a `SCHED_FIFO` thread of priority 7 on CPU 3.
    const FIFO: &str = "4242 (CPU 1/KVM (a)) S 1 4200 4200 0 -1 4210752 105 0 0 0 12 3 0 0 -8 0 9 \
                        0 81235 2348810240 51022 18446744073709551615 1 1 0 0 0 0 268444224 4096 \
                        17592 0 0 0 -1 3 7 1 0 0 0 0 0 0 0 0 0 0 0\n";

    #[test]
    fn the_policy_is_found_behind_any_name() {
        assert_eq!(policy(FIFO), Some(1));
        assert_eq!(policy(&FIFO.replace(" 3 7 1 0", " 3 0 0 0")), Some(0));
        for broken in ["", "4242 (CPU", "4242 (CPU) S 1"] {
            assert_eq!(policy(broken), None, "{broken}");
        }
    }

    #[test]
    fn a_thread_that_is_gone_has_no_policy() {
        assert!(!is_real_time(std::process::id(), u32::MAX));
    }
}
