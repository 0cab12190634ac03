//! Pages that the VM's own disks have, mostly its page cache. They are read from the storage that
//! both hosts share, while the network carries the others.
//!
//! The source names a page and the place where a disk should have it. Pages that no VM here has
//! or provides are read from the disk, upwards. As much as the network has room for is requested
//! from the source, starting at the other end. When the two meet, all pages have arrived. A page
//! that was read counts only if it has the name: the disk may have changed, or be another one.

mod names;

use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use content::{Domain, Key, Name};
use page::PAGE_BYTES;
use parking_lot::Mutex;
use storage::{Consumer, Failure, Item, Opened, Pages, Progress, Reader, Settings};
use wire::DiskLocation;

use crate::destination::{Exchange, Provider};
use names::Names;

const SECTOR_BYTES: u64 = 512;

/// The disks of one arriving VM that are read. Dropping it ends their readers.
pub(crate) struct DiskReaders {
    /// By the source's numbers for them.
    disks: Vec<Option<Disk>>,
    spare: Mutex<Spare>,
}

struct Disk {
    reader: Reader,
    taking: Arc<Taking>,
}

/// Pages that are read here and that the source could send.
#[derive(Default)]
struct Spare {
    /// All that it ever offered, in pages.
    said: u64,
    /// What it was asked for, in pages.
    used: u64,
}

/// Takes what one disk's reader reads.
struct Taking {
    number: u64,
    exchange: Weak<Exchange>,
    /// The names of wanted pages.
    names: Mutex<Names>,
    /// Whether the readers have been dropped.
    over: AtomicBool,
    stale_pages: AtomicU64,
    /// Why pages were not read: the first failure, or the reason why reading ended.
    why: Mutex<Option<Failure>>,
}

impl Taking {
    /// The names of items that have ended.
    fn take(&self, tokens: impl Iterator<Item = u64>) -> Vec<Name> {
        let mut names = self.names.lock();
        tokens.filter_map(|token| names.take(token)).collect()
    }

    /// These items are not read from the disk.
    fn fails(&self, tokens: impl Iterator<Item = u64>) {
        if let Some(exchange) = self.exchange.upgrade() {
            exchange.not_brought(Provider::Disk(self.number), &self.take(tokens));
        }
    }
}

impl Consumer for Taking {
    fn wants(&self, _: &Item) -> bool {
        !self.over.load(Relaxed)
    }

    fn read(&self, pages: Pages<'_>) {
        let Some(exchange) = self.exchange.upgrade() else { return };
        let (tokens, bodies): (Vec<u64>, Vec<&[u8; PAGE_BYTES]>) = pages.iter().unzip();
        let names = self.take(tokens.into_iter());
        let by = Provider::Disk(self.number);
        let wrong = exchange.brought(by, &names, &|nth| &bodies[nth][..]);
        self.stale_pages.fetch_add(wrong as u64, Relaxed);
    }

    fn failed(&self, items: &[Item], why: &Failure) {
        tracing::debug!(pages = items.len(), %why, "not read from storage");
        if !self.over.load(Relaxed) {
            self.why.lock().get_or_insert_with(|| why.clone());
        }
        self.fails(items.iter().map(|item| item.token));
    }

    fn ended(&self, why: &Failure) {
        if !self.over.load(Relaxed) {
            tracing::warn!(%why, "no longer reading a disk");
            *self.why.lock() = Some(why.clone());
        }
    }
}

/// The key that names the pages of a VM whose content is not shared. Source and destination have
/// a secret for the one migration.
#[must_use]
pub fn key(secret: &str) -> Key {
    Key::new(secret.as_bytes(), &Domain::default())
}

/// Disks that can be read, and how.
pub struct Disks {
    /// By the source's numbers for them.
    pub opened: Vec<Option<Opened>>,
    /// How fast, and by which threads.
    pub settings: Settings,
}

/// What came from disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Pages that are placed.
    pub placed_bytes: u64,
    /// What was read, including the gaps between wanted pages.
    pub read_bytes: u64,
    /// Pages that had other content on disk.
    pub stale_pages: u64,
    /// Pages that storage failed to give.
    pub failed_pages: u64,
}

impl DiskReaders {
    /// Starts reading disks for the VM with that number. Disks that can't be read are logged and
    /// skipped.
    pub(crate) fn new(number: u64, exchange: &Arc<Exchange>, disks: Disks) -> Self {
        let Disks { opened, settings } = disks;
        let exchange = Arc::downgrade(exchange);
        let start = |opened: Opened| {
            let taking = Arc::new(Taking {
                number,
                exchange: Weak::clone(&exchange),
                names: Mutex::default(),
                over: AtomicBool::new(false),
                stale_pages: AtomicU64::new(0),
                why: Mutex::default(),
            });
            match Reader::start(opened.source, Arc::clone(&taking) as _, settings.clone()) {
                Ok(reader) => Some(Disk { reader, taking }),
                Err(error) => {
                    tracing::warn!(%error, "a disk is not read");
                    None
                }
            }
        };
        let disks = opened.into_iter().map(|opened| opened.and_then(start)).collect();
        Self { disks, spare: Mutex::default() }
    }

