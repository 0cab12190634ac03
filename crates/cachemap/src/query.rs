//! The agent's query to the helper.

use crate::code::{at, checksum};

const MAGIC: &[u8; 8] = b"DROVEASK";

/// The resources that the helper may use in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Percent of one CPU, 1 to 100.
    pub cpu_percent: u16,
    /// The time from the query to the summary.
    pub time_ms: u32,
    /// Memory for lists and buffers. A full walk may also make the kernel cache as many bytes of
    /// file metadata.
    pub memory_bytes: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { cpu_percent: 50, time_ms: 10_000, memory_bytes: 32 << 20 }
    }
}

impl Budget {
    /// The nearest budget that the helper accepts.
    #[must_use]
    pub fn bounded(self) -> Self {
        Self {
            cpu_percent: self.cpu_percent.clamp(1, 100),
            time_ms: self.time_ms.clamp(1, 600_000),
            memory_bytes: self.memory_bytes.clamp(4 << 20, 1 << 30),
        }
    }
}

/// Which answer is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerKind {
    /// Only the greeting, to detect whether there is a helper.
    Greeting,
    /// The map.
    Map,
}

/// A query. Its layout is the same in all versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// The agent's version.
    pub version: u16,
    /// A random number; all of the answer refers to it.
    pub nonce: u64,
    /// Which answer is requested.
    pub answer: AnswerKind,
    /// What the answer may cost.
    pub budget: Budget,
    /// The most runs that the agent accepts.
    pub runs_max: u32,
}

impl Query {
    /// Its size.
    pub const BYTES: usize = 48;
    const SUMMED: usize = 40;

    /// Its bytes on the wire.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let answer: u16 = match self.answer {
            AnswerKind::Greeting => 0,
            AnswerKind::Map => 1,
        };
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&self.version.to_le_bytes());
        bytes.extend_from_slice(&answer.to_le_bytes());
        bytes.extend_from_slice(&self.budget.cpu_percent.to_le_bytes());
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(&self.nonce.to_le_bytes());
        bytes.extend_from_slice(&self.budget.time_ms.to_le_bytes());
        bytes.extend_from_slice(&self.runs_max.to_le_bytes());
        bytes.extend_from_slice(&self.budget.memory_bytes.to_le_bytes());
        let sum = checksum(&[&bytes]);
        bytes.extend_from_slice(&sum.to_le_bytes());
        at(&bytes, 0)
    }

    /// Parses a query. One of another version with an unknown request gets the greeting only.
    #[must_use]
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let (summed, sum) = bytes.split_at(Self::SUMMED);
        if !bytes.starts_with(MAGIC) || checksum(&[summed]).to_le_bytes() != sum {
            return None;
        }
        let answer = match u16::from_le_bytes(at(bytes, 10)) {
            1 => AnswerKind::Map,
            _ => AnswerKind::Greeting,
        };
        Some(Self {
            version: u16::from_le_bytes(at(bytes, 8)),
            nonce: u64::from_le_bytes(at(bytes, 16)),
            answer,
            budget: Budget {
                cpu_percent: u16::from_le_bytes(at(bytes, 12)),
                time_ms: u32::from_le_bytes(at(bytes, 24)),
                memory_bytes: u64::from_le_bytes(at(bytes, 32)),
            },
            runs_max: u32::from_le_bytes(at(bytes, 28)),
        })
    }
}

/// Finds queries in a port's bytes. A query that was cut short, because its agent left, is
/// skipped.
#[derive(Clone, Debug, Default)]
pub struct QueryFinder {
    kept: Vec<u8>,
}

impl QueryFinder {
    /// Takes some bytes. Returns the last whole query in them: a port has one agent at a time, so
    /// earlier ones are void.
    pub fn take(&mut self, bytes: &[u8]) -> Option<Query> {
        self.kept.extend_from_slice(bytes);
        let mut found = None;
        let mut past = 0;
        for (start, window) in self.kept.windows(Query::BYTES).enumerate() {
            if start < past || !window.starts_with(MAGIC) {
                continue;
            }
            if let Some(query) = window.first_chunk().and_then(Query::parse) {
                (found, past) = (Some(query), start + Query::BYTES);
            }
        }
        // The last bytes may be the start of a query.
        let keep = past.max(self.kept.len().saturating_sub(Query::BYTES - 1));
        self.kept.drain(..keep);
        found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn query(nonce: u64) -> Query {
        let budget = Budget { cpu_percent: 7, time_ms: 8, memory_bytes: 9 };
        Query { version: 1, nonce, answer: AnswerKind::Map, budget, runs_max: 10 }
    }

    #[test]
    fn a_changed_query_is_none() {
        let bytes = query(1).to_bytes();
        assert_eq!(Query::parse(&bytes), Some(query(1)));
        for at in 0..Query::BYTES {
            let mut changed = bytes;
            changed[at] ^= 1;
            assert_eq!(Query::parse(&changed), None, "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn queries_are_found_among_garbage_in_any_pieces(
            before in prop::collection::vec(any::<u8>(), 0..200),
            cut in 0..Query::BYTES,
            sizes in prop::collection::vec(1..60_usize, 1..40),
        ) {
            let bytes = [&before[..], &query(3).to_bytes()[..cut], &query(7).to_bytes()].concat();
            let (mut finder, mut found, mut rest) = (QueryFinder::default(), None, &bytes[..]);
            for size in sizes.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (piece, after) = rest.split_at((*size).min(rest.len()));
                found = finder.take(piece).or(found);
                rest = after;
            }
            prop_assert_eq!(found, Some(query(7)));
            prop_assert!(finder.kept.len() < Query::BYTES);
        }
    }

    #[test]
    fn the_last_query_counts() {
        let bytes = [query(1).to_bytes(), query(2).to_bytes()].concat();
        assert_eq!(QueryFinder::default().take(&bytes).map(|query| query.nonce), Some(2));
    }
}
