//! Runs everything several times, and counts what did not pass each time.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use crate::verdict::message;
use crate::{Doing, Outcome, SuiteError, repeat};

/// The most unsteady tests in all runs together.
const UNSTEADY_MAX: usize = 2;

/// What went wrong with one test.
#[derive(Debug, Default)]
struct Trouble {
    /// Runs in which it failed and passed when it was repeated.
    unsteady: Vec<u32>,
    /// Runs in which it failed for good.
    failed: Vec<u32>,
    messages: Vec<String>,
}

/// Whether no test failed in any run, and few were unsteady.
pub(crate) fn all(
    runs: u32,
    run: impl Fn(&Path) -> Result<Outcome, SuiteError>,
) -> Result<bool, SuiteError> {
    let directory = repeat::directory()?.with_file_name("steady");
    if directory.exists() {
        std::fs::remove_dir_all(&directory).doing("remove the output of earlier runs")?;
    }
    let mut troubles = BTreeMap::<String, Trouble>::new();
    for nth in 1..=runs {
        let is_busy = nth.is_multiple_of(2);
        println!("== run {nth} of {runs}{}", if is_busy { ", with one core busy" } else { "" });
        let directory = directory.join(nth.to_string());
        let outcome =
            if is_busy { next_to_a_busy_core(|| run(&directory)) } else { run(&directory) }?;
        for one in &outcome.unsteady {
            let trouble = troubles.entry(one.name.clone()).or_default();
            trouble.unsteady.push(nth);
            trouble.messages.push(one.message.clone());
        }
        for one in outcome.failed() {
            let trouble = troubles.entry(one.job.name().to_owned()).or_default();
            trouble.failed.push(nth);
            let fatal = one.verdict.fatal.clone();
            trouble.messages.push(fatal.unwrap_or_else(|| message(&one.output)));
        }
    }
    Ok(conclude(&troubles, runs))
}

fn next_to_a_busy_core<T>(run: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                std::hint::spin_loop();
            }
        });
        let result = run();
        is_over.store(true, Relaxed);
        result
    })
}

fn conclude(troubles: &BTreeMap<String, Trouble>, runs: u32) -> bool {
    for (name, trouble) in troubles {
        let Trouble { unsteady, failed, messages } = trouble;
        println!("{name}: unsteady in runs {unsteady:?}, failed in {failed:?}");
        messages.iter().for_each(|message| println!("    {message}"));
    }
    let failed = troubles.values().filter(|one| !one.failed.is_empty()).count();
    let unsteady = troubles.values().filter(|one| !one.unsteady.is_empty()).count();
    println!("steady: {runs} runs, {failed} tests failed, {unsteady} unsteady");
    failed == 0 && unsteady <= UNSTEADY_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_unsteady_tests_pass_and_a_failed_one_does_not() {
        let unsteady = || Trouble { unsteady: vec![1], ..Trouble::default() };
        let named = |names: &[&str]| -> BTreeMap<String, Trouble> {
            names.iter().map(|name| ((*name).to_owned(), unsteady())).collect()
        };
        assert!(conclude(&named(&[]), 5));
        assert!(conclude(&named(&["a", "b"]), 5));
        assert!(!conclude(&named(&["a", "b", "c"]), 5));
        let failed = Trouble { failed: vec![5], ..Trouble::default() };
        assert!(!conclude(&BTreeMap::from([("a".to_owned(), failed)]), 5));
    }

    #[test]
    fn the_busy_thread_ends_with_the_run() {
        assert_eq!(next_to_a_busy_core(|| 7), 7);
    }
}
