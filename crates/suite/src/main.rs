//! `suite unit|end-to-end [FILTER]`: runs the workspace's tests, several at a time. Cargo builds
//! them, but would run one program after the other, and most of them wait: for links, for guests
//! that boot, for timeouts.
//!
//! The environment variable `TOGETHER` sets how many run at a time. Exit code 1 means that a test
//! failed.

mod child;
mod idle;
mod job;
mod program;
mod run;
mod times;
mod verdict;

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use job::{Job, Suite};
use run::{Done, Printer};
use times::Times;
use verdict::Counts;

/// Why tests could not be run.
#[derive(Debug, thiserror::Error)]
enum SuiteError {
    /// Wrong arguments.
    #[error("usage: suite unit|end-to-end [FILTER]")]
    Usage,
    /// Cargo's messages on standard error say why.
    #[error("the tests don't compile")]
    Build,
    /// A program does not list its tests.
    #[error("{0} does not say which tests it has")]
    List(PathBuf),
    /// The test may have been renamed.
    #[error("a rule of how tests run names `{0}`, and there is no such test")]
    Gone(&'static str),
    /// No test matches the filter.
    #[error("there is no such test")]
    Nothing,
    /// A system call failed.
    #[error("can't {action}: {error}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why it didn't work.
        error: io::Error,
    },
}

trait Doing<T> {
    fn doing(self, action: &'static str) -> Result<T, SuiteError>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, action: &'static str) -> Result<T, SuiteError> {
        self.map_err(|error| SuiteError::System { action, error })
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let Some((child::WORD, words)) = words.split_first().map(|(word, rest)| (&**word, rest)) {
        return child::run(words).unwrap_or_else(failed);
    }
    match perform(&words) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => failed(error),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it ends here")]
fn failed(error: SuiteError) -> ExitCode {
    eprintln!("suite: {error}");
    ExitCode::from(2)
}

/// Whether all tests passed.
fn perform(words: &[String]) -> Result<bool, SuiteError> {
    let (suite, filter) = match words {
        [suite] => (suite, ""),
        [suite, filter] => (suite, filter.as_str()),
        _ => return Err(SuiteError::Usage),
    };
    let suite = Suite::named(suite).ok_or(SuiteError::Usage)?;
    let mut times = Times::read();
    let mut jobs = job::list(suite, &program::build()?)?;
    let all = jobs.len();
    jobs.retain(|job| job.name().contains(filter) && (!filter.is_empty() || !job.is_asked_for()));
    if filter.is_empty() && jobs.len() < all {
        println!(
            "{} jobs run only when asked for: make libvirt-test, kubevirt-test, proxmox-test, upgrade-test",
            all - jobs.len()
        );
    }
    if jobs.is_empty() {
        return Err(SuiteError::Nothing);
    }
    // The longest jobs run first, so that none is left to run alone at the end.
    jobs.sort_by(|one, other| times.of(other).total_cmp(&times.of(one)));
    let (alone, beside): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(Job::is_alone);
    let width = suite.at_once();
    println!(
        "{} jobs one by one, and what others need not wait for beside them; then {} jobs, {} at a \
         time{}",
        alone.len(),
        beside.len(),
        width.usual,
        if width.more > 0 { ", more while CPUs are idle" } else { "" }
    );

    let begun = Instant::now();
    let logs = tempfile::tempdir().doing("make a directory for what tests say")?;
    let printer = Printer::default();
    let done = run::all(alone, beside, width, logs.path(), &printer)?;
    done.iter().for_each(|one| times.note(&one.job, one.took));
    times.write();
    Ok(conclude(&done, begun))
}

/// Prints each note once and names each failed job again; whether all tests passed.
fn conclude(done: &[Done], begun: Instant) -> bool {
    let mut counts = Counts::default();
    done.iter().for_each(|one| counts.add(&one.verdict.counts));
    let wrong: Vec<&Done> = done.iter().filter(|one| one.verdict.wrong.is_some()).collect();
    let notes: BTreeSet<&String> = done.iter().flat_map(|one| &one.verdict.notes).collect();
    notes.iter().for_each(|note| println!("note: {note}"));
    wrong.iter().for_each(|one| println!("FAILED {}: {}", one.job.name(), one.job.again()));
    let word = if wrong.is_empty() { "ok" } else { "FAILED" };
    let Counts { passed, failed, ignored } = counts;
    let seconds = begun.elapsed().as_secs();
    let cpu_s: f64 = done.iter().map(|one| one.verdict.cpu_s).sum();
    println!(
        "test result: {word}. {passed} passed; {failed} failed; {ignored} ignored; finished in \
         {seconds} s, {cpu_s:.0} s of CPU"
    );
    wrong.is_empty()
}
