//! Errors of a journal.

use std::io;
use std::path::PathBuf;

use super::line::FILE_BYTES_MAX;
use crate::migration_id::MigrationId;

/// Why a journal can't be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The system refuses.
    #[error("the journal {}: {what}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// It is longer than any journal.
    #[error(
        "the journal {} is longer than {FILE_BYTES_MAX} bytes: it is not a journal",
        .0.display()
    )]
    TooLong(PathBuf),
    /// Its content is damaged.
    #[error(
        "the journal {} is damaged at byte {at}: {why}. It decides which host may run {}, so the \
         agent does not touch that VM. Find out on both hosts where it runs (`droveway list`, \
         QEMU's own status); end what is left of it on the other host; then rename this file, \
         restart the agent, and check the disk that holds the file",
        path.display(), vm.as_deref().unwrap_or("its VM")
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The VM's name, if that can still be read.
        vm: Option<String>,
        /// The offset of the damage.
        at: usize,
        /// What is wrong there.
        why: &'static str,
    },
    /// This migration has a journal on this side already.
    #[error("migration {0} was already here: its journal is still kept")]
    Exists(MigrationId),
}

impl JournalError {
    /// The VM that it is about, if that is known.
    #[must_use]
    pub fn vm(&self) -> Option<&str> {
        match self {
            Self::Damaged { vm, .. } => vm.as_deref(),
            Self::Io { .. } | Self::TooLong(_) | Self::Exists(_) => None,
        }
    }
}
