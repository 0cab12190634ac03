//! The tap's output of a carried migration.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;

use crossbeam_channel::Sender;
use data_threads::DataThreads;
use page::{Batch, Epoch};
use parking_lot::{Condvar, Mutex};
use policy::switchover::budget_bytes;
use tap::{Head, Output, Stopped, Unsplittable};
use transport::DEAD_AFTER;
use wire::ToDestination;

use super::notice::Notice;
use super::passes::Passes;
use super::way_back::WayBack;
use crate::error::LinkError;
use crate::link::Link;
use crate::source::pages::Pages;

/// The divisor of the data that fits the downtime goal: less than that after a sweep proves
/// that little is dirty.
const SURELY: u64 = 2;
/// Most bytes after RAM that are kept here during the audit.
const KEPT_BYTES_MAX: usize = 256 << 20;

pub(super) struct Collector {
    pub(super) pages: Pages,
    pub(super) notices: Sender<Notice>,
    pub(super) tail: Arc<Tail>,
    pub(super) passes: Arc<Passes>,
    pub(super) way_back: Arc<WayBack>,
    /// The part of the downtime that is needed without any pages.
    pub(super) fixed: Duration,
    /// The first sweep over RAM has ended.
    pub(super) first_swept: AtomicBool,
    /// What is no longer split turns to post-copy: its guest waits for each page that it requests,
    /// so it has no pace.
    pub(super) is_in_postcopy: AtomicBool,
    /// No page may arrive any more: the destination was told that all are placed.
    pub(super) ram_over: AtomicBool,
}

/// The stream after the pages that go on lanes. While the destination compares those, it is
/// sent nothing else.
#[derive(Default)]
pub(super) struct Tail {
    waits: Mutex<Waits>,
    changed: Condvar,
}

#[derive(Default)]
struct Waits {
    /// All pages are placed. Until then the destination keeps what arrives.
    placed: bool,
    /// Bytes kept here during the comparison.
    kept: Option<Vec<u8>>,
    /// The migration is over.
    ended: bool,
}

impl Tail {
    /// Reports that everything is placed. If there is an audit, later bytes are kept until
    /// [`Tail::go_on`].
    pub(super) fn placed(
        &self,
        link: &Link<ToDestination>,
        audit: Vec<u64>,
    ) -> Result<(), LinkError> {
        let mut waits = self.waits.lock();
        if !audit.is_empty() {
            waits.kept = Some(Vec::new());
        }
        waits.placed = true;
        self.changed.notify_all();
        link.say(&ToDestination::Placed { audit })
    }

    /// Continues after a successful audit.
    pub(super) fn go_on(&self, link: &Link<ToDestination>) -> Result<(), LinkError> {
        let mut waits = self.waits.lock();
        let bytes = waits.kept.take().unwrap_or_default();
        self.changed.notify_all();
        link.non_ram(false, &bytes)
    }

    /// Ends all waiting.
    pub(super) fn end(&self) {
        self.waits.lock().ended = true;
        self.changed.notify_all();
    }

    fn pass(&self, link: &Link<ToDestination>, bytes: &[u8]) -> Result<(), Stopped> {
        match &mut self.waits.lock().kept {
            Some(kept) if kept.len() + bytes.len() > KEPT_BYTES_MAX => Err(Stopped),
            Some(kept) => {
                kept.extend_from_slice(bytes);
                Ok(())
            }
            None => link.non_ram(false, bytes).map_err(|_| Stopped),
        }
    }

    /// The same for more bytes than can be kept: waits until they can go straight to QEMU.
    fn pass_on(&self, link: &Link<ToDestination>, bytes: &[u8]) -> Result<(), Stopped> {
        let mut waits = self.waits.lock();
        while !(waits.ended || waits.placed && waits.kept.is_none()) {
            self.changed.wait(&mut waits);
        }
        if waits.ended {
            return Err(Stopped);
        }
        drop(waits);
        link.non_ram(false, bytes).map_err(|_| Stopped)
    }
}

