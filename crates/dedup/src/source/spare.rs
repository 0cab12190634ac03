//! How much lanes could send of what the destination gets in other ways.

/// Pages that lanes could send, and that the destination has not requested yet.
#[derive(Debug, Default)]
pub(super) struct Spare {
    /// All that were ever offered.
    said: u64,
    open: u64,
}

impl Spare {
    /// Lanes have so many pages queued, and should have `aim`. Returns the new total that they
    /// could send, if it is worth a message.
    pub(super) fn more(&mut self, queued: u64, aim: u64) -> Option<u64> {
        let missing = aim.saturating_sub(queued + self.open);
        // Not a message for each batch.
        if missing == 0 || missing < aim / 4 {
            return None;
        }
        self.open += missing;
        self.said += missing;
        Some(self.said)
    }

    /// The destination has requested so many.
    pub(super) fn came(&mut self, pages: u64) {
        self.open = self.open.saturating_sub(pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_kept_filled_with_few_messages() {
        let mut spare = Spare::default();
        assert_eq!(spare.more(0, 0), None, "none is to be sent");
        assert_eq!(spare.more(900, 1000), None, "nearly enough");
        assert_eq!(spare.more(400, 1000), Some(600));
        assert_eq!(spare.more(0, 1000), Some(1000), "600 are asked for already");
        assert_eq!(spare.more(0, 1000), None);
        spare.came(300);
        assert_eq!(spare.more(300, 1000), None);
        assert_eq!(spare.more(0, 1000), Some(1300));
        // Pages requested for other reasons count as well.
        spare.came(5000);
        assert_eq!(spare.more(0, 1000), Some(2300));
    }
}
