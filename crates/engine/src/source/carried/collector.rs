//! The tap's output of a carried migration.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;

use crossbeam_channel::Sender;
use data_threads::DataThreads;
use page::{Batch, Epoch, Reserve};
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
use crate::tail;

/// The divisor of the data that fits the downtime goal: less than that after a sweep proves
/// that little is dirty.
const SURELY: u64 = 2;

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
pub(super) struct Tail {
    memory: Arc<Reserve>,
    waits: Mutex<Waits>,
    changed: Condvar,
}

#[derive(Default)]
struct Waits {
    /// All pages are placed. Until then the destination keeps what arrives.
    placed: bool,
    /// What is kept here during the comparison.
    kept: Option<tail::Tail>,
    /// The migration is over.
    ended: bool,
}

impl Tail {
    pub(super) fn new(memory: &Arc<Reserve>) -> Self {
        Self { memory: Arc::clone(memory), waits: Mutex::default(), changed: Condvar::new() }
    }

    /// Reports that everything is placed. If there is an audit, later bytes are kept until
    /// [`Tail::go_on`].
    pub(super) fn placed(
        &self,
        link: &Link<ToDestination>,
        audit: Vec<u64>,
    ) -> Result<(), LinkError> {
        let mut waits = self.waits.lock();
        if !audit.is_empty() {
            waits.kept = Some(tail::Tail::new(&self.memory));
        }
        waits.placed = true;
        self.changed.notify_all();
        link.say(&ToDestination::Placed { audit })
    }

    /// Continues after a successful audit.
    pub(super) fn go_on(&self, link: &Link<ToDestination>) -> Result<(), LinkError> {
        let mut waits = self.waits.lock();
        let kept = waits.kept.take();
        self.changed.notify_all();
        link.non_ram(false, kept.as_ref().map_or(&[], tail::Tail::bytes))
    }

    /// Ends all waiting.
    pub(super) fn end(&self) {
        self.waits.lock().ended = true;
        self.changed.notify_all();
    }

    fn pass(&self, link: &Link<ToDestination>, bytes: &[u8]) -> Result<(), Stopped> {
        let mut waits = self.waits.lock();
        let Some(kept) = &mut waits.kept else {
            return link.non_ram(false, bytes).map_err(|_| Stopped);
        };
        if kept.push(bytes).is_ok() {
            return Ok(());
        }
        // There is no room for it, or no memory.
        drop(waits);
        self.pass_on(link, bytes)
    }

    /// The same for what is not kept: waits until it can go straight to QEMU.
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

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use identity::Connection;
    use wire::{Frame, ToSource, read_frame};

    use super::*;

    static PIECE: [u8; 1 << 20] = [7; 1 << 20];

    /// A link to a destination, and the connection's other end.
    fn link() -> (Link<ToDestination>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (there, _) = listener.accept().unwrap();
        let (link, _) = Link::start::<ToSource>(Connection::plain(here), "peer").unwrap();
        (link, there)
    }

    /// How many bytes of a tail come before the connection ends.
    fn tail_bytes(mut there: &TcpStream) -> usize {
        let mut count = 0;
        while let Ok(Some(frame)) = read_frame(&mut there) {
            if let Frame::Tail(bytes) = frame {
                count += bytes.len();
            }
        }
        count
    }

    #[test]
    fn all_that_is_kept_during_audits_has_a_limit_and_the_rest_waits() {
        const EACH: usize = 24;
        let max_bytes = 16 << 20;
        let reserve = Reserve::new(max_bytes);
        let tails: Vec<Tail> = (0..3).map(|_| Tail::new(&reserve)).collect();
        let (links, theirs): (Vec<_>, Vec<_>) = tails.iter().map(|_| link()).unzip();
        for (tail, link) in tails.iter().zip(&links) {
            tail.placed(link, vec![1]).unwrap();
        }
        let kept_bytes = || {
            let kept = |tail: &Tail| tail.waits.lock().kept.as_ref().map(|it| it.bytes().len());
            tails.iter().filter_map(kept).sum::<usize>()
        };
        thread::scope(|scope| {
            let read: Vec<_> =
                theirs.iter().map(|there| scope.spawn(move || tail_bytes(there))).collect();
            let passing: Vec<_> = tails
                .iter()
                .zip(&links)
                .map(|(tail, link)| {
                    scope.spawn(move || (0..EACH).try_for_each(|_| tail.pass(link, &PIECE)))
                })
                .collect();
            // Each has its own part, and one of them all that is shared.
            let most = max_bytes + tails.len() * (2 << 20);
            while kept_bytes() < most {
                thread::yield_now();
            }
            assert_eq!((kept_bytes(), reserve.borrowed_bytes()), (most, max_bytes));
            assert!(passing.iter().all(|passing| !passing.is_finished()));
            // The last audit does not end well.
            for (tail, link) in tails.iter().zip(&links).take(2) {
                tail.go_on(link).unwrap();
            }
            tails[2].end();
            let ends: Vec<_> = passing.into_iter().map(|one| one.join().unwrap()).collect();
            assert_eq!(ends, [Ok(()), Ok(()), Err(Stopped)]);
            links.iter().for_each(Link::close);
            let read: Vec<_> = read.into_iter().map(|read| read.join().unwrap()).collect();
            assert_eq!(read, [EACH << 20, EACH << 20, 0]);
        });
        drop(tails);
        assert_eq!(reserve.borrowed_bytes(), 0);
    }
}
