//! When not to try compressing, because the last tries were in vain.

/// Most batches passed by between two tries. A try in vain costs a hundredth of
/// a batch's time on a fast link, and content that shrinks comes in stretches of
/// some MiB: with 64 most of them had passed before they were seen.
const SKIP_MAX: u32 = 4;

/// Backs off from content that doesn't shrink: after each batch that came out
/// raw, twice as many are not tried; the first that shrinks resets it.
#[derive(Debug)]
pub(crate) struct Reluctance {
    skip_max: u32,
    skip_next: u32,
    to_skip: u32,
}

impl Default for Reluctance {
    fn default() -> Self {
        Self::up_to(SKIP_MAX)
    }
}

impl Reluctance {
    /// Passes at most `skip_max` batches by between two tries.
    pub(crate) fn up_to(skip_max: u32) -> Self {
        Self { skip_max, skip_next: 0, to_skip: 0 }
    }

    /// Whether the next batch should be tried.
    pub(crate) fn try_next(&mut self) -> bool {
        if self.to_skip == 0 {
            return true;
        }
        self.to_skip -= 1;
        false
    }

    /// How a try came out.
    pub(crate) fn tried(&mut self, shrank: bool) {
        self.skip_next = if shrank { 0 } else { (self.skip_next * 2).clamp(1, self.skip_max) };
        self.to_skip = self.skip_next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_that_does_not_shrink_is_tried_more_rarely() {
        let mut reluctance = Reluctance::default();
        let tries = (0..1000).filter(|_| {
            let tried = reluctance.try_next();
            if tried {
                reluctance.tried(false);
            }
            tried
        });
        assert!(tries.count() < 210);
        while !reluctance.try_next() {}
        reluctance.tried(true);
        assert!(reluctance.try_next());
    }
}
