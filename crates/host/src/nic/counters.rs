//! The kernel's table of interfaces: what each has received and sent since it came up.

use std::fs;
use std::time::Duration;

use crate::nic::{NicError, Rate};

/// Bytes of a packet that are not content: headers of Ethernet, IPv4, and TCP with timestamps. The
/// kernel counts merged packets as one, with one header, both in packets and in bytes.
const HEADER_BYTES: u64 = 14 + 20 + 32;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    bytes: u64,
    packets: u64,
}

impl Count {
    /// The rate since `before`. A counter that went back belongs to another interface of the same
    /// name, whose rate is not known.
    pub(crate) fn since(self, before: Self, passed: Duration) -> Rate {
        let (Some(bytes), Some(packets)) =
            (self.bytes.checked_sub(before.bytes), self.packets.checked_sub(before.packets))
        else {
            return Rate::default();
        };
        let content = bytes.saturating_sub(packets.saturating_mul(HEADER_BYTES));
        Rate {
            all_bytes_per_s: per_second(bytes, passed),
            content_bytes_per_s: per_second(content, passed),
        }
    }
}

fn per_second(bytes: u64, passed: Duration) -> u64 {
    let per_second = u128::from(bytes) * 1_000_000_000 / passed.as_nanos().max(1);
    u64::try_from(per_second).unwrap_or(u64::MAX)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) received: Count,
    pub(crate) sent: Count,
}

/// All interfaces of the calling thread's network namespace.
pub(crate) struct Table(String);

impl Table {
    pub(crate) fn read() -> Result<Self, NicError> {
        let action = "reading the counters in /proc/thread-self/net/dev";
        fs::read_to_string("/proc/thread-self/net/dev")
            .map(Self)
            .map_err(|source| NicError::System { action, source })
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.rows().map(|(name, _)| name)
    }

    pub(crate) fn of(&self, name: &str) -> Option<Counters> {
        let (_, row) = self.rows().find(|(one, _)| *one == name)?;
        let numbers: Vec<u64> = row.split_whitespace().map_while(|n| n.parse().ok()).collect();
        // Eight columns for received data, then eight for sent data.
        let count = |at| Some(Count { bytes: *numbers.get(at)?, packets: *numbers.get(at + 1)? });
        Some(Counters { received: count(0)?, sent: count(8)? })
    }

    /// Names, each with the rest of its line; the two header lines contain `|`.
    fn rows(&self) -> impl Iterator<Item = (&str, &str)> {
        let rows = self.0.lines().filter(|line| !line.contains('|'));
        // A name may contain a colon.
        rows.filter_map(|line| line.trim_start().rsplit_once(':'))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TABLE: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 26955885018  614557    0    0    0     0          0         0 26955885018  614557    0    0    0     0       0          0
eth0:1:480218447   16348    0    0    0     0          0         0   915366   10168    0    0    0     0       0          0
  short: 1 2 3
";

    #[test]
    fn rows_are_found_by_name() {
        let table = Table(TABLE.to_owned());
        assert_eq!(table.names().collect::<Vec<_>>(), ["lo", "eth0:1", "short"]);
        let eth0 = table.of("eth0:1").unwrap();
        assert_eq!(eth0.received, Count { bytes: 480_218_447, packets: 16_348 });
        assert_eq!(eth0.sent, Count { bytes: 915_366, packets: 10_168 });
        assert_eq!((table.of("short"), table.of("eth0")), (None, None));
    }

    #[test]
    fn rates_are_without_headers_and_never_of_another_interface() {
        let count = |bytes, packets| Count { bytes, packets };
        let second = Duration::from_secs(1);
        let full = count(1514 * 1000 + 5, 1000 + 7).since(count(5, 7), second);
        assert_eq!((full.all_bytes_per_s, full.content_bytes_per_s), (1_514_000, 1_448_000));
        let half = count(1000, 0).since(count(0, 0), 2 * second);
        assert_eq!(half.all_bytes_per_s, 500);
        assert_eq!(count(10, 10).since(count(11, 0), second), Rate::default());
        assert_eq!(count(66, 2).since(count(0, 0), second).content_bytes_per_s, 0);
    }

    proptest! {
        #[test]
        fn any_text_is_a_table(text in ".{0,300}", passed in any::<u32>()) {
            let table = Table(text);
            let counters: Vec<_> = table.names().filter_map(|name| table.of(name)).collect();
            for counters in counters {
                let _ = counters.sent.since(Count::default(), Duration::from_nanos(passed.into()));
            }
        }
    }
}
