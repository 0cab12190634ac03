//! QEMU's passes, as its pages reveal them.
//!
//! QEMU scans RAM in the order of its blocks and their pages, and starts again at its end.
//! So a page that is not beyond the previous ones begins a pass. Multifd channels deliver
//! pages in no order, but epochs are in order: each is a pass of its own or, with machine
//! types up to 8.0, a RAM section, of which a pass has many.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use page::{Batch, BlockId, PAGE_BYTES, PageIndex};
use parking_lot::Mutex;

/// QEMU checks the clock after this many pages: a RAM section with fewer ended because
/// nothing was dirty any more.
const SECTION_PAGES: u64 = 64;

/// The indication that a pass has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Pages arrive in order.
    Pages,
    /// An epoch is a pass.
    Epochs,
    /// An epoch is a RAM section, whose pages follow those of the one before it. A pass whose first
    /// section has no earlier page counts as a part of the one before: its figures are wrong once,
    /// by a factor of two at most.
    Sections,
}

/// What was seen so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// Passes that have started; the first is 1.
    pub(super) pass: u32,
    /// When the last of them began.
    pub(super) began: Instant,
    /// Bytes of bodies that had arrived by then. Fill pages are not counted: sending them
    /// takes next to nothing.
    pub(super) bytes_then: u64,
    /// Bytes of bodies that have arrived.
    pub(super) bytes: u64,
}

/// QEMU's sweeps: what it sends between two moments at which it knows of nothing dirty.
/// While it waits for permission to stop the VM, sweeps are as short as the pool allows.
///
/// QEMU searches on from the page that it found last, past the end of RAM to that page again.
/// Where an epoch ends with RAM, a sweep's pages come in two: the last two count as the last sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sweeps {
    /// Completed sweeps.
    pub(super) over: u64,
    /// Bytes of bodies in the last of them.
    pub(super) last_bytes: u64,
    /// Bytes of bodies in the current one.
    pub(super) running_bytes: u64,
}

/// Counts passes; called by the tap's threads.
pub(super) struct Passes {
    order: Order,
    state: Mutex<State>,
    ended: AtomicBool,
}

/// A page's place in RAM.
type RamPosition = (BlockId, PageIndex);

struct State {
    seen: Seen,
    sweeps: Sweeps,
    /// Bytes of bodies since the last epoch ended, and in that epoch.
    epoch_bytes: u64,
    last_epoch_bytes: u64,
    epoch: u32,
    /// The furthest page of the pass until now, or until this epoch.
    last: Option<RamPosition>,
    /// The furthest page of this epoch beyond `last`, and the furthest of those not beyond
    /// it, which show that a pass has started.
    ahead: Option<RamPosition>,
    again: Option<RamPosition>,
}

impl Passes {
    pub(super) fn new(order: Order) -> Self {
        let seen = Seen { pass: 1, began: Instant::now(), bytes_then: 0, bytes: 0 };
        let sweeps = Sweeps::default();
        let state = State {
            seen,
            sweeps,
            epoch_bytes: 0,
            last_epoch_bytes: 0,
            epoch: 0,
            last: None,
            ahead: None,
            again: None,
        };
        Self { order, state: Mutex::new(state), ended: AtomicBool::new(false) }
    }

    /// QEMU has stopped the VM, or pages are no longer visible.
    pub(super) fn end(&self) {
        self.ended.store(true, Relaxed);
    }

    pub(super) fn is_over(&self) -> bool {
        self.ended.load(Relaxed)
    }

    pub(super) fn seen(&self) -> Seen {
        self.state.lock().seen
    }

    pub(super) fn took(&self, batch: &Batch) {
        let bytes = (batch.bodies().len() * PAGE_BYTES) as u64;
        let mut state = self.state.lock();
        let places = batch.bodies().iter().map(|body| (batch.block, body.page));
        match self.order {
            Order::Pages => state.in_order(places),
            Order::Epochs => state.epoch(batch.epoch.0),
            Order::Sections => state.section(batch.epoch.0, places),
        }
        state.seen.bytes += bytes;
        state.sweeps.running_bytes += bytes;
        state.epoch_bytes += bytes;
    }

    /// Notes that an epoch has ended on all channels. Returns the bytes of a sweep that
    /// ended with it.
    pub(super) fn epoch_ended(&self) -> Option<u64> {
        let mut state = self.state.lock();
        let epoch_bytes = std::mem::take(&mut state.epoch_bytes);
        let last_epoch_bytes = std::mem::replace(&mut state.last_epoch_bytes, epoch_bytes);
        let (is_over, before_bytes) = match self.order {
            Order::Epochs => (true, last_epoch_bytes),
            Order::Pages | Order::Sections => (epoch_bytes < SECTION_PAGES * PAGE_BYTES as u64, 0),
        };
        if is_over {
            let Sweeps { over, running_bytes, .. } = state.sweeps;
            let last_bytes = before_bytes + running_bytes;
            state.sweeps = Sweeps { over: over + 1, last_bytes, running_bytes: 0 };
        }
        is_over.then_some(state.sweeps.last_bytes)
    }

    pub(super) fn sweeps(&self) -> Sweeps {
        self.state.lock().sweeps
    }
}

impl State {
    fn begin(&mut self) {
        let Seen { pass, began, bytes_then, bytes } = &mut self.seen;
        *pass = pass.saturating_add(1);
        (*began, *bytes_then) = (Instant::now(), *bytes);
    }

    fn in_order(&mut self, places: impl Iterator<Item = RamPosition>) {
        for place in places {
            if Some(place) <= self.last {
                self.begin();
            }
            self.last = Some(place);
        }
    }

    fn epoch(&mut self, epoch: u32) {
        if epoch > self.epoch {
            self.epoch = epoch;
            // QEMU also ends an epoch before its first page.
            if self.seen.bytes > self.seen.bytes_then {
                self.begin();
            }
        }
    }

