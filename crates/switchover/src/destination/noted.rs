//! What the destination's journal holds, and which state that means.

use serde::{Deserialize, Serialize};

use crate::journal::{Keeps, Opened, Side};
use crate::reason::Reason;

/// One thing that happened or was decided here.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "phase")]
pub enum Record {
    /// The VM is loaded.
    Loaded,
    /// The VM is to run here; written before it does.
    Starting,
    /// The VM is here.
    Running,
    /// The VM never ran here and never will.
    Refused {
        /// Why.
        reason: Reason,
    },
    /// The VM ran here, or may have, and died.
    Lost {
        /// How.
        reason: Reason,
    },
    /// The VM was here, and is its owner's matter.
    Left,
}

/// The state that a journal's records mean: the last record's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Noted {
    /// There is none.
    Opened,
    /// [`Record::Loaded`].
    Loaded,
    /// [`Record::Starting`].
    Starting,
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
    /// With one more record.
    #[must_use]
    pub fn with(self, record: &Record) -> Self {
        match record {
            Record::Loaded => Self::Loaded,
            Record::Starting => Self::Starting,
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
