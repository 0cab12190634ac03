//! How long a migration waits, for what.

use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// The longest that can be asked for: whatever takes a day is broken.
const SECONDS_MAX: u64 = 86_400;

/// The longest that each thing may take. In a file: whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Waits {
    /// Until the destination's QEMU waits for the VM. It may have to make
    /// gigabytes of hugetlb RAM, and images.
    #[serde(deserialize_with = "seconds")]
    pub prepare: Duration,
    /// Nothing of the VM has arrived, though it was sent. Lanes give a
    /// silent network up after 8 s and try again for 16.
    #[serde(deserialize_with = "seconds")]
    pub stall: Duration,
    /// Until the stopped VM's disks are written and flushed at the destination.
    #[serde(deserialize_with = "seconds")]
    pub drain: Duration,
    /// Until the destination's QEMU has loaded the VM: below a second, unless
    /// the host swaps.
    #[serde(deserialize_with = "seconds")]
    pub load: Duration,
    /// From the stream's end to QEMU's word that it is complete.
    #[serde(deserialize_with = "seconds")]
    pub complete: Duration,
    /// Until the VM runs at the destination: it opens its disks then, and a slow
    /// storage network may take seconds.
    #[serde(deserialize_with = "seconds")]
    pub run: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            prepare: Duration::from_secs(120),
            stall: Duration::from_secs(60),
            drain: Duration::from_secs(60),
            load: Duration::from_secs(60),
            complete: Duration::from_secs(10),
            run: Duration::from_secs(60),
        }
    }
}

fn seconds<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    match u64::deserialize(from)? {
        seconds @ 1..=SECONDS_MAX => Ok(Duration::from_secs(seconds)),
        other => {
            Err(serde::de::Error::custom(format!("{other} seconds are outside 1 to {SECONDS_MAX}")))
        }
    }
}

/// Whether something moves.
#[derive(Debug)]
pub(crate) struct Pulse {
    bytes: u64,
    silent: Duration,
}

impl Pulse {
    pub(crate) fn new() -> Self {
        Self { bytes: 0, silent: Duration::ZERO }
    }

    /// How long nothing has come, now that `bytes` have in all and `elapsed`
    /// has passed.
    pub(crate) fn beat(&mut self, bytes: u64, elapsed: Duration) -> Duration {
        self.silent = if bytes == self.bytes { self.silent + elapsed } else { Duration::ZERO };
        self.bytes = bytes;
        self.silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Waits, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_not_said_is_as_by_default() {
        let waits = parse(r#"{"stall": 7}"#).unwrap();
        assert_eq!(waits, Waits { stall: Duration::from_secs(7), ..Waits::default() });
        assert!(parse(r#"{"stall": 0}"#).unwrap_err().contains("outside"));
        assert!(parse(r#"{"stal": 7}"#).unwrap_err().contains("stal"));
    }

    #[test]
    fn silence_is_what_has_passed_since_something_came() {
        let mut pulse = Pulse::new();
        let second = Duration::from_secs(1);
        let table = [(5, 0), (5, 1), (5, 2), (6, 0), (6, 1)];
        for (bytes, silent) in table {
            assert_eq!(pulse.beat(bytes, second), Duration::from_secs(silent), "{bytes}");
        }
    }
}
