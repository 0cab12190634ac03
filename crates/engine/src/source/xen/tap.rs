//! Reads xl's pipe: pages become batches, parsed in the pool's buffers into which they were read,
//! and the non-RAM stream goes on once the pages before it are placed.

use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::Duration;

use page::{Batch, BlockId, Epoch, PAGE_BYTES, PageIndex, Pool};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use transport::thread_cpu;
use wire::ToDestination;
use xen::{Configuration, Progress, Splitter, Step, fill_batch};

use super::passes::XlPasses;
use crate::error::{LinkError, MigrationError};
use crate::source::collector::Collector;
use crate::source::context::{local, no_thread};
use crate::source::flow::{Stopping, Tapping};
use crate::source::notice::Notice;
use crate::xen::{FromXl, XlPipes};

/// While xl sends nothing for this long, a batch waits no longer for more pages.
const IDLE: Duration = Duration::from_millis(10);
/// Without pages that wait.
const SILENT: Duration = Duration::from_secs(1);
/// The only block of the audit: a page counts with its last content, whatever its type is.
const BLOCK: BlockId = BlockId(0);
/// The last part of memory in xl's first pass, in which the CPU floor ends, and others' content is
/// no longer awaited. The thread that reads may wait for an idle CPU, or for buffers that awaited
/// pages hold, and would learn too late that xl has suspended the domain.
const LAST_PART: u64 = 8;

/// The thread that reads.
pub(super) struct XlTap(XlStopper);

/// Ends it.
#[derive(Clone)]
pub(super) struct XlStopper(Arc<Shared>);

struct Shared {
    /// Readable once it is to stop.
    wake: OwnedFd,
    stopped: AtomicBool,
    pool: Arc<Pool>,
    cpu_ns: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl XlTap {
    /// Starts to read what follows `header`. The end is a notice.
    pub(super) fn start(
        pipes: Arc<XlPipes>,
        header: &[u8],
        configuration: &Configuration,
        collector: Collector,
        (passes, host): (Arc<XlPasses>, &str),
    ) -> Result<Self, MigrationError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags).map_err(|errno| local("making an eventfd", errno.into()))?;
        let shared = Arc::new(Shared {
            wake,
            stopped: AtomicBool::new(false),
            pool: Arc::clone(&collector.state.pool),
            cpu_ns: AtomicU64::new(0),
            thread: Mutex::new(None),
        });
        let pages_max = u64::from(configuration.pages_max());
        collector.state.announce_ram(configuration.memory_bytes, false);
        collector.handed_over.announce([pages_max].into_iter());
        if let Some(naming) = &collector.naming {
            naming.announce(&[], false);
        }
        let reading = Reading {
            pipes,
            collector,
            passes,
            host: host.to_owned(),
            shared: Arc::clone(&shared),
            splitter: Splitter::default(),
            passing: Vec::new(),
            epoch: Epoch::default(),
            non_ram_bytes: 0,
            are_pages_out: false,
            has_tail: false,
            last_part: Some(last_part(configuration.memory_bytes)),
        };
        let header = header.to_vec();
        let thread = data_threads::spawn("xl-tap", move || reading.run(&header));
        *shared.thread.lock() = Some(thread.map_err(no_thread)?);
        Ok(Self(XlStopper(shared)))
    }
}

impl Tapping for XlTap {
    type Stopper = XlStopper;

    fn stopper(&self) -> XlStopper {
        self.0.clone()
    }
}

impl Stopping for XlStopper {
    fn stop(&self) {
        self.0.stopped.store(true, SeqCst);
        // It is readable already if this fails.
        let _ = rustix::io::write(&self.0.wake, &1_u64.to_ne_bytes());
        self.0.pool.close();
    }

    fn cut(&self) {
        self.stop();
        let thread = self.0.thread.lock().take();
        if let Some(thread) = thread {
            // A panic is a notice, and in the log.
            let _ = thread.join();
        }
    }

    fn hang_up(&self, _limit: Duration) {
        self.cut();
    }

    fn cpu(&self) -> Duration {
        Duration::from_nanos(self.0.cpu_ns.load(Relaxed))
    }
}

/// The stream, as far as it was read.
struct Reading {
    pipes: Arc<XlPipes>,
    collector: Collector,
    passes: Arc<XlPasses>,
    host: String,
    shared: Arc<Shared>,
    splitter: Splitter,
    /// A piece of the non-RAM stream.
    passing: Vec<u8>,
    /// The last epoch that the destination knows of.
    epoch: Epoch,
    non_ram_bytes: u64,
    /// Whether pages were handed on since the last piece of the non-RAM stream.
    are_pages_out: bool,
    /// Whether a piece of it has followed pages.
    has_tail: bool,
    /// Where the last part of memory starts; none once xl has reached it.
    last_part: Option<PageIndex>,
}

