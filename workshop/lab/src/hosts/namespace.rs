//! Network namespaces: their links and processes, and their end.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::error::Result;
use crate::program;

/// Longest time until a killed process has exited.
const EXIT_MAX: Duration = Duration::from_secs(10);

/// The name of a NIC, in any namespace.
pub(super) fn nic_name(nic: usize) -> String {
    format!("nic{nic}")
}

/// Runs `ip` on a namespace's network.
pub(super) fn ip(namespace: &str, args: &[&str]) -> Result<String> {
    program::output(program::command("ip").args(["-n", namespace]).args(args))
}

/// Runs `tc` on a namespace's network.
pub(super) fn tc(namespace: &str, args: &[&str]) -> Result<String> {
    program::output(program::command("tc").args(["-n", namespace]).args(args))
}

/// The processes in a namespace.
pub(super) fn processes(name: &str) -> Result<Vec<u32>> {
    let pids = program::output(program::command("ip").args(["netns", "pids", name]))?;
    Ok(pids.split_whitespace().filter_map(|pid| pid.parse().ok()).collect())
}

/// Kills all processes in a namespace, and removes it.
pub(super) fn remove(name: &str) -> Result<()> {
    let until = Instant::now() + EXIT_MAX;
    loop {
        let left = processes(name)?;
        if left.is_empty() || Instant::now() > until {
            break;
        }
        for pid in left {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            if let Some(pid) = pid {
                // It may have ended meanwhile.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    program::output(program::command("ip").args(["netns", "del", name])).map(drop)
}
