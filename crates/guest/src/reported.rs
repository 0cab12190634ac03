//! The pages that were reported already, as a bitmap.

/// Pages that were reported.
#[derive(Debug)]
pub(crate) struct ReportedPages {
    words: Vec<u64>,
    words_max: usize,
}

impl ReportedPages {
    /// With at most this much memory; pages beyond it always count as new.
    pub(crate) fn new(bytes_max: u64) -> Self {
        let words_max = usize::try_from(bytes_max / 8).unwrap_or(usize::MAX);
        Self { words: Vec::new(), words_max }
    }

    /// Notes a page; returns whether it is new.
    pub(crate) fn insert(&mut self, page: u64) -> bool {
        let Ok(place) = usize::try_from(page / 64) else { return true };
        if place >= self.words_max {
            return true;
        }
        if place >= self.words.len() {
            self.words.resize(place + 1, 0);
        }
        let Some(word) = self.words.get_mut(place) else { return true };
        let bit = 1 << (page % 64);
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_new_once() {
        let mut reported = ReportedPages::new(16);
        for page in [0, 63, 64, 127] {
            assert!(reported.insert(page) && !reported.insert(page), "{page}");
        }
        assert!(reported.insert(128) && reported.insert(128) && reported.insert(u64::MAX));
    }
}
