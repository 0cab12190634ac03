//! The journals of both sides that a starting agent finds.

use crate::journal::{JournalDir, JournalError, Reopened, Side};
use crate::migration_id::MigrationId;
use crate::{destination, source};

/// One file of a [`JournalDir`].
#[derive(Debug)]
pub enum Kept {
    /// Of a VM that left, or was to leave.
    Source(Reopened<source::Record>),
    /// Of a VM that arrived, or was to arrive.
    Destination(Reopened<destination::Record>),
    /// A file that can't be read, whose VM needs a human.
    Unreadable(JournalError),
}

impl JournalDir {
    /// All journals.
    ///
    /// # Errors
    /// If the directory can't be read. A file that can't is [`Kept::Unreadable`].
    pub fn contents(&self) -> Result<Vec<Kept>, JournalError> {
        let mut contents = Vec::new();
        for path in self.paths()? {
            let side = path.extension().and_then(|extension| extension.to_str());
            let kept = match side {
                Some("source") => self.reopen(path).map(Kept::Source),
                Some("destination") => self.reopen(path).map(Kept::Destination),
                _ => continue,
            };
            contents.push(kept.unwrap_or_else(Kept::Unreadable));
        }
        Ok(contents)
    }

    /// One migration's journal, if it exists.
    #[must_use]
    pub fn find(&self, migration: &MigrationId, side: Side) -> Option<Kept> {
        if !self.keeps(migration, side) {
            return None;
        }
        let path = self.path(migration, side);
        let kept = match side {
            Side::Source => self.reopen(path).map(Kept::Source),
            Side::Destination => self.reopen(path).map(Kept::Destination),
        };
        Some(kept.unwrap_or_else(Kept::Unreadable))
    }
}
