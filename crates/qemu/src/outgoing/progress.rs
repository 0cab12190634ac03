//! Parses the answer to `query-migrate`.

use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// Short: a QEMU that stops a VM holds its big lock, and a figure is not worth the wait.
pub(super) const PROGRESS_WAIT: Duration = Duration::from_secs(1);

/// The status of QEMU's migration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Status {
    /// There was none.
    #[default]
    None,
    /// It has started.
    Setup,
    /// It makes passes over RAM.
    Active,
    /// The VM is stopped, disks are prepared.
    PreSwitchover,
    /// The VM is stopped, its devices are written.
    Device,
    /// Everything is written.
    Completed,
    /// It failed; the VM continues.
    Failed,
    /// It is about to be cancelled.
    Cancelling,
    /// It was cancelled; the VM continues.
    Cancelled,
    /// Any other, as QEMU calls it.
    Other(String),
}

impl Status {
    fn parse(status: &str) -> Self {
        match status {
            "none" => Self::None,
            "setup" => Self::Setup,
            "active" => Self::Active,
            "pre-switchover" => Self::PreSwitchover,
            "device" => Self::Device,
            "completed" => Self::Completed,
            "failed" => Self::Failed,
            "cancelling" => Self::Cancelling,
            "cancelled" => Self::Cancelled,
            other => Self::Other(other.to_owned()),
        }
    }

    /// Whether it has started and not ended.
    #[must_use]
    pub fn is_going_on(&self) -> bool {
        !matches!(self, Self::None | Self::Completed | Self::Failed | Self::Cancelled)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Setup => "setup",
            Self::Active => "active",
            Self::PreSwitchover => "pre-switchover",
            Self::Device => "device",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
            Self::Other(name) => name,
        })
    }
}

/// The progress of QEMU's migration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// Whether it continues, and how it ended.
    pub status: Status,
    /// Guest RAM in all.
    pub total_bytes: u64,
    /// Guest RAM that QEMU has yet to hand over.
    pub remaining_bytes: u64,
    /// Passes started.
    pub dirty_sync_count: u32,
    /// Guest bytes dirtied per second, as QEMU estimated a while ago.
    pub dirty_bytes_per_s: u64,
    /// Pages that were sent with their content.
    pub normal_pages: u64,
    /// Pages that were sent as one byte repeated.
    pub fill_pages: u64,
    /// How long the VM was stopped, once the migration has ended.
    pub downtime_ms: Option<u64>,
    /// QEMU's error, if it failed.
    pub error: Option<String>,
    /// QEMU's reasons why this VM can't be migrated at all.
    pub blocked: Vec<String>,
}

impl Progress {
    pub(crate) fn query(qmp: &Qmp, timeout: Duration) -> Result<Self, QmpError> {
        qmp.execute_within("query-migrate", json!({}), timeout).map(|answer| Self::parse(&answer))
    }

    /// Which fields exist depends on the phase; a missing one counts as 0.
    fn parse(answer: &Value) -> Self {
        let ram = &answer["ram"];
        let number = |name: &str| ram[name].as_u64().unwrap_or(0);
        let page_bytes = ram["page-size"].as_u64().unwrap_or(4096);
        let words = |value: &Value| value.as_str().map(str::to_owned);
        Self {
            status: Status::parse(answer["status"].as_str().unwrap_or("none")),
            total_bytes: number("total"),
            remaining_bytes: number("remaining"),
            dirty_sync_count: u32::try_from(number("dirty-sync-count")).unwrap_or(u32::MAX),
            dirty_bytes_per_s: number("dirty-pages-rate").saturating_mul(page_bytes),
            normal_pages: number("normal"),
            fill_pages: number("duplicate"),
            downtime_ms: answer["downtime"].as_u64(),
            error: words(&answer["error-desc"]),
            blocked: answer["blocked-reasons"]
                .as_array()
                .map(|reasons| reasons.iter().filter_map(words).collect())
                .unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_with_everything_and_one_with_nothing() {
        let answer = json!({
            "status": "active", "total-time": 8, "expected-downtime": 300,
            "ram": {"total": 553_918_464, "postcopy-requests": 0, "dirty-sync-count": 3,
                "multifd-bytes": 0, "pages-per-second": 0, "page-size": 4096,
                "remaining": 544_145_408, "mbps": 0, "transferred": 82_944, "duplicate": 2384,
                "dirty-pages-rate": 10, "skipped": 0, "normal-bytes": 61_440, "normal": 15}
        });
        let progress = Progress::parse(&answer);
        assert_eq!(progress.status, Status::Active);
        assert_eq!((progress.total_bytes, progress.remaining_bytes), (553_918_464, 544_145_408));
        assert_eq!((progress.dirty_sync_count, progress.dirty_bytes_per_s), (3, 40_960));
        assert_eq!((progress.normal_pages, progress.fill_pages), (15, 2384));

        let nothing = Progress::parse(&json!({}));
        assert_eq!((nothing.status, nothing.total_bytes), (Status::None, 0));
        for odd in [json!(null), json!([1]), json!({"ram": 7, "status": 7, "blocked-reasons": 1})] {
            assert_eq!(Progress::parse(&odd).status, Status::None);
        }
    }

    #[test]
    fn reasons_and_errors_are_those_of_qemu() {
        let answer = json!({"blocked-reasons": ["9p is mounted"], "status": "failed",
            "error-desc": "Unable to write"});
        let progress = Progress::parse(&answer);
        assert_eq!(progress.blocked, ["9p is mounted"]);
        assert_eq!(progress.error.as_deref(), Some("Unable to write"));
        assert!(!progress.status.is_going_on());
        assert!(Status::parse("wait-unplug").is_going_on());
    }
}
