//! Runs jobs, several at a time.

use std::collections::VecDeque;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::child::{JOB_MAX, LATE};
use crate::idle::Idle;
use crate::job::{Job, Share, Width};
use crate::marks::Mark;
use crate::verdict::{End, Verdict};
use crate::{Doing, SuiteError};

/// How often an idle worker checks for a job.
const CHECK_EVERY: Duration = Duration::from_millis(200);

/// A job that has ended.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) job: Job,
    pub(crate) took: Duration,
    pub(crate) verdict: Verdict,
    /// All its output.
    pub(crate) output: String,
}

/// Prints each job as it ends.
#[derive(Debug, Default)]
pub(crate) struct Printer(AtomicUsize);

impl Printer {
    pub(crate) fn tell(&self, done: &Done) {
        let nth = self.0.fetch_add(1, Relaxed) + 1;
        let (seconds, name) = (done.took.as_secs_f64(), done.job.name());
        let cpu = done.verdict.cpu_s;
        match &done.verdict.wrong {
            None => println!("{nth:4} ok     {seconds:6.1} s {cpu:6.1} CPU  {name}"),
            // In one call, so that other jobs' lines don't interleave.
            Some(why) => println!(
                "{nth:4} FAILED {seconds:6.1} s {cpu:6.1} CPU  {name} ({why})\n{}\n---- again: {}",
                done.output.trim_end(),
                done.job.again()
            ),
        }
    }
}

/// Runs all jobs: `alone` one by one, with jobs next to them that fill the CPU time they leave,
/// then all others in their order.
pub(crate) fn all(
    alone: Vec<Job>,
    others: Vec<Job>,
    width: Width,
    logs: &Path,
    printer: &Printer,
) -> Result<Vec<Done>, SuiteError> {
    let left = &Left {
        alone_over: AtomicBool::new(alone.is_empty()),
        others: Mutex::new(others.into()),
        idle: Idle::default(),
    };
    let runner = |name: String| Runner { log: logs.join(name), printer, done: Vec::new() };
    thread::scope(|scope| {
        let mut workers = Vec::new();
        let mut runner_of_alone = runner("alone".to_owned());
        workers.push(scope.spawn(move || {
            let ran = runner_of_alone.run_all(alone, Share::Usual);
            left.alone_over.store(true, Relaxed);
            ran?;
            runner_of_alone.run_rest(|| left.next())
        }));
        for worker in 1..width.usual {
            let mut runner = runner(worker.to_string());
            workers.push(scope.spawn(move || {
                runner.fill(left, || true)?;
                runner.run_rest(|| left.next())
            }));
        }
        for worker in 0..width.more {
            let mut runner = runner(format!("more-{worker}"));
            workers.push(scope.spawn(move || {
                runner.fill(left, || left.idle.has_room())?;
                runner.run_rest(|| left.next_while_idle())
            }));
        }
        let mut all = Vec::new();
        for worker in workers {
            all.extend(worker.join().expect("a worker does not panic")?);
        }
        Ok(all)
    })
}

/// Jobs still to be run.
struct Left {
    /// Whether all jobs that have the machine to themselves have ended.
    alone_over: AtomicBool,
    others: Mutex<VecDeque<Job>>,
    idle: Idle,
}

impl Left {
    fn others(&self) -> MutexGuard<'_, VecDeque<Job>> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn filling(&self) -> Option<Job> {
        let mut others = self.others();
        let at = others.iter().position(|job| job.is(Mark::Fills))?;
        others.remove(at)
    }

    fn next(&self) -> Option<Job> {
        self.others().pop_front()
    }

    /// Waits until CPUs are idle; none if no job is left by then.
    fn next_while_idle(&self) -> Option<Job> {
        loop {
            if self.others().is_empty() {
                return None;
            }
            if self.idle.has_room() {
                return self.next();
            }
            thread::sleep(CHECK_EVERY);
        }
    }
}

/// Runs one job after the other.
struct Runner<'p> {
    log: PathBuf,
    printer: &'p Printer,
    done: Vec<Done>,
}

impl Runner<'_> {
    fn run(&mut self, job: Job, share: Share) -> Result<(), SuiteError> {
        let done = perform(job, share, &self.log)?;
        self.printer.tell(&done);
        self.done.push(done);
        Ok(())
    }

    /// Runs jobs next to those that have the machine to themselves, until these are over.
    fn fill(&mut self, left: &Left, has_room: impl Fn() -> bool) -> Result<(), SuiteError> {
        while !left.alone_over.load(Relaxed) {
            match has_room().then(|| left.filling()).flatten() {
                Some(job) => self.run(job, Share::Rest)?,
                None => thread::sleep(CHECK_EVERY),
            }
        }
        Ok(())
    }

    fn run_all(&mut self, jobs: Vec<Job>, share: Share) -> Result<(), SuiteError> {
        jobs.into_iter().try_for_each(|job| self.run(job, share))
    }

    /// Runs jobs until there are none, and returns all that this runner ran.
    fn run_rest(&mut self, next: impl Fn() -> Option<Job>) -> Result<Vec<Done>, SuiteError> {
        while let Some(job) = next() {
            self.run(job, Share::Usual)?;
        }
        Ok(std::mem::take(&mut self.done))
    }
}

/// Output goes into a file, not a pipe: a process that a test leaves running would keep the pipe
/// open.
pub(crate) fn perform(job: Job, share: Share, log: &Path) -> Result<Done, SuiteError> {
    let file = File::create(log).doing("make a file for a test's output")?;
    let begun = Instant::now();
    let mut command = job.command(share).doing("find this program")?;
    command.stdin(Stdio::null()).stdout(file.try_clone().doing("copy a descriptor")?).stderr(file);
    let status = command.status().doing("run a test program")?;
    let took = begun.elapsed();
    let end = match status.code() {
        Some(0) => End::Well,
        Some(code) if code == i32::from(LATE) => End::Late(JOB_MAX),
        _ => End::Badly,
    };
    let output = std::fs::read(log).doing("read a test's output")?;
    let output = String::from_utf8_lossy(&output).into_owned();
    let verdict = Verdict::of(end, &output, job.wanted());
    Ok(Done { job, took, verdict, output })
}
