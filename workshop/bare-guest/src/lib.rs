//! A guest of the lab without an operating system. It boots in milliseconds and runs
//! where a hypervisor can't boot Linux.
//!
//! This library is the part that needs no hardware: it speaks `lab-guest`'s protocol, so the lab
//! notices no difference, and writes to its memory. `kernel/` is the part around it, for one CPU
//! that speaks and one that writes, which may be the same.
#![cfg_attr(not(test), no_std)]

mod lines;
pub mod lock;
mod outbox;
pub mod talk;
pub mod writing;

use core::sync::atomic::{AtomicBool, AtomicU64};
use core::time::Duration;

use guest_pages::orders::Orders;
use guest_pages::writer::Writer;

use lock::Lock;

/// State shared by the CPU that speaks and the CPU that writes.
pub struct Shared<'m> {
    /// Bytes rewritten per second.
    pub rate: AtomicU64,
    /// Whether the writer rests while memory is checked.
    pub rests: AtomicBool,
    /// The working set and its writer.
    pub writer: Lock<Writer<'m>>,
    /// Pages rewritten so far.
    pub written: AtomicU64,
}

impl<'m> Shared<'m> {
    /// The state before either begins.
    #[must_use]
    pub fn new(orders: &Orders, writer: Writer<'m>) -> Self {
        Self {
            rate: AtomicU64::new(orders.rate),
            rests: AtomicBool::new(false),
            writer: Lock::new(writer),
            written: AtomicU64::new(0),
        }
    }
}

/// What a CPU does after its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Takes its next turn at once.
    Again,
    /// Takes its next turn at that time.
    At(Duration),
}

impl Next {
    /// The earlier of both.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        match (self, other) {
            (Self::At(one), Self::At(other)) => Self::At(one.min(other)),
            _ => Self::Again,
        }
    }
}

/// Whether a guest without an operating system can follow these orders.
#[must_use]
pub fn is_possible(orders: &Orders) -> bool {
    let possible = Orders {
        seed: orders.seed,
        common_bytes: orders.common_bytes,
        common_text_bytes: orders.common_text_bytes,
        common_seed: orders.common_seed,
        random_bytes: orders.random_bytes,
        text_bytes: orders.text_bytes,
        zero_bytes: orders.zero_bytes,
        working_set_bytes: orders.working_set_bytes,
        rate: orders.rate,
        write_step_ms: orders.write_step_ms,
        write_max_bytes: orders.write_max_bytes,
        order: orders.order,
        burn: orders.burn,
        writer_cpu: orders.writer_cpu,
        repeated: orders.repeated,
        parts: orders.parts,
        tick_ms: orders.tick_ms,
        ..Orders::default()
    };
    *orders == possible && orders.writer_cpu <= 2
}

#[cfg(test)]
mod tests {
    use guest_pages::memory::{Area, Page};
    use guest_pages::plan::{Plan, Plans};

    use super::*;

    /// Fills memory as ordered.
    pub(crate) fn with_shared<R>(
        orders: &Orders,
        act: impl FnOnce([Area<'static>; 5], &Shared<'static>) -> R,
    ) -> R {
        let area = |plan: Plan, versions| {
            Area::fill(plan, vec![Page::ZERO; plan.pages].leak(), vec![0; versions].leak())
        };
        let Plans { fixed, working_set } = Plans::of(orders);
        let area_of_writer = area(working_set, working_set.pages);
        let writer = Writer::new(area_of_writer, orders.order, orders.seed);
        let fixed = fixed.map(|plan| area(plan, 0));
        act(fixed, &Shared::new(orders, writer))
    }

    #[test]
    fn what_needs_an_operating_system_is_not_possible() {
        let orders = Orders { rate: 5, parts: true, writer_cpu: 2, ..Orders::default() };
        assert!(is_possible(&orders));
        assert!(!is_possible(&Orders { disk_bytes: 1, ..orders.clone() }));
        assert!(!is_possible(&Orders { writer_cpu: 3, ..orders }));
    }

    #[test]
    fn what_comes_first_is_next() {
        let [one, other] = [1, 2].map(|s| Next::At(Duration::from_secs(s)));
        assert_eq!((one.min(other), other.min(one)), (one, one));
        assert_eq!((one.min(Next::Again), Next::Again.min(one)), (Next::Again, Next::Again));
    }
}
