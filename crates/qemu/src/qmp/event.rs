//! QEMU's events.

use std::time::{Duration, Instant};

use serde_json::Value;

/// An event in QEMU.
#[derive(Clone, Debug)]
pub struct Event {
    /// QEMU's name for it, such as `STOP`.
    pub name: String,
    /// Its data; null if it has none.
    pub data: Value,
    /// When it was read.
    pub at: Instant,
    /// When it happened according to QEMU, since 1970 by its host's clock.
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
