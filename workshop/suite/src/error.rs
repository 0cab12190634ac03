//! Why tests could not be run.

use std::io;
use std::path::PathBuf;

/// Why tests could not be run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SuiteError {
    /// Wrong arguments.
    #[error("usage: suite unit|end-to-end [FILTER] [--only MARK] [--skip MARK] [--steady RUNS]")]
    Usage,
    /// Cargo's messages on standard error say why.
    #[error("the tests don't compile")]
    Build,
    /// A program does not list its tests.
    #[error("{0} does not say which tests it has")]
    List(PathBuf),
    /// A package's manifest does not say how its test programs run.
    #[error("{}: {why}", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
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

pub(crate) trait Doing<T> {
    fn doing(self, action: &'static str) -> Result<T, SuiteError>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, action: &'static str) -> Result<T, SuiteError> {
        self.map_err(|error| SuiteError::System { action, error })
    }
}
