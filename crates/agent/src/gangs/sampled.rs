//! What a host's agent knows of a VM's content, as it is said to a coordinator.

use engine::Sample;
use page::PAGE_BYTES;
use serde::{Deserialize, Serialize};

/// Contents of one VM that are said at most: half a MiB of text.
pub(crate) const HINTS_MAX: usize = 1 << 16;
/// How much coarser a sample may be than it was asked for.
const COARSER_MAX: u32 = 64;
/// Letters of a hint.
const LETTERS: usize = 8;

/// As it is said: the sample of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sampled {
    /// How many times all of its memory was looked at.
    pub(crate) rounds: u64,
    /// How many pages have a name.
    pub(crate) pages: u64,
    /// One in so many contents is in it; perhaps more than it was asked for.
    pub(crate) one_in: u32,
    /// Eight hex digits for each.
    pub(crate) hints: String,
}

/// As it is meant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) rounds: u64,
    pub(super) pages: u64,
    pub(super) sample: Sample,
}

impl Sampled {
    /// Of a sample that may be too large to be said whole.
    pub(super) fn new(rounds: u64, pages: u64, mut sample: Sample) -> Self {
        while sample.hints.len() > HINTS_MAX && sample.one_in < u32::MAX / 2 {
            let coarser = sample.one_in * 2;
            sample = sample.thinned(coarser);
        }
        let hints = sample.hints.iter().map(|hint| format!("{hint:08x}")).collect();
        Self { rounds, pages, one_in: sample.one_in, hints }
    }

    /// How fine a sample of so many pages may be, that is to be one in `one_in`.
    pub(super) fn one_in(pages: u64, one_in: u32) -> u32 {
        let needed = u32::try_from(pages / HINTS_MAX as u64).unwrap_or(u32::MAX / 2);
        one_in.max(needed.checked_next_power_of_two().unwrap_or(1 << 31))
    }

    /// What another host says, if that can be so of a VM with that much RAM.
    pub(super) fn understood(&self, ram_bytes: u64, asked_one_in: u32) -> Option<Content> {
        let coarsest = asked_one_in.saturating_mul(COARSER_MAX);
        let letters = self.hints.as_bytes();
        let plain = (asked_one_in..=coarsest).contains(&self.one_in)
            && self.one_in > 0
            && self.pages <= ram_bytes / PAGE_BYTES as u64
            && letters.len() <= HINTS_MAX * LETTERS
            && letters.len().is_multiple_of(LETTERS);
        let last = u32::MAX / self.one_in.max(1);
        let hint = |text: &[u8]| {
            let text = std::str::from_utf8(text).ok()?;
            let digits = text.bytes().all(|letter| letter.is_ascii_hexdigit());
            let hint = u32::from_str_radix(text, 16).ok().filter(|_| digits)?;
            (1..=last).contains(&hint).then_some(hint)
        };
        let hints = letters.chunks(LETTERS).map(hint).collect::<Option<Vec<u32>>>();
        let hints = hints.filter(|_| plain)?;
        let sample = Sample { one_in: self.one_in, hints };
        Some(Content { rounds: self.rounds, pages: self.pages, sample })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAM: u64 = 1 << 30;

    fn said(hints: &str) -> Sampled {
        Sampled { rounds: 1, pages: 9, one_in: 2, hints: hints.to_owned() }
    }

    #[test]
    fn what_is_said_is_understood() {
        let sample = Sample { one_in: 2, hints: vec![1, 0x7fff_ffff, 0xabc] };
        let sampled = Sampled::new(3, 77, sample.clone());
        assert_eq!(sampled.hints, "000000017fffffff00000abc");
        let content = sampled.understood(RAM, 2).unwrap();
        assert_eq!(content, Content { rounds: 3, pages: 77, sample });
        assert_eq!(said("").understood(RAM, 2).unwrap().sample.hints, [0; 0]);
    }

    #[test]
    fn what_is_too_large_is_said_in_part() {
        let hints: Vec<u32> = (1..=400_000_u32).map(|nth| nth * 10_000).collect();
        let sampled = Sampled::new(1, 400_000, Sample { one_in: 1, hints });
        assert_eq!(sampled.one_in, 8);
        let content = sampled.understood(1 << 32, 1).unwrap();
        assert!((40_000..=HINTS_MAX).contains(&content.sample.hints.len()));
    }

    #[test]
    fn a_large_vm_is_not_listed_to_be_sampled() {
        assert_eq!(
            [0, 65_535, 65_536, 200_000].map(|pages| Sampled::one_in(pages, 1)),
            [1, 1, 1, 4]
        );
        assert_eq!((Sampled::one_in(1, 8), Sampled::one_in(u64::MAX, 1)), (8, 1 << 31));
    }

    #[test]
    fn what_cannot_be_is_not_believed() {
        assert!(said("0000000a").understood(RAM, 2).is_some());
        for hints in
            ["0000000", "0000000a0", "+000000a", "0000000g", "00000000", "ffffffff", "ä23456"]
        {
            assert_eq!(said(hints).understood(RAM, 2), None, "{hints}");
        }
        let long = said(&"0000000a".repeat(HINTS_MAX + 1));
        assert_eq!(long.understood(RAM, 2), None);
        let one = said("0000000a");
        assert_eq!(one.understood(8 * 4096, 2), None, "more pages than it has");
        assert_eq!(one.understood(RAM, 4), None, "finer than it was asked for");
        assert_eq!(Sampled { one_in: 1 << 20, ..one.clone() }.understood(RAM, 2), None);
        assert_eq!(Sampled { one_in: 0, ..one }.understood(RAM, 0), None);
    }
}
