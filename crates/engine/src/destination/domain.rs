//! Writes a domain of Xen to its receiver: the non-RAM stream as it comes, and pages of lanes as
//! records. So are pages by name, whose content comes from elsewhere.

mod late;

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;

use audit::{Delivery, Hash, Ledger};
use dedup::destination::PagePlacer;
use page::{BlockId, Epoch, Fill, PAGE_BYTES, PageIndex};
use parking_lot::{Condvar, Mutex, MutexGuard};
use transport::LaneEnd;
use wire::{BatchHeader, Tables};
use xen::{Arrived, Joined, Joiner, PageKind, Record};

use late::{LatePages, Waiting};

/// Bytes of records that are written together.
const WRITTEN_TOGETHER: usize = 256 << 10;
/// The only block of the audit: a page counts with its last content, whatever its type is.
const BLOCK: BlockId = BlockId(0);

/// Shared by the lanes of one domain, and by the thread that leads its arrival.
pub(crate) struct DomainWriter {
    writing: Mutex<Writing>,
    /// Page numbers are below.
    pages_max: u32,
    late: Mutex<Waiting>,
    /// An epoch has started, or all has ended.
    changed: Condvar,
    /// The receiver's input, to end a write.
    input: UnixStream,
    /// None: it is not audited.
    ledger: Option<Ledger>,
    written_bytes: AtomicU64,
    is_over: AtomicBool,
}

struct Writing {
    joiner: Joiner,
    record: Record,
    out: Vec<u8>,
    input: UnixStream,
}

impl DomainWriter {
    /// A writer to this receiver, which may read nothing for `unread_max`. `hash` is that of the
    /// audit.
    pub(crate) fn new(
        input: UnixStream,
        pages_max: u32,
        hash: Option<Hash>,
        unread_max: Duration,
    ) -> Result<Self, String> {
        input.set_write_timeout(Some(unread_max)).map_err(|error| error.to_string())?;
        let ledger = hash.map(|hash| {
            let ledger = Ledger::new(hash, [u64::from(pages_max)]);
            ledger.ok_or("there is no memory for the audit: 8 bytes for each page")
        });
        let writing = Writing {
            joiner: Joiner::new(pages_max),
            record: Record::default(),
            out: Vec::new(),
            input: input.try_clone().map_err(|error| error.to_string())?,
        };
        Ok(Self {
            writing: Mutex::new(writing),
            pages_max,
            late: Mutex::default(),
            changed: Condvar::new(),
            input,
            ledger: ledger.transpose()?,
            written_bytes: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        })
    }

