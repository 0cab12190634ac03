//! Runs of zeros within written data.

use page::{PAGE_BYTES, is_zero};

/// Shortest run of zeros that is sent as such. Each run costs the destination
/// a request of its own, and shorter ones compress well.
pub(crate) const ZERO_RUN_MIN: usize = 32 << 10;

/// The first run of `bytes`, written at `offset`: its length, and whether it is
/// zero. Zeros are looked for in aligned 4 KiB pieces of the disk. Short runs of
/// them count as data, unless all of `bytes` is zero.
pub(crate) fn first_run(offset: u64, bytes: &[u8]) -> (usize, bool) {
    let (mut at, mut zeros) = (0, 0);
    let into_page = usize::try_from(offset % PAGE_BYTES as u64).unwrap_or(0);
    while at < bytes.len() {
        let piece = (PAGE_BYTES - (into_page + at) % PAGE_BYTES).min(bytes.len() - at);
        if is_zero(&bytes[at..at + piece]) {
            zeros += piece;
        } else if zeros >= ZERO_RUN_MIN {
            break;
        } else {
            zeros = 0;
        }
        at += piece;
        if zeros >= ZERO_RUN_MIN && zeros < at {
            return (at - zeros, false);
        }
    }
    (at, zeros == at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn runs(mut offset: u64, mut bytes: &[u8]) -> Vec<(usize, bool)> {
        let mut runs = Vec::new();
        while !bytes.is_empty() {
            let (length, zero) = first_run(offset, bytes);
            assert!(length > 0);
            runs.push((length, zero));
            (offset, bytes) = (offset + length as u64, &bytes[length..]);
        }
        runs
    }

    #[test]
    fn only_long_runs_count_unless_all_is_zero() {
        let mut bytes = vec![0; 3 * ZERO_RUN_MIN];
        assert_eq!(runs(0, &bytes), [(3 * ZERO_RUN_MIN, true)]);
        assert_eq!(runs(512, &bytes[..512]), [(512, true)]);
        bytes[ZERO_RUN_MIN] = 1;
        assert_eq!(
            runs(0, &bytes),
            [(ZERO_RUN_MIN, true), (PAGE_BYTES, false), (2 * ZERO_RUN_MIN - PAGE_BYTES, true)]
        );
        bytes[2 * ZERO_RUN_MIN] = 1;
        assert_eq!(runs(0, &bytes), [(ZERO_RUN_MIN, true), (2 * ZERO_RUN_MIN, false)]);
        bytes[0] = 1;
        assert_eq!(runs(0, &bytes), [(3 * ZERO_RUN_MIN, false)]);
    }

    #[test]
    fn pieces_are_those_of_the_disk() {
        let mut bytes = vec![0; 512 + ZERO_RUN_MIN];
        bytes[511] = 1;
        assert_eq!(runs(PAGE_BYTES as u64 - 512, &bytes), [(512, false), (ZERO_RUN_MIN, true)]);
    }

    proptest! {
        #[test]
        fn runs_cover_all_and_zero_means_zero(
            sectors in 1..300_usize, offset in 0..64_u64,
            odd in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let mut bytes = vec![0; sectors * 512];
            for at in odd {
                bytes[at.index(sectors * 512)] = 1;
            }
            let runs = runs(offset * 512, &bytes);
            prop_assert_eq!(runs.iter().map(|(length, _)| length).sum::<usize>(), bytes.len());
            let mut at = 0;
            for &(length, zero) in &runs {
                let run = &bytes[at..at + length];
                prop_assert!(!zero || is_zero(run));
                prop_assert!(!zero || length >= ZERO_RUN_MIN || runs.len() == 1);
                at += length;
            }
            prop_assert!(runs.windows(2).all(|two| two[0].1 != two[1].1));
        }
    }
}
