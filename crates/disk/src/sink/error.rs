//! Why a sink accepts nothing more.

use transport::TakeError;

/// Why a sink accepts and writes nothing more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SinkError {
    /// The storage is full.
    #[error("disk {disk}: no space left at the destination")]
    NoSpace {
        /// Its name.
        disk: String,
    },
    /// A write failed.
    #[error("disk {disk} cannot be written at the destination: {why}")]
    Write {
        /// Its name.
        disk: String,
        /// Why.
        why: String,
    },
    /// A flush failed.
    #[error("disk {disk} cannot be flushed at the destination: {why}")]
    Flush {
        /// Its name.
        disk: String,
        /// Why.
        why: String,
    },
    /// There is no such disk.
    #[error("no disk of this migration has the number {number}")]
    Unknown {
        /// The number.
        number: u16,
    },
    /// The sink was closed by its owner.
    #[error("the migration ended")]
    Closed,
}

impl From<SinkError> for TakeError {
    fn from(error: SinkError) -> Self {
        match error {
            SinkError::Closed => Self::Over,
            SinkError::Unknown { .. } => Self::Peer(error.to_string()),
            error => Self::Disk(error.to_string()),
        }
    }
}
