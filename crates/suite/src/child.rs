//! `suite job PROGRAM [ARGUMENT]...`: the process around one job. It takes in what the
//! job leaves behind, so what all of its processes have computed can be told: a QEMU
//! is nobody's child any more when the agent that started it was killed.

use std::fs;
use std::io;
use std::process::{Command, ExitCode};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process, set_child_subreaper, wait,
};

use crate::{Doing, SuiteError};

/// The word that calls for it.
pub(crate) const WORD: &str = "job";
/// No job takes as long. What it has left on its hosts the next test removes.
pub(crate) const JOB_MAX: Duration = Duration::from_secs(15 * 60);
/// What tells that it was killed then.
pub(crate) const LATE: u8 = 124;
/// What the line begins with that tells of the seconds.
pub(crate) const CPU: &str = "suite cpu: ";

/// Ticks in `/proc`, whatever the kernel's own are.
const TICKS_PER_S: f64 = 100.0;

/// Runs a program, and says in the end how many seconds of CPU it and all that it
/// started have taken.
pub(crate) fn run(words: &[String]) -> Result<ExitCode, SuiteError> {
    let [program, arguments @ ..] = words else { return Err(SuiteError::Usage) };
    set_child_subreaper(Some(getpid())).map_err(io::Error::from).doing("take in orphans")?;
    let child = Command::new(program).args(arguments).spawn().doing("run a test program")?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    // What waits for all children waits for it too.
    drop(child);
    let (over, watched) = channel::<()>();
    let watch = thread::spawn(move || {
        let late = watched.recv_timeout(JOB_MAX) == Err(RecvTimeoutError::Timeout);
        if let (true, Some(pid)) = (late, pid) {
            // It may end by itself just now.
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
    while ended(WaitOptions::NOHANG)?.is_some() {}
    println!("\n{CPU}{:.2}", cpu_s().unwrap_or_default());
    Ok(match status.and_then(|(_, status)| status.exit_status()) {
        Some(0) => ExitCode::SUCCESS,
        _ if late => ExitCode::from(LATE),
        _ => ExitCode::FAILURE,
    })
}

/// A child that has ended; none if none has, or there is none.
fn ended(options: WaitOptions) -> Result<Option<(Pid, WaitStatus)>, SuiteError> {
    match wait(options) {
        Err(rustix::io::Errno::CHILD) => Ok(None),
        result => result.map_err(io::Error::from).doing("wait for a test program"),
    }
}

/// Of all children that have ended, and theirs.
fn cpu_s() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // What follows the name; the first field here is the third of all.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(13);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some((ticks()? + ticks()?) as f64 / TICKS_PER_S)
}
