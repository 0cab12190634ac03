//! What becomes of RAM in shared files in a migration.

use super::Settings;
use crate::qmp::QmpError;

/// The capability by which both QEMUs leave such RAM out of the stream.
const IGNORE_SHARED: &str = "x-ignore-shared";

/// What becomes of RAM in shared files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ram {
    /// It is sent, as other RAM is.
    Sent,
    /// It stays where it is: both QEMUs have mapped the same files.
    HandedOver,
}

impl Ram {
    /// Checks that QEMU can do so. One that can't would send pages to the memory that they come
    /// from.
    ///
    /// # Errors
    /// If it can't.
    pub(crate) fn check(self, settings: &Settings) -> Result<(), QmpError> {
        if self == Self::Sent || settings.has_capability(IGNORE_SHARED) {
            return Ok(());
        }
        let why = format!("this QEMU can't hand its RAM over: it has no {IGNORE_SHARED}");
        Err(QmpError::Migration(why))
    }

    /// Whether QEMU needs this capability for it.
    pub(crate) fn switches_on(self, capability: &str) -> bool {
        self == Self::HandedOver && capability == IGNORE_SHARED
    }
}