/// A batch whose buffer has what was read, of which `start..filled` is not parsed yet.
struct Window {
    batch: Batch,
    start: usize,
    filled: usize,
}

impl Reading {
    fn run(mut self, header: &[u8]) {
        let threads = Arc::clone(&self.collector.threads);
        let _member = threads.join();
        let ended = self.read(header);
        let cpu = u64::try_from(thread_cpu().as_nanos()).unwrap_or(u64::MAX);
        self.shared.cpu_ns.store(cpu, Relaxed);
        self.collector.notice(Notice::Ended(ended));
    }

    /// Reads the stream to its end, and waits until all pages are placed.
    fn read(&mut self, header: &[u8]) -> Result<(), MigrationError> {
        self.pass_header(header)?;
        let mut window = Window { batch: self.batch()?, start: 0, filled: 0 };
        loop {
            match self.parse(&mut window)? {
                Step::Ended => break,
                Step::Paused => self.next_batch(&mut window)?,
                Step::More { need } => {
                    self.make_room(&mut window, need)?;
                    self.read_more(&mut window)?;
                }
            }
        }
        if window.start < window.filled {
            return Err(MigrationError::Xl("it wrote more than its stream".to_owned()));
        }
        self.hand_on(window.batch)?;
        self.drain()?;
        // The destination ends the lanes when it has the domain, which must not count as a failure.
        self.collector.lanes.close();
        Ok(())
    }

    /// xl's header is the start of the stream.
    fn pass_header(&mut self, header: &[u8]) -> Result<(), MigrationError> {
        let mut batch = self.batch()?;
        for piece in header.chunks(batch.buffer().len()) {
            let (mut start, end) = (0, piece.len());
            batch.buffer_mut()[..end].copy_from_slice(piece);
            let mut passing = mem::take(&mut self.passing);
            let pass = |bytes: &[u8]| passing.extend_from_slice(bytes);
            let progress = fill_batch(&mut self.splitter, &mut batch, start, end, pass);
            start += progress?.consumed;
            let is_whole = start == end;
            self.pass(passing)?;
            if !is_whole {
                return Err(MigrationError::Xl("its header is not complete".to_owned()));
            }
        }
        Ok(())
    }

    fn batch(&self) -> Result<Batch, MigrationError> {
        self.shared.pool.take().map_err(|_| stopped())
    }

    fn parse(&mut self, window: &mut Window) -> Result<Step, MigrationError> {
        let Window { batch, start, filled } = window;
        let had_pages = !batch.is_empty();
        let mut passing = mem::take(&mut self.passing);
        let pass = |bytes: &[u8]| passing.extend_from_slice(bytes);
        let progress = fill_batch(&mut self.splitter, batch, *start, *filled, pass);
        let Progress { consumed, step } = progress?;
        *start += consumed;
        // A batch of zeros may wait for more of them until the end of the pass.
        if self.last_part.is_some_and(|from| reaches(batch, from)) {
            self.last_part = None;
            self.collector.notice(Notice::FirstPassEnds);
        }
        // Only an empty batch lets bytes pass: they precede its pages.
        debug_assert!(passing.is_empty() || !had_pages, "bytes pass pages");
        self.pass(passing)?;
        Ok(step)
    }

    /// Hands the batch on, and continues in another one.
    fn next_batch(&mut self, window: &mut Window) -> Result<(), MigrationError> {
        let mut next = self.batch()?;
        let Window { batch, start, filled } = window;
        let rest = &batch.buffer()[*start..*filled];
        next.buffer_mut()[..rest.len()].copy_from_slice(rest);
        (*start, *filled) = (0, rest.len());
        let full = mem::replace(batch, next);
        self.hand_on(full)
    }

    /// Makes room for `need` bytes from the start of what is not parsed.
    fn make_room(&mut self, window: &mut Window, need: usize) -> Result<(), MigrationError> {
        let Window { batch, start, filled } = window;
        if *start + need <= batch.buffer().len() && *filled < batch.buffer().len() {
            return Ok(());
        }
        // Nothing refers to what was parsed: it was zeros, or has passed.
        if batch.bodies().is_empty() {
            batch.buffer_mut().copy_within(*start..*filled, 0);
            (*start, *filled) = (0, *filled - *start);
            return Ok(());
        }
        self.next_batch(window)
    }

    /// Reads more. Pages wait for that only for a moment.
    fn read_more(&mut self, window: &mut Window) -> Result<(), MigrationError> {
        loop {
            if self.shared.stopped.load(SeqCst) {
                return Err(stopped());
            }
            let limit = if window.batch.is_empty() { SILENT } else { IDLE };
            let wake = Some(self.shared.wake.as_fd());
            let buffer = &mut window.batch.buffer_mut()[window.filled..];
            let read = self.pipes.read(buffer, wake, limit);
            match read.map_err(|error| MigrationError::Xl(error.to_string()))? {
                FromXl::Bytes(count) => {
                    window.filled += count;
                    return Ok(());
                }
                FromXl::Nothing if window.batch.is_empty() => {}
                FromXl::Nothing => self.next_batch(window)?,
                FromXl::Woken => return Err(stopped()),
                FromXl::Closed => {
                    self.splitter.finish()?;
                    return Err(MigrationError::Xl("it closed its pipe".to_owned()));
                }
            }
        }
    }

