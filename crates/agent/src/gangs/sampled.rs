//! A sample of a VM's content, as a host's agent sends it to a coordinator.

use engine::Sample;
use page::PAGE_BYTES;
use wire::gang::{HINTS_MAX, Sampled};

/// How much coarser than requested a sample may be.
const COARSER_MAX: u32 = 64;
/// Hex digits of a hint.
const LETTERS: usize = 8;

/// A parsed and checked sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) rounds: u64,
    pub(super) pages: u64,
    pub(super) sample: Sample,
}

/// Encodes a sample, thinned if it is too large.
pub(super) fn said(rounds: u64, pages: u64, mut sample: Sample) -> Sampled {
    while sample.hints.len() > HINTS_MAX && sample.one_in < u32::MAX / 2 {
        let coarser = sample.one_in * 2;
        sample = sample.thinned(coarser);
    }
    let hints = sample.hints.iter().map(|hint| format!("{hint:08x}")).collect();
    Sampled { rounds, pages, one_in: sample.one_in, hints }
}

/// The rate for a sample of so many pages: at least `one_in`, and coarse enough to fit.
pub(super) fn one_in(pages: u64, one_in: u32) -> u32 {
    let needed = u32::try_from(pages / HINTS_MAX as u64).unwrap_or(u32::MAX / 2);
    one_in.max(needed.checked_next_power_of_two().unwrap_or(1 << 31))
}

/// Parses another host's sample; none if it is impossible for a VM with that much RAM.
pub(super) fn understood(sampled: &Sampled, ram_bytes: u64, asked_one_in: u32) -> Option<Content> {
    let coarsest = asked_one_in.saturating_mul(COARSER_MAX);
    let letters = sampled.hints.as_bytes();
    let plain = (asked_one_in..=coarsest).contains(&sampled.one_in)
        && sampled.one_in > 0
        && sampled.pages <= ram_bytes / PAGE_BYTES as u64
        && letters.len() <= HINTS_MAX * LETTERS
        && letters.len().is_multiple_of(LETTERS);
    let last = u32::MAX / sampled.one_in.max(1);
    let hint = |text: &[u8]| {
        let text = std::str::from_utf8(text).ok()?;
        let digits = text.bytes().all(|letter| letter.is_ascii_hexdigit());
        let hint = u32::from_str_radix(text, 16).ok().filter(|_| digits)?;
        (1..=last).contains(&hint).then_some(hint)
    };
    let hints = letters.chunks(LETTERS).map(hint).collect::<Option<Vec<u32>>>();
    let hints = hints.filter(|_| plain)?;
    let sample = Sample { one_in: sampled.one_in, hints };
    Some(Content { rounds: sampled.rounds, pages: sampled.pages, sample })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAM: u64 = 1 << 30;

    fn of_hints(hints: &str) -> Sampled {
        Sampled { rounds: 1, pages: 9, one_in: 2, hints: hints.to_owned() }
    }

    #[test]
    fn a_sample_is_encoded_and_parsed() {
        let sample = Sample { one_in: 2, hints: vec![1, 0x7fff_ffff, 0xabc] };
        let sampled = said(3, 77, sample.clone());
        assert_eq!(sampled.hints, "000000017fffffff00000abc");
        let content = understood(&sampled, RAM, 2).unwrap();
        assert_eq!(content, Content { rounds: 3, pages: 77, sample });
        assert_eq!(understood(&of_hints(""), RAM, 2).unwrap().sample.hints, [0; 0]);
    }

    #[test]
    fn a_sample_that_is_too_large_is_thinned() {
        let hints: Vec<u32> = (1..=400_000_u32).map(|nth| nth * 10_000).collect();
        let sampled = said(1, 400_000, Sample { one_in: 1, hints });
        assert_eq!(sampled.one_in, 8);
        let content = understood(&sampled, 1 << 32, 1).unwrap();
        assert!((40_000..=HINTS_MAX).contains(&content.sample.hints.len()));
    }

    #[test]
    fn a_large_vm_gets_a_coarser_sample() {
        assert_eq!([0, 65_535, 65_536, 200_000].map(|pages| one_in(pages, 1)), [1, 1, 1, 4]);
        assert_eq!((one_in(1, 8), one_in(u64::MAX, 1)), (8, 1 << 31));
    }

    #[test]
    fn impossible_samples_are_refused() {
        assert!(understood(&of_hints("0000000a"), RAM, 2).is_some());
        for hints in
            ["0000000", "0000000a0", "+000000a", "0000000g", "00000000", "ffffffff", "ä23456"]
        {
            assert_eq!(understood(&of_hints(hints), RAM, 2), None, "{hints}");
        }
        let long = of_hints(&"0000000a".repeat(HINTS_MAX + 1));
        assert_eq!(understood(&long, RAM, 2), None);
        let one = of_hints("0000000a");
        assert_eq!(understood(&one, 8 * 4096, 2), None, "more pages than it has");
        assert_eq!(understood(&one, RAM, 4), None, "finer than it was asked for");
        assert_eq!(understood(&Sampled { one_in: 1 << 20, ..one.clone() }, RAM, 2), None);
        assert_eq!(understood(&Sampled { one_in: 0, ..one }, RAM, 0), None);
    }
}
