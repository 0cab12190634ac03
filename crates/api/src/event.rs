//! The events that an agent publishes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::gang::GangOutcome;
use crate::migration::{Outcome, Phase};

/// The data of one event of `GET /v1/events`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// The `Last-Event-ID` with which a reader resumes after this event.
    pub id: String,
    /// When it happened, in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// What happened.
    #[serde(flatten)]
    pub what: Happening,
}

/// What happened. Later releases may have more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum Happening {
    /// The agent can't resume after the reader's `Last-Event-ID`: events are missing before the
    /// next one.
    ///
    /// `GET /v1/vms`, `/v1/migrations` and `/v1/gangs` give the present state.
    Gap {
        /// Why.
        why: GapReason,
    },
    /// A migration from this host starts.
    MigrationBegan {
        /// The migration.
        migration: String,
        /// The VM.
        vm: String,
        /// The source host.
        from: String,
        /// The destination host.
        to: String,
    },
    /// A migration enters its next phase.
    MigrationPhase {
        /// The migration.
        migration: String,
        /// The VM.
        vm: String,
        /// The phase that starts.
        phase: Phase,
    },
    /// A migration has ended, and its report is available.
    MigrationEnded {
        /// The migration.
        migration: String,
        /// The VM.
        vm: String,
        /// The source host.
        from: String,
        /// The destination host.
        to: String,
        /// How it ended.
        result: MigrationResult,
        /// Why it failed.
        reason: Option<String>,
        /// From the VM's stop at the source to its start at the destination; none if the VM was
        /// paused or never left.
        downtime_ms: Option<f64>,
        /// From the command to the end, in seconds.
        total_s: f64,
    },
    /// A VM starts to arrive: its QEMU waits for it at this host.
    ArrivalBegan {
        /// The migration, at its source.
        migration: String,
        /// The VM.
        vm: String,
        /// The source host.
        from: String,
    },
    /// It is decided whether the VM now belongs to this host.
    ArrivalEnded {
        /// The migration, at its source.
        migration: String,
        /// The VM.
        vm: String,
        /// The source host.
        from: String,
        /// Whether the VM has become this host's.
        arrived: bool,
    },
    /// A gang that this agent coordinates starts, or is resumed.
    GangBegan {
        /// The gang.
        gang: String,
        /// VMs that it is to move.
        vms: usize,
    },
    /// A gang has ended, and its report is available.
    GangEnded {
        /// The gang.
        gang: String,
        /// How it ended.
        result: GangOutcome,
        /// VMs at their destinations.
        done: usize,
        /// VMs that failed.
        failed: usize,
        /// VMs that were taken back or never started.
        cancelled: usize,
        /// From when it was started, or resumed, in seconds.
        total_s: f64,
    },
    /// The agent can't know which host a VM belongs to, or can't read its record of that.
    VmInDoubt {
        /// The VM.
        vm: String,
        /// What is not known, and what to do.
        problem: String,
    },
    /// A VM is no longer in doubt.
    VmSettled {
        /// The VM.
        vm: String,
    },
    /// The agent uses a renewed certificate from now on.
    CertificateRenewed {
        /// When it ends, in seconds since 1970.
        until_unix_s: i64,
    },
    /// The certificate is about to expire, or has expired.
    ///
    /// Published once for each certificate, and again after the agent starts.
    CertificateExpires {
        /// When it ends, in seconds since 1970.
        until_unix_s: i64,
        /// What to do.
        problem: String,
    },
}

/// Why events are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GapReason {
    /// The agent keeps only the latest events, and the missing ones are older.
    TooOld,
    /// The agent was restarted; all events that follow are from after the restart.
    Restarted,
    /// No event of this agent has that id.
    Unknown,
}

/// How a migration ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationResult {
    /// The VM runs at the destination.
    Done,
    /// The VM did not arrive, or that is not known; see the reason.
    Failed,
    /// The operator cancelled; the VM continues at the source.
    Cancelled,
}

impl From<&Outcome> for MigrationResult {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::Done,
            Outcome::Failed(_) => Self::Failed,
            Outcome::Cancelled => Self::Cancelled,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_flat_object() {
        let event = Event {
            id: "0f-7".to_owned(),
            at_unix_ms: 5,
            what: Happening::MigrationPhase {
                migration: "deadbeef".to_owned(),
                vm: "web1".to_owned(),
                phase: Phase::FirstPass,
            },
        };
        let json = serde_json::to_string(&event).unwrap();
        let expected = r#"{"id":"0f-7","at_unix_ms":5,"event":"migration-phase","migration":"deadbeef","vm":"web1","phase":"first-pass"}"#;
        assert_eq!(json, expected);
        assert_eq!(serde_json::from_str::<Event>(&json).unwrap(), event);
    }
}
