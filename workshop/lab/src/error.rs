//! Errors of the lab, for the person who runs it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why the lab could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A program could not be started.
    #[error("can't run {program}: {error}")]
    Run {
        /// The program.
        program: String,
        /// Why not.
        error: io::Error,
    },
    /// A program reported failure.
    #[error("`{command}` failed ({status}): {stderr}")]
    Failed {
        /// The command as one would type it.
        command: String,
        /// Its exit status.
        status: String,
        /// Its standard error, or its output if that is empty.
        stderr: String,
    },
    /// An operation on a file or socket failed.
    #[error("can't {action} {path}: {error}")]
    File {
        /// What was tried.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why it didn't work.
        error: io::Error,
    },
    /// A system call without a path failed.
    #[error("can't {action}: {error}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why it didn't work.
        error: io::Error,
    },
    /// Something that `make setup` makes is missing.
    #[error("{what} is missing: run `make setup`")]
    Missing {
        /// What is missing.
        what: String,
    },
    /// This system lacks something that setup can't install by itself.
    #[error("{0}")]
    Unsupported(String),
    /// Nothing arrived in time.
    #[error("{what}: nothing for {waited:?}{detail}")]
    Silent {
        /// What is silent.
        what: String,
        /// For how long.
        waited: Duration,
        /// Its last output, if known.
        detail: String,
    },
    /// QEMU answered with an error.
    #[error("QEMU refuses {command}: {answer}")]
    Qmp {
        /// The command.
        command: String,
        /// QEMU's answer.
        answer: String,
    },
    /// The guest answered with an error, or with nonsense.
    #[error("the guest answers {answer:?} to {command:?}")]
    Guest {
        /// The command.
        command: String,
        /// The guest's answer.
        answer: String,
    },
    /// A migration did not work.
    #[error("{contender}: {reason}")]
    Migration {
        /// Whose migration.
        contender: String,
        /// Why.
        reason: String,
    },
    /// A migration was given up because it took too long.
    #[error("{contender}: not finished after {waited:?}")]
    Late {
        /// Whose migration.
        contender: String,
        /// The time that it was given.
        waited: Duration,
    },
    /// Text from a tool that isn't what the lab expects.
    #[error("can't understand {what}: {text}")]
    Text {
        /// Where the text is from.
        what: &'static str,
        /// The text, or the part that is wrong.
        text: String,
    },
}

/// The lab's results.
pub type Result<T> = std::result::Result<T, LabError>;

/// Adds the action and the path to an error.
pub trait FileContext<T> {
    /// Takes the action in a few words, after "can't", and the path.
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

/// Adds the action to an error.
pub trait SystemContext<T> {
    /// Takes the action in a few words, after "can't".
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
