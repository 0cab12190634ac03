//! The command line.

use crate::SuiteError;
use crate::job::{Job, Suite};
use crate::marks::Mark;

/// What is run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Arguments {
    pub(crate) suite: Suite,
    /// A part of the names of jobs; empty for all.
    filter: String,
    only: Option<Mark>,
    skip: Option<Mark>,
    /// Number of runs; `None` for a single one that passes or fails.
    pub(crate) steady: Option<u32>,
}

impl Arguments {
    pub(crate) fn parse(words: &[String]) -> Result<Self, SuiteError> {
        let mut words = words.iter().map(String::as_str);
        let suite = words.next().and_then(Suite::named).ok_or(SuiteError::Usage)?;
        let mut arguments =
            Self { suite, filter: String::new(), only: None, skip: None, steady: None };
        while let Some(word) = words.next() {
            match word {
                "--only" => arguments.only = Some(mark(words.next())?),
                "--skip" => arguments.skip = Some(mark(words.next())?),
                "--steady" => {
                    let runs = words.next().and_then(|word| word.parse().ok());
                    arguments.steady =
                        Some(runs.filter(|runs| *runs > 0).ok_or(SuiteError::Usage)?);
                }
                filter if arguments.filter.is_empty() && !filter.starts_with('-') => {
                    filter.clone_into(&mut arguments.filter);
                }
                _ => return Err(SuiteError::Usage),
            }
        }
        Ok(arguments)
    }

    /// Whether a job is run. One that runs only on request has to be named.
    pub(crate) fn choose(&self, job: &Job) -> bool {
        job.name().contains(&self.filter)
            && (!self.filter.is_empty() || !job.is(Mark::Requested))
            && self.only.is_none_or(|mark| job.is(mark))
            && !self.skip.is_some_and(|mark| job.is(mark))
    }
}

fn mark(word: Option<&str>) -> Result<Mark, SuiteError> {
    word.and_then(Mark::named).ok_or(SuiteError::Usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Arguments, SuiteError> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        Arguments::parse(&words)
    }

    #[test]
    fn all_words_are_understood_or_refused() {
        let arguments = parse("end-to-end moves:: --skip promised --steady 5").unwrap();
        assert_eq!(
            (arguments.filter.as_str(), arguments.skip, arguments.steady),
            ("moves::", Some(Mark::Promised), Some(5))
        );
        for text in
            ["", "all", "unit a b", "unit --only", "unit --only x", "unit --steady 0", "unit -x"]
        {
            assert!(matches!(parse(text), Err(SuiteError::Usage)), "{text}");
        }
    }
}
