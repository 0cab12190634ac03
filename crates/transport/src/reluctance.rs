//! When not to look, because the last looks were in vain.

/// Backs off from what is not found: after each look in vain, twice as many batches
/// are not looked at; the first find resets it.
#[derive(Debug)]
pub(crate) struct Reluctance {
    skip_max: u32,
    skip_next: u32,
    to_skip: u32,
}

impl Reluctance {
    /// Passes at most `skip_max` batches by between two looks.
    pub(crate) fn up_to(skip_max: u32) -> Self {
        Self { skip_max, skip_next: 0, to_skip: 0 }
    }

    /// Whether the next batch should be looked at.
    pub(crate) fn try_next(&mut self) -> bool {
        if self.to_skip == 0 {
            return true;
        }
        self.to_skip -= 1;
        false
    }

    /// How a look came out.
    pub(crate) fn tried(&mut self, found: bool) {
        self.skip_next = if found { 0 } else { (self.skip_next * 2).clamp(1, self.skip_max) };
        self.to_skip = self.skip_next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_found_is_looked_for_more_rarely() {
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
