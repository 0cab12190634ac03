//! A journal's content: what was known at the beginning, and one side's records.

use std::time::{SystemTime, UNIX_EPOCH};

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
    /// Where its agent listens; [`Opened::SAME_HOST`] if that is this agent.
    pub peer_address: String,
    /// Whether the VM runs; at the destination not known yet.
    pub run: bool,
    /// How to find the VM's QEMU again, in the agent's own format.
    pub qemu: serde_json::Value,
    /// None in a journal of release 0.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed: Option<Listed>,
    /// Whether both QEMUs have the same RAM, or the next one gets the former one's taps: the next
    /// one, once it is to run the VM, and the former one, if the VM stays, run only when the other
    /// has ended. Earlier agents hand nothing over.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub handed_over: bool,
}

/// What operators know a migration by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Its id in commands, reports and logs.
    pub id: MigrationId,
    /// When it started, in seconds since 1970.
    pub started_unix_s: u64,
}

impl Listed {
    /// A migration that starts now.
    #[must_use]
    pub fn now(id: MigrationId) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self { id, started_unix_s: since.map_or(0, |since| since.as_secs()) }
    }
}

impl Opened {
    /// In place of an address in both journals of a migration within one host. Agents of earlier
    /// releases find no other side at it, and decide nothing.
    pub const SAME_HOST: &str = "this host";

    /// Whether both sides, and both QEMUs, are on this host.
    #[must_use]
    pub fn is_within_host(&self) -> bool {
        self.peer_address == Self::SAME_HOST
    }

    /// The id for log lines: that of commands and reports, if it is known.
    #[must_use]
    pub fn log_id(&self) -> &MigrationId {
        self.listed.as_ref().map_or(&self.migration, |listed| &listed.id)
    }
}
