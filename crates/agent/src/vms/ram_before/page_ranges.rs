//! Pages of RAM blocks in words: consecutive ones are a range.

use std::fmt;

/// How many ranges are named.
const NAMED_MAX: usize = 12;

/// Pages that differ from what was kept, added in order.
#[derive(Default)]
pub(super) struct PageRanges {
    pages: usize,
    /// A block, and its first and last page.
    ranges: Vec<(String, usize, usize)>,
}

impl PageRanges {
    pub(super) fn add(&mut self, block: &str, page: usize) {
        self.pages += 1;
        match self.ranges.last_mut() {
            Some((its, _, last)) if its == block && *last + 1 == page => *last = page,
            _ => self.ranges.push((block.to_owned(), page, page)),
        }
    }
}

impl fmt::Display for PageRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.pages == 0 {
            return f.write_str("is as it was");
        }
        write!(f, "differs in {} pages: ", self.pages)?;
        for (nth, (block, first, last)) in self.ranges.iter().take(NAMED_MAX).enumerate() {
            let so_far = if nth > 0 { ", " } else { "" };
            write!(f, "{so_far}{block} {first}")?;
            if first != last {
                write!(f, " to {last}")?;
            }
        }
        match self.ranges.len().saturating_sub(NAMED_MAX) {
            0 => Ok(()),
            more => write!(f, ", and {more} more ranges"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_pages_of_a_block_are_a_range() {
        let mut ranges = PageRanges::default();
        assert_eq!(ranges.to_string(), "is as it was");
        for (block, page) in [("r", 0), ("r", 2), ("r", 3), ("r", 4), ("s", 5), ("s", 7)] {
            ranges.add(block, page);
        }
        assert_eq!(ranges.to_string(), "differs in 6 pages: r 0, r 2 to 4, s 5, s 7");
        (0..NAMED_MAX).for_each(|nth| ranges.add("t", 2 * nth));
        assert!(ranges.to_string().ends_with(", t 14, and 4 more ranges"), "{ranges}");
    }
}
