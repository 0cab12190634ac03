//! What can go wrong in the lab. All of it is for the person who runs it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why the lab could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A program could not be started.
    #[error("can't run {program}: {error}")]
    Run {
        /// Which.
        program: String,
        /// Why not.
        error: io::Error,
    },
    /// A program said that it failed.
    #[error("`{command}` failed ({status}): {stderr}")]
    Failed {
        /// As one would type it.
        command: String,
        /// Its exit status.
        status: String,
        /// What it said.
        stderr: String,
    },
    /// Something with a file or socket.
    #[error("can't {action} {path}: {error}")]
    File {
        /// What was tried.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why it didn't work.
        error: io::Error,
    },
    /// A system call without a path.
    #[error("can't {action}: {error}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why it didn't work.
        error: io::Error,
    },
    /// Something that setup would have made is not there.
    #[error("{what} is missing: run `make setup`")]
    Missing {
        /// What.
        what: String,
    },
    /// This system lacks something that setup can't install by itself.
    #[error("{0}")]
    Unsupported(String),
    /// Nothing came in time.
    #[error("{what}: nothing for {waited:?}{detail}")]
    Silent {
        /// Who is silent.
        what: String,
        /// For how long.
        waited: Duration,
        /// What it said last, if that can be known.
        detail: String,
    },
    /// QEMU answered with an error.
    #[error("QEMU refuses {command}: {answer}")]
    Qmp {
        /// What it was told.
        command: String,
        /// What it said.
        answer: String,
    },
    /// The guest answered with an error, or something that makes no sense.
    #[error("the guest answers {answer:?} to {command:?}")]
    Guest {
        /// What it was told.
        command: String,
        /// What it said.
        answer: String,
    },
    /// A migration did not work.
    #[error("{contender}: {reason}")]
    Migration {
        /// Which contender's.
        contender: String,
        /// Why.
        reason: String,
    },
    /// A migration was given up because it took too long.
    #[error("{contender}: not finished after {waited:?}")]
    Late {
        /// Which contender's.
        contender: String,
        /// What it was given.
        waited: Duration,
    },
    /// Text from a tool that isn't what the lab expects.
    #[error("can't understand {what}: {text}")]
    Text {
        /// Whose text.
        what: &'static str,
        /// The text, or the part that is wrong.
        text: String,
    },
}

/// The lab's results.
pub type Result<T> = std::result::Result<T, LabError>;

/// Says what was tried on which path.
pub trait FileContext<T> {
    /// With the path.
    ///
    /// # Errors
    /// The system's, as a [`LabError::File`].
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T> FileContext<T> for io::Result<T> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|error| LabError::File { action, path: path.into(), error })
    }
}

/// Says what was tried of the system.
pub trait SystemContext<T> {
    /// In a few words, after "can't".
    ///
    /// # Errors
    /// The system's, as a [`LabError::System`].
    fn doing(self, action: &'static str) -> Result<T>;
}

impl<T, E: Into<io::Error>> SystemContext<T> for std::result::Result<T, E> {
    fn doing(self, action: &'static str) -> Result<T> {
        self.map_err(|error| LabError::System { action, error: error.into() })
    }
}
