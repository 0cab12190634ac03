//! Events, as QEMU tells them.

use std::time::{Duration, Instant};

use serde_json::Value;

/// Something happened in QEMU.
#[derive(Clone, Debug)]
pub struct Event {
    /// QEMU's name for it, such as `STOP`.
    pub name: String,
    /// What comes with it; null if nothing does.
    pub data: Value,
    /// When we read it.
    pub at: Instant,
    /// When QEMU says it happened, since 1970 by its host's clock.
    pub happened: Option<Duration>,
}

impl Event {
    /// Whether this is QEMU's `MIGRATION` event with that status.
    #[must_use]
    pub fn is_migration(&self, status: &str) -> bool {
        self.name == "MIGRATION" && self.data["status"] == status
    }

    pub(super) fn parse(name: &str, message: &Value) -> Self {
        let stamp = &message["timestamp"];
        // QEMU writes -1 where its host has no clock.
        let happened = stamp["seconds"].as_u64().and_then(|seconds| {
            let micros = stamp["microseconds"].as_u64()?.min(999_999);
            Duration::from_secs(seconds).checked_add(Duration::from_micros(micros))
        });
        Self { name: name.to_owned(), data: message["data"].clone(), at: Instant::now(), happened }
    }
}
