//! Whether content is worth packing, where what came before it did not shrink.

/// Pages of a batch that are tried before all of it: to pack those takes a fortieth of
/// what a link of 10 Gbit/s takes for the batch.
pub(crate) const PROBES: usize = 4;
/// After so many batches that did not shrink the next ones are doubted: before, what
/// shrinks may lie between what doesn't, page by page, where four probes miss it. And
/// of so many that are doubted one is packed all the same: its pages may be like one
/// another.
const PATIENCE: u32 = 16;

/// What is known of the content of late.
#[derive(Debug, Default)]
pub(crate) struct Doubt {
    /// Batches since one shrank.
    in_vain: u32,
}

impl Doubt {
    /// Whether a batch of so many pages is to be probed first.
    pub(crate) fn probes(&self, pages: usize) -> bool {
        pages > PROBES && self.in_vain > PATIENCE && !self.in_vain.is_multiple_of(PATIENCE)
    }

    /// How a batch came out.
    pub(crate) fn learn(&mut self, shrank: bool) {
        self.in_vain = if shrank { 0 } else { self.in_vain.wrapping_add(1) };
    }
}

/// Which pages are probed of so many: strewn evenly, as content changes along a batch.
pub(crate) fn probed(pages: usize) -> impl Iterator<Item = usize> {
    let probes = PROBES.min(pages);
    (0..probes).map(move |nth| (2 * nth + 1) * pages / (2 * probes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_strewn_over_a_batch() {
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
    fn only_what_follows_many_failures_is_probed_and_not_always() {
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