    /// Whether the place's disk is read.
    pub(crate) fn has(&self, place: DiskLocation) -> bool {
        self.disk(place.disk).is_some()
    }

    fn disk(&self, number: u16) -> Option<&Disk> {
        self.disks.get(usize::from(number))?.as_ref()
    }

    /// Queues pages to be read from disks.
    pub(crate) fn want(&self, wanted: &mut [(DiskLocation, Name)]) {
        wanted.sort_unstable_by_key(|(place, _)| (place.disk, place.sector));
        for run in wanted.chunk_by(|(one, _), (next, _)| one.disk == next.disk) {
            let Some(disk) = run.first().and_then(|(place, _)| self.disk(place.disk)) else {
                continue;
            };
            let mut names = disk.taking.names.lock();
            let item = |(place, name): &(DiskLocation, Name)| Item {
                token: names.add(*name),
                offset: place.sector.saturating_mul(SECTOR_BYTES),
            };
            let items: Vec<Item> = run.iter().map(item).collect();
            drop(names);
            if disk.reader.add(&items).is_err() {
                disk.taking.fails(items.iter().map(|item| item.token));
            }
        }
        self.give_back();
    }

    /// The source could send so many pages that are read here, counted from the beginning.
    pub(crate) fn spare(&self, pages: u64) {
        let mut spare = self.spare.lock();
        spare.said = spare.said.max(pages);
        drop(spare);
        self.give_back();
    }

    /// Requests as many pages as the source can send, starting with those furthest from being
    /// read.
    fn give_back(&self) {
        let mut spare = self.spare.lock();
        let mut taken = Vec::new();
        while spare.used < spare.said {
            let most = |disk: &&Disk| disk.reader.progress().wanted_pages;
            let Some(disk) = self.disks.iter().flatten().max_by_key(most) else { return };
            let pages = usize::try_from(spare.said - spare.used).unwrap_or(usize::MAX);
            taken.clear();
            if disk.reader.take_from_the_end(pages, &mut taken) == 0 {
                return;
            }
            spare.used += taken.len() as u64;
            disk.taking.fails(taken.iter().copied());
        }
    }

    /// Ends reading, without waiting for requests in flight.
    pub(crate) fn end(&self) {
        for Disk { reader, taking } in self.disks.iter().flatten() {
            taking.over.store(true, Relaxed);
            reader.stop();
        }
    }

    /// What was read so far.
    pub(crate) fn read(&self) -> Stored {
        let mut read = Stored::default();
        for Disk { reader, taking } in self.disks.iter().flatten() {
            let Progress { read_bytes, failed_pages, .. } = reader.progress();
            read.read_bytes += read_bytes;
            read.failed_pages += failed_pages;
            read.stale_pages += taking.stale_pages.load(Relaxed);
        }
        read
    }

    /// Notes for the report on what was not as the guest's helper reported.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let stale_pages = self.read().stale_pages;
        if stale_pages > 0 {
            notes.push(format!(
                "{stale_pages} pages that were read from storage were something else there than \
                 the guest had in memory, and were sent instead"
            ));
        }
        for Disk { reader, taking } in self.disks.iter().flatten() {
            if let Some(why) = &*taking.why.lock() {
                let pages = reader.progress().failed_pages;
                notes.push(format!(
                    "{pages} pages could not be read from storage, and were sent instead: {why}"
                ));
            }
        }
        notes
    }
}

impl Drop for DiskReaders {
    fn drop(&mut self) {
        // All at once: each waits for its storage for a moment when it is dropped.
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::mpsc::{Receiver, channel};

    use content::NAME_BYTES;
    use storage::{Buffer, Source};

    use super::*;

    /// Storage that doesn't answer.
    struct Silent(Mutex<Receiver<()>>);

    impl Source for Silent {
        fn bytes(&self) -> u64 {
            1 << 20
        }

        fn read(&self, _: u64, _: usize, _: &mut Buffer) -> Result<Range<usize>, Failure> {
            let _ = self.0.lock().recv();
            Err(Failure::Broken("as a test".to_owned()))
        }

        fn interrupt(&self) {}
    }

    #[test]
    fn reading_ends_whatever_storage_does() {
        let (answer, silent) = channel();
        let exchange = Exchange::start_for_one(16).unwrap();
        let source = Box::new(Silent(Mutex::new(silent)));
        let opened = vec![Some(Opened { source, cached: false })];
        let settings = Settings { in_flight: 1, ..Settings::default() };
        let readers = DiskReaders::new(1, &exchange, Disks { opened, settings });
        let wanted = |nth: u8| {
            let place = DiskLocation { disk: 0, sector: u64::from(nth) * 80 };
            (place, Name([nth; NAME_BYTES]))
        };
        readers.want(&mut [0, 1, 2].map(wanted));
        readers.end();
        readers.want(&mut [3, 4].map(wanted));
        let reader = &readers.disks[0].as_ref().unwrap().reader;
        assert_eq!(reader.wait_idle(), Err(Failure::Stopped));
        assert_eq!(reader.progress().wanted_pages, 0);
        assert!(readers.notes().is_empty(), "nothing is missing: {:?}", readers.notes());
        drop(answer);
    }
}
