//! What lanes could carry of that for which the destination has another way.

/// Pages that lanes could send, and the destination has not asked for yet.
#[derive(Debug, Default)]
pub(super) struct Spare {
    /// All that they ever could.
    said: u64,
    open: u64,
}

impl Spare {
    /// Lanes have so many pages to send, and should have `aim`. Says how many they
    /// could in all, if that is worth to be said.
    pub(super) fn more(&mut self, queued: u64, aim: u64) -> Option<u64> {
        let missing = aim.saturating_sub(queued + self.open);
        // Not a word for each batch.
        if missing == 0 || missing < aim / 4 {
            return None;
        }
        self.open += missing;
        self.said += missing;
        Some(self.said)
    }

    /// The destination has asked for so many.
    pub(super) fn came(&mut self, pages: u64) {
        self.open = self.open.saturating_sub(pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_have_what_they_should_have_and_little_is_said() {
        let mut spare = Spare::default();
        assert_eq!(spare.more(0, 0), None, "none is to be sent");
        assert_eq!(spare.more(900, 1000), None, "nearly enough");
        assert_eq!(spare.more(400, 1000), Some(600));
        assert_eq!(spare.more(0, 1000), Some(1000), "600 are asked for already");
        assert_eq!(spare.more(0, 1000), None);
        spare.came(300);
        assert_eq!(spare.more(300, 1000), None);
        assert_eq!(spare.more(0, 1000), Some(1300));
        // What comes for other reasons is as welcome.
        spare.came(5000);
        assert_eq!(spare.more(0, 1000), Some(2300));
    }
}
