//! Time limits of a migration.

use std::time::{Duration, Instant};

use serde::{Deserialize, Deserializer};

/// The longest limit: anything that takes a day is broken.
const SECONDS_MAX: u64 = 86_400;

/// The time limits. In a file, they are whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Waits {
    /// Until the destination's QEMU waits for the VM. It may have to allocate gigabytes of hugetlb
    /// RAM, and to create images. The destination stops waiting a little sooner than its
    /// source.
    #[serde(deserialize_with = "seconds")]
    pub prepare: Duration,
    /// While nothing of the VM arrives, though it was sent. Lanes drop a silent connection after 8
    /// s and reconnect for 16.
    #[serde(deserialize_with = "seconds")]
    pub stall: Duration,
    /// Until the stopped VM's disks are written and flushed at the destination.
    #[serde(deserialize_with = "seconds")]
    pub drain: Duration,
    /// Until the destination's QEMU has loaded the VM: below a second, unless
    /// the host swaps.
    #[serde(deserialize_with = "seconds")]
    pub load: Duration,
    /// From the end of the stream until QEMU reports completion.
    #[serde(deserialize_with = "seconds")]
    pub complete: Duration,
    /// Until the VM runs at the destination: it opens its disks then, which may take seconds with
    /// slow network storage.
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

/// Detects whether data arrives.
#[derive(Debug)]
pub(crate) struct Pulse {
    bytes: u64,
    silent: Duration,
}

impl Pulse {
    pub(crate) fn new() -> Self {
        Self { bytes: 0, silent: Duration::ZERO }
    }

    /// How long nothing has arrived, when `bytes` have arrived in all and `elapsed` has passed.
    pub(crate) fn beat(&mut self, bytes: u64, elapsed: Duration) -> Duration {
        self.silent = if bytes == self.bytes { self.silent + elapsed } else { Duration::ZERO };
        self.bytes = bytes;
        self.silent
    }
}

/// How often arriving data is checked.
pub(crate) const LOOK: Duration = Duration::from_secs(1);

/// Detects whether data arrives, while messages arrive that are none.
#[derive(Debug)]
pub(crate) struct Silence {
    pulse: Pulse,
    looked: Instant,
}

impl Silence {
    pub(crate) fn new() -> Self {
        Self { pulse: Pulse::new(), looked: Instant::now() }
    }

    /// As [`Pulse::beat`]. Handling a message may take long, which is not the peer's silence.
    pub(crate) fn look(&mut self, bytes: u64, now: Instant) -> Duration {
        let elapsed = now.saturating_duration_since(self.looked).min(LOOK);
        self.looked = now;
        self.pulse.beat(bytes, elapsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Waits, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn missing_limits_have_their_defaults() {
        let waits = parse(r#"{"stall": 7}"#).unwrap();
        assert_eq!(waits, Waits { stall: Duration::from_secs(7), ..Waits::default() });
        assert!(parse(r#"{"stall": 0}"#).unwrap_err().contains("outside"));
        assert!(parse(r#"{"stal": 7}"#).unwrap_err().contains("stal"));
    }

    #[test]
    fn silence_is_the_time_since_data_arrived() {
        let mut pulse = Pulse::new();
        let second = Duration::from_secs(1);
        let table = [(5, 0), (5, 1), (5, 2), (6, 0), (6, 1)];
        for (bytes, silent) in table {
            assert_eq!(pulse.beat(bytes, second), Duration::from_secs(silent), "{bytes}");
        }
    }
    #[test]
    fn messages_without_data_are_silence() {
        let (mut silence, ms) = (Silence::new(), Duration::from_millis);
        let mut now = silence.looked;
        let mut after = |bytes, passed| {
            now += passed;
            silence.look(bytes, now)
        };
        assert_eq!(after(5, ms(900)), Duration::ZERO);
        for messages in 1..=200 {
            assert_eq!(after(5, ms(900)), ms(900) * messages);
        }
        assert_eq!(after(5, ms(90_000)), ms(181_000), "a message took long");
        assert_eq!(after(6, ms(900)), Duration::ZERO);
    }
}
