//! The tap's output for a QEMU that another program commands: its passes are followed, and its tail
//! waits for the audit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;

use data_threads::DataThreads;
use page::{Batch, Epoch};
use policy::switchover::budget_bytes;
use tap::{Head, Output, Stopped, Unsplittable};
use transport::DEAD_AFTER;

use super::passes::Passes;
use super::tail::Tail;
use super::way_back::WayBack;
use crate::source::collector::Collector;
use crate::source::notice::Notice;

/// The divisor of the data that fits the downtime goal: less than that after a sweep proves
/// that little is dirty.
const SURELY: u64 = 2;

pub(super) struct Observed {
    pub(super) collector: Collector,
    pub(super) tail: Arc<Tail>,
    pub(super) passes: Arc<Passes>,
    pub(super) way_back: Arc<WayBack>,
    /// The part of the downtime that is needed without any pages.
    pub(super) fixed: Duration,
    /// The first sweep over RAM has ended.
    pub(super) first_swept: AtomicBool,
    /// No page may arrive any more: the destination was notified that all are placed.
    pub(super) ram_over: AtomicBool,
}

impl Observed {
    fn let_stop(&self) {
        if self.way_back.let_stop() {
            tracing::debug!("little is left: QEMU may stop the VM");
        }
    }
}

impl Output for Observed {
    fn head(&self, head: Head) -> Result<(), Stopped> {
        self.collector.head(head)
    }

    fn arrived(&self, batch: &Batch, first: usize) {
        self.collector.arrived(batch, first);
    }

    fn batch(&self, mut batch: Batch) -> Result<(), Stopped> {
        data_threads::point();
        if self.ram_over.load(SeqCst) {
            // The destination may have loaded the VM without this page.
            self.collector.notice(Notice::PageAfterRam);
            return Err(Stopped);
        }
        self.collector.took(&mut batch);
        self.passes.took(&batch);
        self.collector.submit(batch)
    }

    fn idles(&self) {
        self.let_stop();
    }

    /// A waiting QEMU with little to send searches for more in each iteration, and its guest
    /// pays for each search, so it gets the permission at once.
    fn all_before(&self, _: Epoch) {
        let Some(swept_bytes) = self.passes.epoch_ended() else { return };
        let Collector { state, lanes, .. } = &self.collector;
        let (bodies, fills) = state.taken();
        let was_first = bodies + fills < state.ram_bytes() || !self.first_swept.swap(true, Relaxed);
        if was_first || !self.way_back.is_kept() {
            return;
        }
        let left_bytes = lanes.delivered().backlog_bytes + swept_bytes;
        let budget = |rate| budget_bytes(rate, state.goal(), self.fixed);
        if state.bodies_per_s().is_none_or(|rate| left_bytes <= budget(rate) / SURELY) {
            self.let_stop();
        }
    }

    fn last_section(&self) {
        self.passes.end();
        // The VM stands still, and continues here if the destination is silent.
        let _ = self.collector.link.set_dead_after(DEAD_AFTER);
    }

    fn tail(&self, bytes: &[u8]) -> Result<(), Stopped> {
        self.passes.end();
        self.collector.took_tail(bytes);
        self.tail.pass(&self.collector.link, bytes)
    }

    /// Goes the same way as the tail. The first piece is short, and RAM has ended only after
    /// it.
    fn rest(&self, bytes: &[u8], reason: Option<&Unsplittable>) -> Result<(), Stopped> {
        self.collector.count(bytes);
        self.passes.end();
        let Some(reason) = reason else {
            let pass_on = |piece: &[u8]| self.tail.pass_on(&self.collector.link, piece);
            return self.collector.state.whole.write(bytes, pass_on);
        };
        self.collector.notice(Notice::SplitEnds(reason.to_string()));
        self.tail.pass(&self.collector.link, bytes)
    }

    fn whole(&self, bytes: &[u8], reason: Option<&str>) -> Result<(), Stopped> {
        self.passes.end();
        self.collector.whole(bytes, reason)
    }

    fn ram_over(&self) {
        self.ram_over.store(true, SeqCst);
        self.collector.notice(Notice::RamOver);
    }

    fn threads(&self) -> Option<Arc<DataThreads>> {
        Some(Arc::clone(&self.collector.threads))
    }
}
