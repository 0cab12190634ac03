//! What can go wrong.

use std::io;
use std::path::{Path, PathBuf};

/// Why threads can't be slowed, or let go.
#[derive(Debug, thiserror::Error)]
pub enum QuotaError {
    /// No hierarchy of cgroups bounds CPU time here.
    #[error("this host has no cgroups that bound CPU time (the cpu controller is not mounted)")]
    NoController,
    /// They exist, but not for the process's place.
    #[error("the cgroup {} has no cpu controller for groups below it", group.display())]
    NotDelegated {
        /// The process's.
        group: PathBuf,
    },
    /// The system refuses.
    #[error("{doing} {}: {source}", path.display())]
    System {
        /// What.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A note says something else than it may.
    #[error("{} is not a note about throttled threads: {why}", path.display())]
    Note {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

pub(crate) trait At<T> {
    fn at(self, doing: &'static str, path: &Path) -> Result<T, QuotaError>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, doing: &'static str, path: &Path) -> Result<T, QuotaError> {
        self.map_err(|source| QuotaError::System { doing, path: path.to_owned(), source })
    }
}