    /// What was written, for the audit.
    pub(crate) fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_ref()
    }

    /// Bytes that the receiver has been given.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Relaxed)
    }

    /// Takes a batch of a lane, and waits until its epoch has started.
    pub(crate) fn take(
        &self,
        header: BatchHeader,
        tables: &Tables,
        bytes: &[u8],
    ) -> Result<(), LaneEnd> {
        let (block, epoch) = (header.block, header.epoch);
        let arrived = Arrived { block, epoch, pages: &tables.pages, bytes, fills: &tables.fills };
        self.place(&arrived, Delivery::Body)
    }

    fn place(&self, arrived: &Arrived<'_>, delivery: Delivery) -> Result<(), LaneEnd> {
        let mut writing = self.writing.lock();
        loop {
            if self.is_over.load(SeqCst) {
                return Err(LaneEnd::Over);
            }
            self.write_late(&mut writing).map_err(LaneEnd::Refused)?;
            match self.write(&mut writing, arrived).map_err(LaneEnd::Refused)? {
                Joined::Record => self.note(&writing.joiner, arrived, delivery),
                Joined::Stale => {}
                Joined::Early => {
                    self.changed.wait(&mut writing);
                    continue;
                }
            }
            return Ok(());
        }
    }

    /// Writes pages whose content others had.
    fn write_late(&self, writing: &mut MutexGuard<'_, Writing>) -> Result<(), String> {
        loop {
            // Not locked while they are written, so that no thread waits to add some.
            let next = self.late.lock().take();
            let Some(LatePages { block, epoch, pages, bytes, delivery }) = next else {
                return Ok(());
            };
            let arrived = Arrived { block, epoch, pages: &pages, bytes: &bytes, fills: &[] };
            if self.write(writing, &arrived)? == Joined::Record {
                self.note(&writing.joiner, &arrived, delivery);
            }
        }
    }

    /// Writes those of the pages that are needed.
    fn write(
        &self,
        writing: &mut MutexGuard<'_, Writing>,
        arrived: &Arrived<'_>,
    ) -> Result<Joined, String> {
        let Writing { joiner, record, out, input } = &mut **writing;
        let mut written = Ok(());
        let mut flush = |out: &mut Vec<u8>| {
            if written.is_ok() {
                written = self.pass(input, out);
            }
            out.clear();
        };
        let joined = joiner.arrived(arrived, record, |piece| {
            out.extend_from_slice(piece);
            if out.len() >= WRITTEN_TOGETHER {
                flush(out);
            }
        });
        flush(out);
        written?;
        joined.map_err(|error| format!("the source sent pages that can't be written: {error}"))
    }

    fn pass(&self, mut input: &UnixStream, bytes: &[u8]) -> Result<(), String> {
        input.write_all(bytes).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => "xl's receiver reads nothing".to_owned(),
            _ => format!("xl's receiver accepts no data: {error}"),
        })?;
        self.written_bytes.fetch_add(bytes.len() as u64, Relaxed);
        Ok(())
    }

    /// Records what the domain has now, and how the bodies were delivered.
    fn note(&self, joiner: &Joiner, arrived: &Arrived<'_>, delivery: Delivery) {
        let Some(block) = self.ledger.as_ref().and_then(|ledger| ledger.block(BLOCK)) else {
            return;
        };
        let (hash, epoch) = (block.hash(), arrived.epoch);
        let mut writing = block.write();
        for (page, body) in arrived.pages.iter().zip(arrived.bytes.chunks_exact(PAGE_BYTES)) {
            if joiner.is_newest(*page, epoch) {
                writing.placed(*page, hash.of(body), epoch, delivery);
            }
        }
        for fill in arrived.fills {
            for page in (fill.first.0..).take(fill.count as usize).map(PageIndex) {
                if joiner.is_newest(page, epoch) {
                    writing.placed(page, hash.of_fill(fill.byte), epoch, Delivery::Fill);
                }
            }
        }
    }

    /// Starts an epoch: its pages may be written.
    pub(crate) fn epoch(&self, epoch: Epoch, position: u64) -> Result<(), String> {
        let started = self.writing.lock().joiner.epoch(epoch, position);
        self.changed.notify_all();
        started.map_err(|error| format!("the source's stream is out of order: {error}"))
    }

    /// Passes a piece of the non-RAM stream, after all pages that count as placed.
    pub(crate) fn non_ram(&self, bytes: &[u8]) -> Result<(), String> {
        let mut writing = self.writing.lock();
        self.write_late(&mut writing)?;
        self.pass(&writing.input, bytes)?;
        writing.joiner.non_ram(bytes);
        Ok(())
    }

    /// Ends all waiting, and takes no more pages. The receiver's input stays open.
    pub(crate) fn stop(&self) {
        self.is_over.store(true, SeqCst);
        // A thread that has seen that it is not over waits by now, or writes.
        drop(self.writing.lock());
        self.changed.notify_all();
    }

    /// The same, and closes the receiver's input.
    pub(crate) fn end(&self) {
        self.is_over.store(true, SeqCst);
        // It ends a write. The receiver may have exited.
        let _ = self.input.shutdown(Shutdown::Both);
        self.stop();
    }
}

/// Pages by name.
impl PagePlacer for DomainWriter {
    fn place_fills(&self, block: BlockId, epoch: Epoch, fills: &[Fill]) -> Result<(), LaneEnd> {
        let arrived = Arrived { block, epoch, pages: &[], bytes: &[], fills };
        self.place(&arrived, Delivery::Fill)
    }

    fn check(&self, block: BlockId, epoch: Epoch, pages: &[PageIndex]) -> Result<(), LaneEnd> {
        if block != PageKind::Normal.block() {
            let why = "the source sent pages by name that are no data, such as page tables";
            return Err(LaneEnd::Refused(why.to_owned()));
        }
        if let Some(page) = pages.iter().find(|page| page.0 >= self.pages_max) {
            let number = page.0;
            let why = format!("the source named page {number:#x}, which is outside the domain");
            return Err(LaneEnd::Refused(why));
        }
        let mut writing = self.writing.lock();
        while !self.is_over.load(SeqCst) {
            self.write_late(&mut writing).map_err(LaneEnd::Refused)?;
            if writing.joiner.has_started(epoch) {
                return Ok(());
            }
            self.changed.wait(&mut writing);
        }
        Err(LaneEnd::Over)
    }

    fn place_bodies(
        &self,
        block: BlockId,
        epoch: Epoch,
        pages: &[PageIndex],
        bytes: &[u8],
        delivery: Delivery,
    ) -> Result<(), LaneEnd> {
        self.place(&Arrived { block, epoch, pages, bytes, fills: &[] }, delivery)
    }

    fn place_late(
        &self,
        block: BlockId,
        epoch: Epoch,
        pages: &[PageIndex],
        bytes: &[u8],
        delivery: Delivery,
    ) -> bool {
        let (pages, bytes) = (pages.to_vec(), bytes.to_vec());
        let late = LatePages { block, epoch, pages, bytes, delivery };
        !self.is_over.load(SeqCst) && self.late.lock().add(late)
    }

    fn never_waits(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests;
