//! QEMU's events.

use std::time::Instant;

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
}

impl Event {
    pub(super) fn parse(name: &str, message: &Value) -> Self {
        Self { name: name.to_owned(), data: message["data"].clone(), at: Instant::now() }
    }
}