    /// Has the lanes send a batch.
    fn hand_on(&mut self, mut batch: Batch) -> Result<(), MigrationError> {
        data_threads::point();
        if batch.is_empty() {
            return Ok(());
        }
        if self.epoch == Epoch::default() {
            self.collector.notice(Notice::FirstPassBegins);
        }
        while self.epoch < batch.epoch {
            self.epoch.0 += 1;
            let (epoch, position) = (self.epoch.0, self.non_ram_bytes);
            let said = self.collector.link.send(&ToDestination::Epoch { epoch, position });
            said.map_err(|error| self.lost(&error))?;
        }
        self.collector.state.took(&batch);
        if self.has_tail {
            // After the tail's start only VERIFY is followed by pages.
            self.passes.verifies();
        }
        self.passes.took(&batch);
        self.note(&batch);
        self.are_pages_out = true;
        if let Some(naming) = &self.collector.naming {
            naming.hand_over(&mut batch);
        }
        self.collector.lanes.submit(batch).map_err(|source| self.lanes_failed(source))
    }

    /// Records for the audit what xl has handed over.
    fn note(&self, batch: &Batch) {
        let Some(block) = self.collector.handed_over.block(BLOCK) else { return };
        let (hash, epoch) = (block.hash(), batch.epoch);
        let mut writing = block.write();
        for body in batch.bodies() {
            writing.handed_over(body.page, hash.of(batch.bytes_of(*body)), epoch);
        }
        for fill in batch.fills() {
            for page in (fill.first.0..).take(fill.count as usize).map(PageIndex) {
                writing.handed_over(page, hash.of_fill(fill.byte), epoch);
            }
        }
    }

    /// Passes a piece of the non-RAM stream, once all pages before it are placed.
    fn pass(&mut self, mut piece: Vec<u8>) -> Result<(), MigrationError> {
        if !piece.is_empty() {
            if self.are_pages_out && !mem::replace(&mut self.has_tail, true) {
                self.collector.notice(Notice::TailBegins);
            }
            self.drain()?;
            self.collector.count(&piece);
            let said = self.collector.link.non_ram(false, &piece);
            said.map_err(|error| self.lost(&error))?;
            self.non_ram_bytes += piece.len() as u64;
        }
        piece.clear();
        self.passing = piece;
        Ok(())
    }

    fn drain(&mut self) -> Result<(), MigrationError> {
        if mem::take(&mut self.are_pages_out) {
            let drained = self.collector.lanes.wait_drained();
            drained.map_err(|source| self.lanes_failed(source))?;
        }
        Ok(())
    }

    fn lanes_failed(&self, source: transport::LanesError) -> MigrationError {
        MigrationError::Lanes { host: self.host.clone(), source }
    }

    fn lost(&self, error: &LinkError) -> MigrationError {
        MigrationError::lost(&self.host, error)
    }
}

/// The leading thread has ended it, and knows why.
fn stopped() -> MigrationError {
    MigrationError::Xl("its pipe is not read any more".to_owned())
}

/// Where the last part of a domain's memory starts: at once if its size is not known.
fn last_part(memory_bytes: u64) -> PageIndex {
    let pages = memory_bytes / PAGE_BYTES as u64;
    PageIndex(u32::try_from(pages - pages.div_ceil(LAST_PART)).unwrap_or(u32::MAX))
}

/// Whether xl's first pass, which has the pages in order, has come so far, or has ended.
fn reaches(batch: &Batch, from: PageIndex) -> bool {
    let body = batch.bodies().last().map(|body| body.page);
    let fill = batch.fills().last().map(|fill| PageIndex(fill.first.0 + (fill.count - 1)));
    batch.epoch.0 > 1 || body.max(fill) >= Some(from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_ends_in_the_last_part_of_the_first_pass() {
        let pool = Pool::new(1 << 20);
        let from = last_part(64 << 20);
        assert_eq!(from, PageIndex(14 << 10));
        let reached = |epoch, page, is_zero| {
            let mut batch = pool.take().unwrap();
            batch.epoch = Epoch(epoch);
            match is_zero {
                true => batch.push_fill(PageIndex(page), 0),
                false => batch.push_body(PageIndex(page), 0),
            }
            reaches(&batch, from)
        };
        for is_zero in [false, true] {
            assert!(!reached(1, (14 << 10) - 1, is_zero));
            assert!(reached(1, 14 << 10, is_zero));
            // As where a balloon has the last part.
            assert!(reached(2, 0, is_zero));
        }
        assert_eq!(last_part(0), PageIndex(0));
    }
}
