//! Announces pages that the destination may read from disks before QEMU hands them over.
//!
//! QEMU hands pages over in the order of its RAM, and none while its buffers are full. So pages
//! that a disk should have are named from the RAM itself, in the disk's order, as soon as the
//! guest has said where they are. The destination then reads storage from the start, in one
//! sweep. Announced pages have an epoch of their own, before QEMU's first. A page that QEMU later
//! hands over unchanged is not sent. One that has changed since is sent, and is the newer one.

use std::sync::Arc;

use content::Name;
use data_threads::{DataThreads, Joined};
use page::{BATCH_PAGES, BlockId, Buffer, Epoch, PAGE_BYTES, PageIndex, is_zero};

use super::guest_page_cache::{GuestPageCache, OnDisk};
use super::naming::Naming;
use super::stage::Stage;

/// Announced pages are older than all that QEMU hands over.
const EPOCH: Epoch = Epoch(0);

/// QEMU's epoch, moved behind the epoch of announced pages.
#[must_use]
pub fn after(epoch: Epoch) -> Epoch {
    Epoch(epoch.0.saturating_add(1))
}

/// The announcing thread. Dropping it ends the thread.
pub struct Announcer {
    _thread: Joined,
    cached: Arc<GuestPageCache>,
    stage: Arc<Stage>,
}

impl Announcer {
    /// Announces pages on disks that the destination reads. None if it reads none.
    pub fn start(stage: &Arc<Stage>, threads: &Arc<DataThreads>) -> std::io::Result<Option<Self>> {
        let Some(cached) = stage.naming().cached().cloned() else { return Ok(None) };
        let thread = data_threads::spawn("ahead", {
            let (cached, stage, threads) =
                (Arc::clone(&cached), Arc::clone(stage), Arc::clone(threads));
            move || {
                let _member = threads.join();
                Telling { naming: stage.naming(), cached: &cached, stage: &stage }.run();
            }
        })?;
        Ok(Some(Self { _thread: thread.into(), cached, stage: Arc::clone(stage) }))
    }
}

impl Drop for Announcer {
    fn drop(&mut self) {
        self.cached.end();
        self.stage.wake_reserving();
    }
}

/// Pages of one block that are announced together.
type Chunk = (BlockId, Vec<PageIndex>);

struct Telling<'a> {
    naming: &'a Naming,
    cached: &'a GuestPageCache,
    stage: &'a Stage,
}

impl Telling<'_> {
    fn run(&self) {
        let mut bytes = Buffer::new(BATCH_PAGES * PAGE_BYTES);
        let mut part = 0;
        while let Some(mut rows) = self.cached.wait(part) {
            data_threads::point();
            rows.retain(|row| self.naming.reads(row.disk));
            for (block, pages) in chunks(&rows) {
                if self.is_over() || self.tell(block, &pages, &mut bytes).is_none() {
                    return;
                }
            }
            part += 1;
        }
    }

    /// After the first pass, all pages have been handed over.
    fn is_over(&self) -> bool {
        self.cached.is_over() || self.naming.is_first_pass_over()
    }

    /// None if nothing more is to be announced.
    fn tell(&self, block: BlockId, pages: &[PageIndex], bytes: &mut [u8]) -> Option<()> {
        let bytes = &mut bytes[..pages.len() * PAGE_BYTES];
        let mut places = self.cached.of(block)?;
        // A QEMU that has ended is noticed elsewhere. Pages of an unmapped block go through QEMU
        // only.
        if !self.naming.read(block, pages, bytes) {
            return Some(());
        }
        let named = self.name(block, pages, bytes);
        let mut told = self.stage.reserve((block, EPOCH), || self.is_over())?;
        for (page, name) in named {
            if let Some(found) = places.find(page)
                && places.tell(page, found, name)
            {
                told.add(page, name, found.place);
            }
        }
        told.tell();
        Some(())
    }

    /// The names of pages with these bytes, without zero pages, which QEMU marks itself.
    fn name(&self, block: BlockId, pages: &[PageIndex], bytes: &[u8]) -> Vec<(PageIndex, Name)> {
        let mut namer = self.naming.namer(block);
        let each = pages.iter().zip(bytes.chunks_exact(PAGE_BYTES));
        let named = each.filter(|(_, bytes)| !is_zero(bytes));
        named.map(|(page, bytes)| (*page, namer.name(*page, bytes))).collect()
    }
}

/// One batch from each disk in turn, in the disk's order.
fn chunks(rows: &[OnDisk]) -> impl Iterator<Item = Chunk> + '_ {
    let mut disks: Vec<_> =
        rows.chunk_by(|one, next| one.disk == next.disk).map(of_a_disk).collect();
    let mut turn = 0;
    std::iter::from_fn(move || {
        while !disks.is_empty() {
            turn %= disks.len();
            if let Some(chunk) = disks[turn].next() {
                turn += 1;
                return Some(chunk);
            }
            drop(disks.remove(turn));
        }
        None
    })
}

fn of_a_disk(rows: &[OnDisk]) -> impl Iterator<Item = Chunk> + '_ {
    let pages = |row: &OnDisk| {
        let (block, first) = (row.block, row.first.0);
        (first..first.saturating_add(row.pages)).map(move |page| (block, PageIndex(page)))
    };
    let mut each = rows.iter().flat_map(pages).peekable();
    std::iter::from_fn(move || {
        let (block, first) = each.next()?;
        let mut pages = Vec::with_capacity(BATCH_PAGES);
        pages.push(first);
        while pages.len() < BATCH_PAGES
            && let Some((_, page)) = each.next_if(|(next, _)| *next == block)
        {
            pages.push(page);
        }
        // The lock of a batch spans its first to its last page.
        pages.sort_unstable();
        Some((block, pages))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(disk: u16, block: u16, first: u32, pages: u32) -> OnDisk {
        OnDisk { block: BlockId(block), first: PageIndex(first), pages, disk }
    }

    #[test]
    fn disks_take_turns_and_batches_are_of_one_block() {
        let rows = [row(0, 1, 500, 200), row(0, 1, 3, 1), row(0, 2, 0, 2), row(4, 1, 900, 130)];
        let told: Vec<_> = chunks(&rows)
            .map(|(block, pages)| (block.0, pages[0].0, pages[pages.len() - 1].0, pages.len()))
            .collect();
        let expected = [
            (1, 500, 627, 128),
            (1, 900, 1027, 128),
            (1, 3, 699, 73),
            (1, 1028, 1029, 2),
            (2, 0, 1, 2),
        ];
        assert_eq!(told, expected);
        assert_eq!(chunks(&[]).count(), 0);
    }

    #[test]
    fn pages_from_qemu_are_newer_than_announced_ones() {
        assert!(after(Epoch(0)) > EPOCH);
        assert_eq!(after(Epoch(u32::MAX)), Epoch(u32::MAX));
    }
}
