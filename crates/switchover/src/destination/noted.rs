//! The records of the destination's journal, and the state that they mean.

use serde::{Deserialize, Serialize};

use crate::journal::{Keeps, Opened, Side};
use crate::reason::Reason;

/// An event or a decision of this side.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "phase")]
pub enum Record {
    /// The VM is loaded.
    Loaded,
    /// The VM is to run here; written before it runs.
    Starting {
        /// Whether the source has said since that the VM was taken back. A field, because agents of
        /// earlier releases could not read another record.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        taken_back: bool,
    },
    /// The VM is here.
    Running,
    /// The VM never ran here and never will.
    Refused {
        /// Why.
        reason: Reason,
    },
    /// The VM ran here, or may have, and died.
    Lost {
        /// How it died.
        reason: Reason,
    },
    /// The VM was here, and is in its owner's hands now.
    Left,
}

/// The state that a journal's records mean: that of the last record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Noted {
    /// There is no record.
    Opened,
    /// [`Record::Loaded`].
    Loaded,
    /// [`Record::Starting`].
    Starting,
    /// [`Record::Starting`], and the VM was taken back.
    TakenBackMeanwhile,
    /// [`Record::Running`].
    Running,
    /// [`Record::Refused`].
    Refused,
    /// [`Record::Lost`].
    Lost,
    /// [`Record::Left`].
    Left,
}

impl Noted {
    /// The state after one more record.
    #[must_use]
    pub fn with(self, record: &Record) -> Self {
        match record {
            Record::Loaded => Self::Loaded,
            Record::Starting { taken_back: false } => Self::Starting,
            Record::Starting { taken_back: true } => Self::TakenBackMeanwhile,
            Record::Running => Self::Running,
            Record::Refused { .. } => Self::Refused,
            Record::Lost { .. } => Self::Lost,
            Record::Left => Self::Left,
        }
    }
}

impl Keeps for Record {
    const SIDE: Side = Side::Destination;
    type Noted = Noted;

    fn noted(_: &Opened, records: &[Self]) -> Noted {
        records.iter().fold(Noted::Opened, Noted::with)
    }
}
