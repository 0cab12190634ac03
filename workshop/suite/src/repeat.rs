//! Repeats tests that failed, when nothing else runs. One that passes then is unsteady: it is
//! named at the end, and its cause has to be found.

use std::path::{Path, PathBuf};

use crate::job::{Job, Share};
use crate::run::{Done, Printer, perform};
use crate::verdict::message;
use crate::{Doing, SuiteError};

/// How often a test is repeated at most.
const REPEATS: usize = 2;
/// The most unsteady tests of a run that passes.
pub(crate) const UNSTEADY_MAX: usize = 3;

/// A test that failed, and passed when it was repeated.
#[derive(Clone, Debug)]
pub(crate) struct Unsteady {
    pub(crate) name: String,
    /// Of its first failure.
    pub(crate) message: String,
    /// The output of each attempt.
    pub(crate) logs: PathBuf,
}

/// Where the output of unsteady tests stays: next to cargo's directory of programs.
pub(crate) fn directory() -> Result<PathBuf, SuiteError> {
    let program = std::env::current_exe().doing("find this program")?;
    Ok(program.ancestors().nth(2).unwrap_or(&program).join("unsteady"))
}

/// How many tests an earlier part of the same run has found unsteady.
pub(crate) fn known(directory: &Path) -> usize {
    std::fs::read_dir(directory).map_or(0, Iterator::count)
}

/// Repeats what failed, unless the run fails in any case. Of a test that then passes, the result
/// takes the place of the failure.
pub(crate) fn repeat(
    done: &mut [Done],
    directory: &Path,
    printer: &Printer,
) -> Result<Vec<Unsteady>, SuiteError> {
    let mut failed: Vec<&mut Done> =
        done.iter_mut().filter(|one| one.verdict.wrong.is_some()).collect();
    let mut unsteady = Vec::new();
    if !may_repeat(failed.iter().map(|one| &**one), known(directory)) {
        return Ok(unsteady);
    }
    for one in &mut failed {
        unsteady.extend(repeat_one(one, directory, printer)?);
    }
    Ok(unsteady)
}

/// Whether the run can still pass: few tests failed, and each in a way that a repetition excuses.
fn may_repeat<'d>(mut failed: impl Iterator<Item = &'d Done> + Clone, known: usize) -> bool {
    let few = failed.clone().count() + known <= UNSTEADY_MAX;
    few && failed.all(|one| one.verdict.fatal.is_none())
}

fn repeat_one(
    done: &mut Done,
    directory: &Path,
    printer: &Printer,
) -> Result<Option<Unsteady>, SuiteError> {
    let logs = directory.join(file_name(&done.job));
    let first = message(&done.output);
    keep(&logs, 1, &done.output)?;
    for attempt in 2..2 + REPEATS {
        println!("repeating {}", done.job.name());
        let again = perform(done.job.clone(), Share::Usual, &logs.join("running"))?;
        printer.tell(&again);
        keep(&logs, attempt, &again.output)?;
        let (passed, fatal) = (again.verdict.wrong.is_none(), again.verdict.fatal.is_some());
        if passed {
            *done = again;
            let name = done.job.name().to_owned();
            return Ok(Some(Unsteady { name, message: first, logs }));
        }
        if fatal {
            *done = again;
            return Ok(None);
        }
    }
    Ok(None)
}

/// The job's name as the name of a directory.
fn file_name(job: &Job) -> String {
    job.name().replace("::", "-").replace(' ', "-")
}

fn keep(logs: &Path, attempt: usize, output: &str) -> Result<(), SuiteError> {
    std::fs::create_dir_all(logs).doing("make a directory for a test's output")?;
    let path = logs.join(format!("{attempt}.log"));
    std::fs::write(path, output).doing("keep a test's output")?;
    // The file that the attempt wrote to.
    let _ = std::fs::remove_file(logs.join("running"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::program::Program;
    use crate::verdict::{End, Verdict};

    fn failed(output: &str, job: Job) -> Done {
        let verdict = Verdict::of(End::Badly, output, None);
        Done { job, took: Duration::ZERO, verdict, output: output.to_owned() }
    }

    #[test]
    fn only_a_few_tests_that_failed_in_an_excusable_way_are_repeated() {
        let program = Program {
            package: "end-to-end".to_owned(),
            dir: PathBuf::new(),
            chosen_by: String::new(),
            name: "all".to_owned(),
            path: PathBuf::new(),
        };
        let test = || Job::of_test(&program, "moves::there".to_owned());
        let late = || failed("not within 60 s", test());
        let may = |failed: &[Done], known| may_repeat(failed.iter(), known);
        assert!(may(&[late(), late(), late()], 0));
        assert!(!may(&[late(), late(), late(), late()], 0));
        assert!(!may(&[late()], UNSTEADY_MAX));
        for kind in lab::fatal::Kind::ALL {
            let fatal = failed(&lab::fatal::line(kind, "x"), test());
            assert!(!may(&[late(), fatal], 0), "{kind}");
        }
        let deadlock = Verdict::of(End::Late(Duration::from_secs(900)), "", None);
        assert!(!may(&[Done { verdict: deadlock, ..late() }], 0));
    }
}
