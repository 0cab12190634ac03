//! The records of the source's journal, and the state that they mean.

use serde::{Deserialize, Serialize};

use super::Outcome;
use crate::Found;
use crate::journal::{Keeps, Opened, Side};
use crate::reason::Reason;

/// A decision of the source.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "phase")]
pub enum Record {
    /// QEMU has stopped the VM; or before that, its owner has paused it or let it run again. There
    /// is no separate record for the latter, because agents of earlier releases could not read it.
    Stopped {
        /// Whether the VM runs when it continues.
        run: bool,
    },
    /// The VM is given up.
    Committed {
        /// Whether it runs at the destination.
        run: bool,
    },
    /// The VM was never given up, and stays.
    Aborted {
        /// Why.
        reason: Reason,
    },
    /// The VM was given up, and came back.
    Reclaimed {
        /// Who decided that.
        by: By,
        /// Why.
        reason: Reason,
        /// Whether the destination has said since that it runs the VM, which does not run here. A
        /// field, because agents of earlier releases could not read another record.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        runs_there: bool,
    },
    /// The VM was given up, and the operator decided to give up the copy here too.
    Dropped,
}

/// Who decided that a VM came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// The destination refused it.
    Destination,
    /// The operator took it back.
    Operator,
}

/// The state that a journal's records mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Noted {
    /// The last decision.
    pub phase: Phase,
    /// Whether the VM runs.
    pub run: bool,
}

/// The last decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// There is none.
    Opened,
    /// There is none, but the VM was stopped.
    Stopped,
    /// The VM is given up.
    Committed,
    /// The VM stays.
    Aborted,
    /// The VM came back.
    Reclaimed(By),
    /// The operator took the VM back, and the destination says that it runs it.
    RunsThereToo,
    /// The VM is given up, and so is the copy here.
    Dropped,
}

impl Noted {
    /// A journal without records.
    #[must_use]
    pub fn opened(run: bool) -> Self {
        Self { phase: Phase::Opened, run }
    }

    /// The state after one more record.
    #[must_use]
    pub fn with(self, record: &Record) -> Self {
        let run = self.run;
        match record {
            Record::Stopped { run } => Self { phase: Phase::Stopped, run: *run },
            Record::Committed { run } => Self { phase: Phase::Committed, run: *run },
            Record::Aborted { .. } => Self { phase: Phase::Aborted, run },
            Record::Reclaimed { by: By::Operator, runs_there: true, .. } => {
                Self { phase: Phase::RunsThereToo, run }
            }
            Record::Reclaimed { by, .. } => Self { phase: Phase::Reclaimed(*by), run },
            Record::Dropped => Self { phase: Phase::Dropped, run },
        }
    }

    /// The VM's fate, if it was decided before a restart of the agent. That may not be noted
    /// elsewhere.
    #[must_use]
    pub fn decided(self, found: Found) -> Option<Outcome> {
        match (self.phase, found) {
            (
                Phase::Reclaimed(By::Operator) | Phase::RunsThereToo,
                Found::Missing | Found::Runs,
            ) => Some(Outcome::Stays { reason: "the operator took it back".into() }),
            (Phase::Dropped, Found::Missing) => Some(Outcome::Moved),
            _ => None,
        }
    }
}

impl Keeps for Record {
    const SIDE: Side = Side::Source;
    type Noted = Noted;

    fn noted(opened: &Opened, records: &[Self]) -> Noted {
        records.iter().fold(Noted::opened(opened.run), Noted::with)
    }
}
