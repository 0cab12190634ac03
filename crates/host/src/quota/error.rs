//! Errors of this crate.

use std::io;
use std::path::{Path, PathBuf};

/// Why threads can't be throttled, or released.
#[derive(Debug, thiserror::Error)]
pub enum QuotaError {
    /// No cgroup hierarchy limits CPU time here.
    #[error("this host has no cgroups that bound CPU time (the cpu controller is not mounted)")]
    NoController,
    /// A hierarchy exists, but the process's group can't have a group below it.
    #[error("the cgroup {} has no cpu controller for groups below it", group.display())]
    NotDelegated {
        /// The process's group.
        group: PathBuf,
    },
    /// A thread that is scheduled otherwise.
    #[error("thread {thread} has a real-time priority, and quotas of CPU time don't apply to it")]
    RealTime {
        /// The thread.
        thread: u32,
    },
    /// The system refuses.
    #[error("{doing} {}: {source}", path.display())]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// Its path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A note has invalid content.
    #[error("{} is not a note about throttled threads: {source}", path.display())]
    Note {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: NoteError,
    },
}

/// What is wrong with a note.
#[derive(Debug, thiserror::Error)]
pub enum NoteError {
    /// It would name no group.
    #[error("it names no group")]
    Empty,
    /// No note is that long.
    #[error("it has {bytes} bytes")]
    TooLong {
        /// Its length.
        bytes: u64,
    },
    /// It can't be written or read as JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

pub(crate) trait At<T> {
    fn at(self, doing: &'static str, path: &Path) -> Result<T, QuotaError>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, doing: &'static str, path: &Path) -> Result<T, QuotaError> {
        self.map_err(|source| QuotaError::System { doing, path: path.to_owned(), source })
    }
}
