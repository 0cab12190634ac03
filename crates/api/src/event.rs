//! What happens at an agent, as it tells of it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::gang::GangOutcome;
use crate::migration::{Outcome, Phase};

/// The data of one event of `GET /v1/events`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// What to send as `Last-Event-ID` to go on after it.
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
    /// What the reader asked to go on from can't be gone on from: events are missing
    /// before the next one. `GET /v1/vms`, `/v1/migrations` and `/v1/gangs` say how things
    /// are.
    Gap {
        /// Why.
        why: GapReason,
    },
    /// A migration from this host begins.
    MigrationBegan {
        /// The migration.
        migration: String,
        /// Which VM.
        vm: String,
        /// From which host.
        from: String,
        /// To which host.
        to: String,
    },
    /// It comes to its next phase.
    MigrationPhase {
        /// The migration.
        migration: String,
        /// Which VM.
        vm: String,
        /// The phase that begins.
        phase: Phase,
    },
    /// It has ended, and its report is there.
    MigrationEnded {
        /// The migration.
        migration: String,
        /// Which VM.
        vm: String,
        /// From which host.
        from: String,
        /// To which host.
        to: String,
        /// How.
        result: MigrationResult,
        /// Why it failed.
        reason: Option<String>,
        /// From the VM's stop at the source to its start at the destination; none if it
        /// was paused or never left.
        downtime_ms: Option<f64>,
        /// From the command to the end, in seconds.
        total_s: f64,
    },
    /// A VM begins to arrive: a QEMU waits for it here.
    ArrivalBegan {
        /// The migration, at its source.
        migration: String,
        /// Which VM.
        vm: String,
        /// From which host.
        from: String,
    },
    /// It is decided whether the VM is here.
    ArrivalEnded {
        /// The migration, at its source.
        migration: String,
        /// Which VM.
        vm: String,
        /// From which host.
        from: String,
        /// Whether the VM is here from now on.
        arrived: bool,
    },
    /// A gang that this agent coordinates begins, or is taken up again.
    GangBegan {
        /// The gang.
        gang: String,
        /// VMs that it is to move.
        vms: usize,
    },
    /// It has ended, and its report is there.
    GangEnded {
        /// The gang.
        gang: String,
        /// How.
        result: GangOutcome,
        /// VMs at their destinations.
        done: usize,
        /// VMs that failed.
        failed: usize,
        /// VMs that were taken back or never begun.
        cancelled: usize,
        /// From its begin, or from when it was taken up again, in seconds.
        total_s: f64,
    },
    /// It can't be known which host a VM belongs to, or what is kept of that can't be
    /// read.
    VmInDoubt {
        /// Which VM.
        vm: String,
        /// What is not known, and what to do.
        problem: String,
    },
    /// That is decided.
    VmSettled {
        /// Which VM.
        vm: String,
    },
    /// A certificate that was renewed is used from now on.
    CertificateRenewed {
        /// When it ends, in seconds since 1970.
        until_unix_s: i64,
    },
    /// The certificate is about to end, or has ended. Once for each certificate, and again
    /// after the agent's start.
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
    /// The agent keeps the latest events only, and these are no longer among them.
    TooOld,
    /// The agent was started since. All that follows is of this start.
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
    /// It goes on at the source.
    Failed,
    /// The operator cancelled; it goes on at the source.
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
