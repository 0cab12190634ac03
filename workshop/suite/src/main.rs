//! `suite unit|end-to-end [FILTER] [--only MARK] [--skip MARK] [--steady RUNS]`: runs the workspace's
//! tests, several at a time. Cargo builds them, but would run one program after the other, and most
//! of them wait: for links, for guests that boot, for timeouts.
//!
//! A job that fails is repeated by itself, up to twice. With `--steady` all of it runs
//! several times, every second time next to a thread that keeps one core busy.
//!
//! The environment variable `TOGETHER` sets how many run at a time. Exit code 1 means that a test
//! failed, or that too many are unsteady.

mod arguments;
mod child;
mod error;
mod idle;
mod job;
mod marks;
mod outcome;
mod program;
mod repeat;
mod run;
mod steady;
mod times;
mod verdict;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use arguments::Arguments;
use error::{Doing, SuiteError};
use job::Job;
use marks::Mark;
use outcome::Outcome;
use run::Printer;
use times::Times;
use verdict::Counts;

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
    let arguments = Arguments::parse(words)?;
    let mut jobs = job::list(arguments.suite, &program::build()?)?;
    jobs.retain(|job| arguments.choose(job));
    if jobs.is_empty() {
        return Err(SuiteError::Nothing);
    }
    let width = arguments.suite.at_once();
    let run = |directory: &Path| run(jobs.clone(), width, directory);
    match arguments.steady {
        Some(runs) => steady::all(runs, run),
        None => Ok(run(&repeat::directory()?)?.passed()),
    }
}

/// Runs all jobs once, and repeats what failed.
fn run(mut jobs: Vec<Job>, width: job::Width, directory: &Path) -> Result<Outcome, SuiteError> {
    let mut times = Times::read();
    // The longest jobs run first, so that none is left to run alone at the end.
    jobs.sort_by(|one, other| times.of(other).total_cmp(&times.of(one)));
    let (alone, others): (Vec<Job>, Vec<Job>) =
        jobs.into_iter().partition(|job| job.is(Mark::Alone));
    println!(
        "{} jobs one by one, and what fills next to them; then {} jobs, {} at a time{}",
        alone.len(),
        others.len(),
        width.usual,
        if width.more > 0 { ", more while CPUs are idle" } else { "" }
    );

    let started = Instant::now();
    let logs = tempfile::tempdir().doing("make a directory for the output of tests")?;
    let printer = Printer::default();
    let mut done = run::all(alone, others, width, logs.path(), &printer)?;
    done.iter().for_each(|one| times.note(&one.job, one.took));
    times.write();
    let unsteady = repeat::repeat(&mut done, directory, &printer)?;
    let unsteady_in_all = repeat::known(directory);
    let outcome = Outcome { done, unsteady, unsteady_in_all };
    conclude(&outcome, started);
    Ok(outcome)
}

/// Prints each note once, and names each failed and each unsteady job again.
fn conclude(outcome: &Outcome, started: Instant) {
    let mut counts = Counts::default();
    outcome.done.iter().for_each(|one| counts.add(&one.verdict.counts));
    let notes: BTreeSet<&String> = outcome.done.iter().flat_map(|one| &one.verdict.notes).collect();
    notes.iter().for_each(|note| println!("note: {note}"));
    for one in &outcome.unsteady {
        println!("UNSTEADY {}: {} (output: {})", one.name, one.message, one.logs.display());
    }
    for one in outcome.failed() {
        let why = one.verdict.fatal.as_ref().map_or(String::new(), |why| format!(" ({why})"));
        println!("FAILED {}{why}: {}", one.job.name(), one.job.again());
    }
    let word = if outcome.passed() { "ok" } else { "FAILED" };
    let Counts { passed, failed, ignored } = counts;
    let seconds = started.elapsed().as_secs();
    let cpu_s: f64 = outcome.done.iter().map(|one| one.verdict.cpu_s).sum();
    println!(
        "test result: {word}. {passed} passed; {failed} failed; {ignored} ignored; finished in \
         {seconds} s, {cpu_s:.0} s of CPU"
    );
}