impl Collector {
    fn notice(&self, notice: Notice) {
        // The receiver is gone only once the migration has ended.
        let _ = self.notices.send(notice);
    }

    fn let_stop(&self) {
        if self.way_back.let_stop() {
            tracing::debug!("little is left: QEMU may stop the VM");
        }
    }

    fn count(&self, bytes: &[u8]) -> u64 {
        self.pages.state.residue_bytes.fetch_add(bytes.len() as u64, Relaxed)
    }
}

impl Output for Collector {
    fn head(&self, head: Head) -> Result<(), Stopped> {
        self.pages.announce(head)?;
        self.notice(Notice::FirstPassBegins);
        Ok(())
    }

    fn arrived(&self, batch: &Batch, first: usize) {
        self.pages.arrived(batch, first);
    }

    fn batch(&self, mut batch: Batch) -> Result<(), Stopped> {
        data_threads::point();
        if self.ram_over.load(SeqCst) {
            // The destination may have loaded the VM without this page.
            self.notice(Notice::PageAfterRam);
            return Err(Stopped);
        }
        self.pages.took(&mut batch);
        self.passes.took(&batch);
        self.pages.lanes.submit(batch).map_err(|_| Stopped)
    }

    fn idles(&self) {
        self.let_stop();
    }

    /// A waiting QEMU with little to send searches for more in each iteration, and its guest
    /// pays for each search, so it gets the permission at once.
    fn all_before(&self, _: Epoch) {
        let Some(swept_bytes) = self.passes.epoch_ended() else { return };
        let (bodies, fills) = self.pages.state.taken();
        let was_first =
            bodies + fills < self.pages.state.ram_bytes() || !self.first_swept.swap(true, Relaxed);
        if was_first || !self.way_back.is_kept() {
            return;
        }
        let left_bytes = self.pages.lanes.delivered().backlog_bytes + swept_bytes;
        let budget = |rate| budget_bytes(rate, self.pages.state.goal(), self.fixed);
        if self.pages.state.bodies_per_s().is_none_or(|rate| left_bytes <= budget(rate) / SURELY) {
            self.let_stop();
        }
    }

    fn last_section(&self) {
        self.passes.end();
        // The VM stands still, and goes on here if the destination is silent.
        let _ = self.pages.link.set_dead_after(DEAD_AFTER);
    }

    fn tail(&self, bytes: &[u8]) -> Result<(), Stopped> {
        self.passes.end();
        if self.count(bytes) == 0 {
            self.notice(Notice::TailBegins);
        }
        self.tail.pass(&self.pages.link, bytes)
    }

    /// Goes the same way as the tail. The first piece is short, and RAM is over only after
    /// it.
    fn rest(&self, bytes: &[u8], reason: Option<&Unsplittable>) -> Result<(), Stopped> {
        self.count(bytes);
        self.passes.end();
        let Some(reason) = reason else {
            let pass_on = |piece: &[u8]| self.tail.pass_on(&self.pages.link, piece);
            return if self.is_in_postcopy.load(Relaxed) {
                pass_on(bytes)
            } else {
                self.pages.state.whole.write(bytes, pass_on)
            };
        };
        let turns = matches!(reason, Unsplittable::Postcopy { .. });
        self.is_in_postcopy.store(turns, Relaxed);
        self.notice(Notice::SplitEnds(reason.to_string()));
        self.tail.pass(&self.pages.link, bytes)
    }

    fn whole(&self, bytes: &[u8], reason: Option<&str>) -> Result<(), Stopped> {
        if let Some(reason) = reason {
            self.notice(Notice::Unsplittable(reason.to_owned()));
        }
        self.count(bytes);
        self.passes.end();
        let pass_on = |piece: &[u8]| self.pages.link.non_ram(true, piece).map_err(|_| Stopped);
        self.pages.state.whole.write(bytes, pass_on)
    }

    fn ram_over(&self) {
        self.ram_over.store(true, SeqCst);
        self.notice(Notice::RamOver);
    }

    fn threads(&self) -> Option<Arc<DataThreads>> {
        Some(Arc::clone(&self.pages.threads))
    }
}
