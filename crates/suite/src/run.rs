//! Runs jobs, some at a time.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::job::Job;
use crate::verdict::{End, Verdict};
use crate::{Doing, SuiteError};

/// No job takes as long. What it has left on its hosts the next test removes.
const JOB_MAX: Duration = Duration::from_secs(15 * 60);

/// A job that has ended.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) job: Job,
    pub(crate) took: Duration,
    pub(crate) verdict: Verdict,
    /// All that it said.
    said: String,
}

/// Tells of each job as it ends.
#[derive(Debug, Default)]
pub(crate) struct Printer(AtomicUsize);

impl Printer {
    fn tell(&self, done: &Done) {
        let nth = self.0.fetch_add(1, Relaxed) + 1;
        let (seconds, name) = (done.took.as_secs_f64(), done.job.name());
        match &done.verdict.wrong {
            None => println!("{nth:4} ok     {seconds:6.1} s  {name}"),
            // In one piece, whatever else ends meanwhile.
            Some(why) => println!(
                "{nth:4} FAILED {seconds:6.1} s  {name} ({why})\n{}\n---- again: {}",
                done.said.trim_end(),
                done.job.again()
            ),
        }
    }
}

/// Runs all of them, in their order.
pub(crate) fn all(
    jobs: Vec<Job>,
    at_once: usize,
    logs: &Path,
    printer: &Printer,
) -> Result<Vec<Done>, SuiteError> {
    let jobs = Mutex::new(jobs.into_iter());
    let next = || jobs.lock().ok().and_then(|mut jobs| jobs.next());
    let work = |worker: usize| -> Result<Vec<Done>, SuiteError> {
        let log = logs.join(worker.to_string());
        let mut all = Vec::new();
        while let Some(job) = next() {
            let done = perform(job, &log)?;
            printer.tell(&done);
            all.push(done);
        }
        Ok(all)
    };
    let work = &work;
    thread::scope(|scope| {
        let workers: Vec<_> =
            (0..at_once).map(|worker| scope.spawn(move || work(worker))).collect();
        let mut all = Vec::new();
        for worker in workers {
            all.extend(worker.join().expect("a worker does not panic")?);
        }
        Ok(all)
    })
}

/// Into a file, not a pipe: what a test leaves running has that open, too.
fn perform(job: Job, log: &Path) -> Result<Done, SuiteError> {
    let file = File::create(log).doing("make a file for what a test says")?;
    let begun = Instant::now();
    let mut command = job.command();
    command.stdin(Stdio::null()).stdout(file.try_clone().doing("copy a descriptor")?).stderr(file);
    let end = wait(command.spawn().doing("run a test program")?)?;
    let took = begun.elapsed();
    let said = std::fs::read(log).doing("read what a test said")?;
    let said = String::from_utf8_lossy(&said).into_owned();
    let verdict = Verdict::of(end, &said, job.wanted());
    Ok(Done { job, took, verdict, said })
}

fn wait(mut child: Child) -> Result<End, SuiteError> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let (over, watched) = channel::<()>();
    thread::scope(|scope| {
        let watch = scope.spawn(move || {
            let late = watched.recv_timeout(JOB_MAX) == Err(RecvTimeoutError::Timeout);
            if let (true, Some(pid)) = (late, pid) {
                // It may end by itself just now.
                let _ = kill_process(pid, Signal::KILL);
            }
            late
        });
        let status = child.wait().doing("wait for a test program")?;
        drop(over);
        let late = watch.join().expect("the watch does not panic");
        Ok(match (late, status.success()) {
            (_, true) => End::Well,
            (true, false) => End::Late(JOB_MAX),
            (false, false) => End::Badly,
        })
    })
}
