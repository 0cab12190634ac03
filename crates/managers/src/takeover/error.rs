//! The error of this crate.

use std::io;

/// An operation that the system refused.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct TakeoverError {
    what: &'static str,
    source: io::Error,
}

/// Adds to an error what was tried.
pub trait Trying<T> {
    /// Names the operation, as in "opening a file".
    ///
    /// # Errors
    /// If it failed.
    fn trying(self, what: &'static str) -> Result<T, TakeoverError>;
}

impl<T, E: Into<io::Error>> Trying<T> for Result<T, E> {
    fn trying(self, what: &'static str) -> Result<T, TakeoverError> {
        self.map_err(|error| TakeoverError { what, source: error.into() })
    }
}
