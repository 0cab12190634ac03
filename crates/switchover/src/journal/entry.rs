//! A journal's content: what was known at the beginning, and one side's records.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::migration_id::MigrationId;

/// The side of a migration that a journal belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The VM left, or was to leave.
    Source,
    /// The VM arrived, or was to arrive.
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

/// Records of one side, and the state that they mean.
pub trait Keeps: Serialize + DeserializeOwned {
    /// The side.
    const SIDE: Side;
    /// The state.
    type Noted;

    /// The state that `records` mean.
    fn noted(opened: &Opened, records: &[Self]) -> Self::Noted;
}

/// What is known when a migration starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Opened {
    /// Its id.
    pub migration: MigrationId,
    /// The VM's name.
    pub vm: String,
    /// The host of the other side.
    pub peer: String,
    /// Where its agent listens.
    pub peer_address: String,
    /// Whether the VM runs; at the destination not known yet.
    pub run: bool,
    /// How to find the VM's QEMU again, in the agent's own format.
    pub qemu: serde_json::Value,
}
