//! Decides whether to compress a batch in full when the batches before it did not
//! shrink.

/// Pages of a batch that are compressed as a probe. Compressing them takes a fortieth
/// of the time that a 10 Gbit/s link takes for the batch.
pub(crate) const PROBES: usize = 4;
/// Batches are probed after more than this many in a row did not shrink. Earlier it
/// would be premature: compressible pages may alternate with incompressible ones,
/// where four probes miss them. One in this many doubted batches is compressed without
/// a probe, because its pages may resemble one another.
const PATIENCE: u32 = 16;

/// How recent batches compressed.
#[derive(Debug, Default)]
pub(crate) struct Doubt {
    /// Batches since the last one that shrank.
    in_vain: u32,
}

impl Doubt {
    /// Whether to probe a batch of `pages` pages first.
    pub(crate) fn probes(&self, pages: usize) -> bool {
        pages > PROBES && self.in_vain > PATIENCE && !self.in_vain.is_multiple_of(PATIENCE)
    }

    /// Records whether a batch shrank.
    pub(crate) fn learn(&mut self, shrank: bool) {
        self.in_vain = if shrank { 0 } else { self.in_vain.wrapping_add(1) };
    }
}

/// The pages to probe out of `pages`, spread evenly because content changes along a
/// batch.
pub(crate) fn probed(pages: usize) -> impl Iterator<Item = usize> {
    let probes = PROBES.min(pages);
    (0..probes).map(move |nth| (2 * nth + 1) * pages / (2 * probes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_spread_over_a_batch() {
        for (pages, expected) in [
            (0, vec![]),
            (1, vec![0]),
            (2, vec![0, 1]),
            (5, vec![0, 1, 3, 4]),
            (128, vec![16, 48, 80, 112]),
        ] {
            assert_eq!(probed(pages).collect::<Vec<_>>(), expected, "{pages}");
        }
    }

    #[test]
    fn only_batches_after_many_failures_are_probed_and_not_all_of_them() {
        let mut doubt = Doubt::default();
        let mut packed = Vec::new();
        for nth in 0..50 {
            if !doubt.probes(128) {
                packed.push(nth);
            }
            assert!(!doubt.probes(PROBES));
            doubt.learn(false);
        }
        let at_first: Vec<u32> = (0..=PATIENCE).collect();
        assert_eq!(packed, [&at_first[..], &[32, 48]].concat());
        doubt.learn(true);
        assert!(!doubt.probes(128));
    }
}
