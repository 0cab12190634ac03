//! How the tests of one process came out, by its exit code and the end of its output.

use std::time::Duration;

use crate::child::CPU;

/// Tests that ended one way or another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) ignored: u32,
}

impl Counts {
    pub(crate) fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

/// How the tests of one process came out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Verdict {
    pub(crate) counts: Counts,
    /// Why it counts as failed.
    pub(crate) wrong: Option<String>,
    /// The failure that no repetition excuses, if there is one.
    pub(crate) fatal: Option<String>,
    /// What tests report whatever the result, such as what this machine could not test.
    pub(crate) notes: Vec<String>,
    /// Seconds of CPU of all its processes.
    pub(crate) cpu_s: f64,
}

/// Prefix of a line with a note.
const NOTE: &str = "suite note: ";
/// Prefix of a line with a failure that no repetition excuses, as `lab::fatal` prints it.
pub(crate) const FATAL: &str = "suite fatal: ";
/// Longest failure message that is printed again at the end.
const MESSAGE_MAX: usize = 300;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// With exit code 0.
    Well,
    /// With another, or by a signal.
    Badly,
    /// Killed after that long.
    Late(Duration),
}

impl Verdict {
    /// From a process's output; `wanted` is 1 if it runs a single test.
    pub(crate) fn of(end: End, said: &str, wanted: Option<u32>) -> Self {
        let mut counts = said.lines().rev().find_map(counts).unwrap_or_default();
        let ran = counts.passed + counts.failed + counts.ignored;
        let wrong = match end {
            End::Late(after) => Some(format!("killed after {} s", after.as_secs())),
            _ if counts.failed > 0 => Some(format!("{} failed", counts.failed)),
            End::Badly if ran > 0 => Some("it ended badly".to_owned()),
            End::Badly => Some("it ended without a result".to_owned()),
            End::Well if wanted.is_some_and(|wanted| wanted != ran) => {
                Some(format!("{ran} tests ran"))
            }
            End::Well => None,
        };
        if wrong.is_some() {
            counts.failed = counts.failed.max(1);
        }
        let notes = said.lines().filter_map(|line| line.strip_prefix(NOTE));
        let mut last = said.lines().rev();
        let cpu_s = last.find_map(|line| line.strip_prefix(CPU)?.parse().ok()).unwrap_or_default();
        let fatal = match (end, &wrong) {
            (_, None) => None,
            // It may be a deadlock.
            (End::Late(_), Some(why)) => Some(why.clone()),
            _ => said.lines().find_map(|line| line.strip_prefix(FATAL)).map(str::to_owned),
        };
        Self { counts, wrong, fatal, notes: notes.map(str::to_owned).collect(), cpu_s }
    }
}

/// The message of the first panic of a test: the lines from `panicked at` to the backtrace, in one.
pub(crate) fn message(output: &str) -> String {
    let is_panic = |line: &str| line.starts_with("thread '") && line.contains(" panicked at ");
    let mut lines = output.lines().skip_while(|line| !is_panic(line)).skip(1);
    let is_over = |line: &&str| *line == "stack backtrace:" || line.starts_with("note: ");
    let message: Vec<&str> = lines
        .by_ref()
        .take_while(|line| !is_over(line))
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    match message.join(" ").chars().take(MESSAGE_MAX).collect::<String>() {
        message if message.is_empty() => "no message".to_owned(),
        message => message,
    }
}

/// `test result: ok. 12 passed; 0 failed; 1 ignored; ...`
fn counts(line: &str) -> Option<Counts> {
    let (_, rest) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |word: &str| {
        let part = rest.split("; ").find_map(|part| part.strip_suffix(word));
        part.and_then(|number| number.trim().parse().ok())
    };
    Some(Counts { passed: count("passed")?, failed: count("failed")?, ignored: count("ignored")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "x\ntest result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered \
                        out; finished in 0.00s\n\n";
    const BAD: &str = "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; finished";

    #[test]
    fn test_results_are_counted() {
        let good = Verdict::of(End::Well, GOOD, None);
        assert_eq!(good.counts, Counts { passed: 3, failed: 0, ignored: 1 });
        assert_eq!(good.wrong, None);
        let bad = Verdict::of(End::Badly, BAD, None);
        assert_eq!(bad.counts, Counts { passed: 1, failed: 2, ignored: 0 });
        assert_eq!(bad.wrong.unwrap(), "2 failed");
    }

    #[test]
    fn notes_are_kept_whatever_the_result() {
        let said = "running 1 test\ntest a ... \nsuite note: no KVM\nnote: run with\nok\n";
        assert_eq!(Verdict::of(End::Badly, said, Some(1)).notes, ["no KVM"]);
        assert!(Verdict::of(End::Well, GOOD, None).notes.is_empty());
    }

    #[test]
    fn no_repetition_excuses_what_the_lab_calls_fatal_or_a_job_that_hangs() {
        for kind in lab::fatal::Kind::ALL {
            let panic = std::panic::catch_unwind(|| lab::fatal::fatal(kind, "the detail"));
            let said = panic.unwrap_err().downcast::<String>().unwrap();
            let output = format!("thread 'a' panicked at a.rs:1:1:\n{said}\n{BAD}\n");
            let fatal = Verdict::of(End::Badly, &output, Some(1)).fatal.unwrap();
            assert!(fatal.ends_with("the detail"), "{fatal}");
        }
        assert_eq!(Verdict::of(End::Badly, BAD, None).fatal, None);
        assert!(Verdict::of(End::Late(Duration::from_secs(9)), "", None).fatal.is_some());
        let passed = format!("suite fatal: printed by a test of this\n{GOOD}");
        assert_eq!(Verdict::of(End::Well, &passed, None).fatal, None);
    }

    #[test]
    fn the_message_of_the_first_panic_is_found() {
        let output = "running 1 test\n\nthread 'a' (7) panicked at tests/a.rs:45:9:\nnot within \
                      60s:\n  it settles\nstack backtrace:\n   0: x\n\nthread 'b' panicked at \
                      b.rs:1:1:\nother\n";
        assert_eq!(message(output), "not within 60s: it settles");
        assert_eq!(message("Segmentation fault"), "no message");
        assert_eq!(
            message(&format!("thread 'a' panicked at \n{}", "x".repeat(999))).len(),
            MESSAGE_MAX
        );
    }

    #[test]
    fn cpu_seconds_are_parsed() {
        let said = format!("suite cpu: 9\n{GOOD}\nsuite cpu: 12.25\n");
        assert_eq!(Verdict::of(End::Well, &said, None).cpu_s, 12.25);
        assert_eq!(Verdict::of(End::Well, GOOD, None).cpu_s, 0.0);
    }

    #[test]
    fn a_process_without_a_result_or_without_tests_has_failed() {
        let one_failed = Counts { passed: 0, failed: 1, ignored: 0 };
        assert_eq!(Verdict::of(End::Badly, "Segmentation fault", None).counts, one_failed);
        let late = Verdict::of(End::Late(Duration::from_secs(600)), "", None);
        assert_eq!((late.counts, late.wrong.unwrap().as_str()), (one_failed, "killed after 600 s"));
        let none = "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured";
        assert_eq!(Verdict::of(End::Well, none, Some(1)).wrong.unwrap(), "0 tests ran");
        assert_eq!(Verdict::of(End::Well, none, None).wrong, None);
        assert!(Verdict::of(End::Well, "", Some(1)).wrong.is_some());
    }
}