    /// A section that arrives late, on another channel, shows nothing new.
    fn section(&mut self, epoch: u32, places: impl Iterator<Item = RamPosition>) {
        if epoch < self.epoch {
            return;
        }
        if epoch > self.epoch {
            self.epoch = epoch;
            self.last = self.again.take().or(self.ahead).or(self.last);
            self.ahead = None;
        }
        for place in places {
            if Some(place) > self.last {
                self.ahead = self.ahead.max(Some(place));
            } else {
                if self.again.is_none() {
                    self.begin();
                }
                self.again = self.again.max(Some(place));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use page::{Epoch, Pool};

    use super::*;

    /// The pass after each batch, given by epoch, block, and pages.
    fn passes(order: Order, batches: &[(u32, u16, &[u32])]) -> Vec<u32> {
        let (passes, pool) = (Passes::new(order), Pool::new(1 << 20));
        let of = |(epoch, block, pages): &(u32, u16, &[u32])| {
            let mut batch = pool.take().unwrap();
            (batch.epoch, batch.block) = (Epoch(*epoch), BlockId(*block));
            for (nth, page) in pages.iter().enumerate() {
                batch.push_body(PageIndex(*page), nth * PAGE_BYTES);
            }
            passes.took(&batch);
            passes.seen().pass
        };
        batches.iter().map(of).collect()
    }

    #[test]
    fn a_page_that_is_not_beyond_the_last_begins_a_pass() {
        // A section, and so an epoch, ends at an arbitrary page.
        let batches: [(u32, u16, &[u32]); 8] = [
            (0, 0, &[0, 1, 2]),
            (1, 0, &[3, 9]),
            // Beyond them, in another block.
            (1, 1, &[0, 1]),
            (2, 0, &[3, 9]),
            (2, 0, &[10, 11]),
            // In the middle of a batch.
            (3, 0, &[12, 13, 2, 3]),
            // The same page again, and again.
            (4, 0, &[3]),
            (5, 0, &[3]),
        ];
        assert_eq!(passes(Order::Pages, &batches), [1, 1, 1, 2, 2, 3, 4, 5]);
    }

    #[test]
    fn an_epoch_with_pages_is_a_pass() {
        let batches: [(u32, u16, &[u32]); 6] = [
            // The stream begins with an empty epoch.
            (1, 0, &[5, 6]),
            (1, 0, &[3]),
            (2, 0, &[3]),
            // Late, on another channel.
            (1, 0, &[9]),
            // Two epochs without pages between them.
            (5, 0, &[3]),
            (5, 0, &[1]),
        ];
        assert_eq!(passes(Order::Epochs, &batches), [1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn a_section_with_a_page_not_beyond_the_last_section_begins_a_pass() {
        let batches: [(u32, u16, &[u32]); 11] = [
            // Within a section channels deliver pages in any order.
            (0, 0, &[4, 5]),
            (0, 0, &[0, 1]),
            (1, 0, &[8, 9]),
            (1, 0, &[6, 7]),
            // To the end of RAM and on from its start, which counts once.
            (2, 1, &[0, 1]),
            (2, 0, &[2, 3]),
            (2, 0, &[0, 1]),
            // It continues from there.
            (3, 0, &[4, 9]),
            // Late.
            (2, 0, &[1]),
            (4, 1, &[0]),
            (5, 0, &[1]),
        ];
        assert_eq!(passes(Order::Sections, &batches), [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]);
    }

    #[test]
    fn a_sweep_ends_when_nothing_is_dirty() {
        let pool = Pool::new(1 << 20);
        let of = |order, epochs: &[u32]| {
            let passes = Passes::new(order);
            let mut page = 0;
            for count in epochs {
                let mut batch = pool.take().unwrap();
                for nth in 0..*count {
                    batch.push_body(PageIndex(page), nth as usize * PAGE_BYTES);
                    page += 1;
                }
                passes.took(&batch);
                passes.epoch_ended();
            }
            let Sweeps { over, last_bytes, running_bytes } = passes.sweeps();
            (over, last_bytes / PAGE_BYTES as u64, running_bytes / PAGE_BYTES as u64)
        };
        assert_eq!(of(Order::Epochs, &[100, 70, 0, 5]), (4, 5, 0));
        assert_eq!(of(Order::Epochs, &[100, 0]), (2, 100, 0), "the end of RAM alone says nothing");
        assert_eq!(of(Order::Pages, &[100, 70]), (0, 0, 170));
        assert_eq!(of(Order::Pages, &[100, 70, 0, 5]), (2, 5, 0));
        assert_eq!(of(Order::Sections, &[100, 70, 63, 64]), (1, 233, 64));
    }

    #[test]
    fn bodies_are_counted_and_what_came_before_a_pass() {
        let (passes, pool) = (Passes::new(Order::Pages), Pool::new(1 << 20));
        let took = |pages: &[u32], fills: u32| {
            let mut batch = pool.take().unwrap();
            for (nth, page) in pages.iter().enumerate() {
                batch.push_body(PageIndex(*page), nth * PAGE_BYTES);
            }
            (0..fills).for_each(|page| batch.push_fill(PageIndex(page), 0));
            passes.took(&batch);
            let seen = passes.seen();
            (seen.pass, seen.bytes_then / PAGE_BYTES as u64, seen.bytes / PAGE_BYTES as u64)
        };
        assert_eq!(took(&[1, 2, 3], 2), (1, 0, 3));
        assert_eq!(took(&[], 9), (1, 0, 3));
        assert_eq!(took(&[1], 0), (2, 3, 4));
        assert_eq!(took(&[7, 8], 0), (2, 3, 6));
    }
}
