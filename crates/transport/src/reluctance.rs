//! Exponential backoff for searches that find nothing.

/// Backs off after each failed search: twice as many batches are skipped before the
/// next; a find resets it.
#[derive(Debug)]
pub(crate) struct Reluctance {
    skip_max: u32,
    skip_next: u32,
    to_skip: u32,
}

impl Reluctance {
    /// Skips at most `skip_max` batches between two searches.
    pub(crate) fn up_to(skip_max: u32) -> Self {
        Self { skip_max, skip_next: 0, to_skip: 0 }
    }

    /// Whether to search the next batch.
    pub(crate) fn try_next(&mut self) -> bool {
        if self.to_skip == 0 {
            return true;
        }
        self.to_skip -= 1;
        false
    }

    /// Records the result of a search.
    pub(crate) fn tried(&mut self, found: bool) {
        self.skip_next = if found { 0 } else { (self.skip_next * 2).clamp(1, self.skip_max) };
        self.to_skip = self.skip_next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_searches_are_repeated_more_rarely() {
        let mut reluctance = Reluctance::up_to(4);
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
