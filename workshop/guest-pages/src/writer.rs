//! The writer: rewrites pages of the working set, and counts what it did.

use crate::memory::{Area, Checked, Wrong};
use crate::orders::Order;
use crate::random::Random;

/// Rewrites pages of an area.
pub struct Writer<'m> {
    area: Area<'m>,
    order: Order,
    random: Random,
    next: usize,
    written: u64,
    wrong: u64,
    first_wrong: Option<Wrong>,
}

impl<'m> Writer<'m> {
    /// A writer for `area`.
    #[must_use]
    pub fn new(area: Area<'m>, order: Order, seed: u64) -> Self {
        let random = Random::new(seed, u64::MAX);
        Self { area, order, random, next: 0, written: 0, wrong: 0, first_wrong: None }
    }

    /// Rewrites `count` pages.
    pub fn write(&mut self, count: usize) {
        let pages = self.area.count();
        if pages == 0 {
            return;
        }
        for _ in 0..count {
            let index = match self.order {
                Order::Random => self.random.below(pages),
                Order::Sequential => self.next,
            };
            self.next = (index + 1) % pages;
            if let Some(wrong) = self.area.rewrite(index) {
                self.wrong += 1;
                self.first_wrong.get_or_insert(wrong);
            }
        }
        self.written += count as u64;
    }

    /// Pages written so far.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// The area.
    #[must_use]
    pub fn area(&self) -> &Area<'m> {
        &self.area
    }

    /// Like [`Area::spoil`], if the page exists.
    pub fn spoil(&mut self, index: usize) {
        if index < self.area.count() {
            self.area.spoil(index);
        }
    }

    /// Pages that were wrong when they were rewritten, and the first of them. It counts no pages,
    /// so that it can be added to a check.
    #[must_use]
    pub fn wrong(&self) -> Checked {
        Checked { pages: 0, wrong: self.wrong, first_wrong: self.first_wrong }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Page;
    use crate::orders::Orders;
    use crate::plan::Plans;

    #[test]
    fn both_orders_stay_inside_and_right() {
        for order in [Order::Random, Order::Sequential] {
            let (mut pages, mut versions) = (vec![Page::ZERO; 5], [0; 5]);
            let plan = Plans::of(&Orders::default()).working_set;
            let area = Area::fill(plan, &mut pages, &mut versions);
            let mut writer = Writer::new(area, order, 9);
            writer.write(23);
            assert_eq!(writer.written(), 23);
            assert_eq!(writer.wrong(), Checked::default());
            assert_eq!(writer.area().check().wrong, 0);
        }
    }

    #[test]
    fn nothing_to_write_is_fine() {
        let area = Area::fill(Plans::of(&Orders::default()).working_set, &mut [], &mut []);
        let mut writer = Writer::new(area, Order::Random, 9);
        writer.write(10);
        assert_eq!(writer.written(), 0);
    }
}
