//! `suite job PROGRAM [ARGUMENT]...`: the process around one job. It is the subreaper of the job's
//! processes, so it can report the CPU time of all of them: a QEMU whose agent was killed would
//! otherwise be reparented to init.

use std::fs;
use std::io;
use std::process::{Command, ExitCode};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process, set_child_subreaper, wait,
};

use crate::verdict::FATAL;
use crate::{Doing, SuiteError};

/// Name of the subcommand.
pub(crate) const WORD: &str = "job";
/// Longest time that a job may take. The next test removes what a killed job left on its hosts.
pub(crate) const JOB_MAX: Duration = Duration::from_secs(15 * 60);
/// Exit code after a program was killed because of that.
pub(crate) const LATE: u8 = 124;
/// Prefix of the line that reports CPU seconds.
pub(crate) const CPU: &str = "suite cpu: ";

/// Longest time until processes that a program left have ended, and the interval of checks.
const LEFT_MAX: Duration = Duration::from_secs(20);
const LEFT_EVERY: Duration = Duration::from_millis(20);

/// Ticks per second in `/proc`, whatever the kernel's own.
const TICKS_PER_S: f64 = 100.0;

/// Runs a program, then prints how many seconds of CPU it and all its descendants used.
pub(crate) fn run(words: &[String]) -> Result<ExitCode, SuiteError> {
    let [program, arguments @ ..] = words else { return Err(SuiteError::Usage) };
    set_child_subreaper(Some(getpid())).map_err(io::Error::from).doing("take in orphans")?;
    let child = Command::new(program).args(arguments).spawn().doing("run a test program")?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    // `ended` waits for all children, this one included.
    drop(child);
    let (over, watched) = channel::<()>();
    let watch = thread::spawn(move || {
        let late = watched.recv_timeout(JOB_MAX) == Err(RecvTimeoutError::Timeout);
        if let (true, Some(pid)) = (late, pid) {
            // The program may end by itself just now.
            let _ = kill_process(pid, Signal::KILL);
        }
        late
    });
    let mut status = None;
    while status.is_none() {
        status = ended(WaitOptions::empty())?.filter(|(ended, _)| Some(*ended) == pid);
    }
    drop(over);
    let late = watch.join().expect("the watch does not panic");
    let left = left_behind()?;
    if !left.is_empty() {
        println!("\n{FATAL}something is left behind: processes {left:?}");
    }
    println!("\n{CPU}{:.2}", cpu_s().unwrap_or_default());
    Ok(match status.and_then(|(_, status)| status.exit_status()) {
        Some(0) if left.is_empty() => ExitCode::SUCCESS,
        _ if late => ExitCode::from(LATE),
        _ => ExitCode::FAILURE,
    })
}

/// A child that has ended; none if no child has ended, or there is no child.
fn ended(options: WaitOptions) -> Result<Option<(Pid, WaitStatus)>, SuiteError> {
    match wait(options) {
        Err(rustix::io::Errno::CHILD) => Ok(None),
        result => result.map_err(io::Error::from).doing("wait for a test program"),
    }
}

/// Waits for what the program left, which ends by itself a moment later. Returns the names of
/// processes that don't.
fn left_behind() -> Result<Vec<String>, SuiteError> {
    let until = Instant::now() + LEFT_MAX;
    loop {
        while ended(WaitOptions::NOHANG)?.is_some() {}
        let left = children();
        if left.is_empty() || Instant::now() >= until {
            return Ok(left);
        }
        thread::sleep(LEFT_EVERY);
    }
}

/// The names of this process's children.
fn children() -> Vec<String> {
    let own = std::process::id();
    let pids = fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
    let name = |pid: &str| fs::read_to_string(format!("/proc/{pid}/comm")).ok();
    pids.split_whitespace().filter_map(name).map(|name| name.trim().to_owned()).collect()
}

/// CPU seconds of all children that have ended, and of their descendants.
fn cpu_s() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // After the process name; the first field here is the third of all.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(13);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some((ticks()? + ticks()?) as f64 / TICKS_PER_S)
}
