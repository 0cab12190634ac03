//! Runs jobs, some at a time.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::child::{JOB_MAX, LATE};
use crate::job::Job;
use crate::verdict::{End, Verdict};
use crate::{Doing, SuiteError};

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
        let cpu = done.verdict.cpu_s;
        match &done.verdict.wrong {
            None => println!("{nth:4} ok     {seconds:6.1} s {cpu:6.1} CPU  {name}"),
            // In one piece, whatever else ends meanwhile.
            Some(why) => println!(
                "{nth:4} FAILED {seconds:6.1} s {cpu:6.1} CPU  {name} ({why})\n{}\n---- again: {}",
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
    let mut command = job.command().doing("find this program")?;
    command.stdin(Stdio::null()).stdout(file.try_clone().doing("copy a descriptor")?).stderr(file);
    let status = command.status().doing("run a test program")?;
    let took = begun.elapsed();
    let end = match status.code() {
        Some(0) => End::Well,
        Some(code) if code == i32::from(LATE) => End::Late(JOB_MAX),
        _ => End::Badly,
    };
    let said = std::fs::read(log).doing("read what a test said")?;
    let said = String::from_utf8_lossy(&said).into_owned();
    let verdict = Verdict::of(end, &said, job.wanted());
    Ok(Done { job, took, verdict, said })
}
