//! What a journal holds: what was known at the beginning, and one side's records.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::migration_id::MigrationId;

/// Which side of a migration a journal is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The VM left, or was to leave.
    Source,
    /// The VM came, or was to come.
    Destination,
}

impl Side {
    pub(super) fn extension(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

/// Records of one side, and what they amount to.
pub trait Keeps: Serialize + DeserializeOwned {
    /// Whose they are.
    const SIDE: Side;
    /// What they amount to.
    type Noted;

    /// What `records` amount to.
    fn noted(opened: &Opened, records: &[Self]) -> Self::Noted;
}

/// What is known when a migration begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Opened {
    /// Its id.
    pub migration: MigrationId,
    /// The VM's name.
    pub vm: String,
    /// The other side's host.
    pub peer: String,
    /// Where its agent listens.
    pub peer_address: String,
    /// Whether the VM runs; at the destination not known yet.
    pub run: bool,
    /// What finds the VM's QEMU again; the agent's business.
    pub qemu: serde_json::Value,
}
