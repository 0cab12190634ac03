//! What of the VM's memory its disks have, as a helper in the guest tells.
//!
//! It is asked on a thread of its own while the migration begins; pages that went
//! before it has answered went over the network. What it says is a hint: the
//! destination looks whether the disk has what the page's name says.

mod bits;
mod map;

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use cachemap::{Budget, CacheMap, End};
use page::{Batch, BlockId, Epoch, PageIndex};
use parking_lot::{Condvar, Mutex};
use qemu::guest_disks::{self, GuestDisk};
use qemu::guest_memory::GuestMemory;
use qemu::guest_port::{self, Patience};
use qemu::machine::Machine;
use qemu::ram_blocks::RamBlocks;

use super::storage_notes::StorageNotes;
use bits::Bits;
use map::{Map, Parts, on_disks, stretches};
pub(super) use map::{OnDisk, Places, Room};

/// Another one who speaks at the port is waited for so long.
const TURN_MAX: Duration = Duration::from_secs(5);

const NO_ROOM: &str = "only a part of what the guest's helper tells is read from storage: what is \
                       kept of it may be as large as a quarter of this agent's buffers; a larger \
                       pool-mib allows more";

/// What is known of it.
#[derive(Debug, Default)]
pub(super) struct GuestPageCache {
    announced: OnceLock<Announced>,
    known: Mutex<Known>,
    /// More is known, or nothing more will be.
    changed: Condvar,
    over: AtomicBool,
    /// QEMU has handed over all that is older than this epoch.
    all_before: AtomicU32,
}

/// What the guest has said so far.
#[derive(Debug, Default)]
struct Known {
    parts: Parts,
    /// There will be no more.
    is_all: bool,
}

/// QEMU's blocks, in the order of their numbers.
#[derive(Debug)]
struct Announced {
    names: Vec<String>,
    bits: Vec<Bits>,
}

impl GuestPageCache {
    /// The block list is known.
    pub(super) fn announce(&self, blocks: &[tap::Block]) {
        let names = blocks.iter().map(|block| block.name.clone()).collect();
        let bits = blocks.iter().map(|block| Bits::new(block.bytes / cachemap::PAGE_BYTES));
        let _ = self.announced.set(Announced { names, bits: bits.collect() });
        self.wake();
    }

    /// The guest has said more.
    fn learn(&self, part: Map) {
        let mut known = self.known.lock();
        // Whoever looks has the parts that there were.
        let parts = known.parts.iter().cloned().chain([Arc::new(part)]);
        known.parts = parts.collect();
        drop(known);
        self.changed.notify_all();
    }

    /// What it means that the guest goes wrong now. What it said before is a hint as
    /// good as any.
    fn without_the_rest(&self, why: &str) -> String {
        if self.known.lock().parts.is_empty() {
            format!("no page is read from storage: {why}")
        } else {
            format!("only pages that the guest's helper had told of are read from storage: {why}")
        }
    }

    /// It says no more.
    fn knows_all(&self) {
        self.known.lock().is_all = true;
        self.changed.notify_all();
    }

    /// Nobody needs it any more.
    pub(super) fn end(&self) {
        self.over.store(true, Relaxed);
        self.wake();
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    fn wake(&self) {
        let _known = self.known.lock();
        self.changed.notify_all();
    }

    /// Waits until the guest has said a part with that number and QEMU has announced
    /// its memory. The part then, as disks have it, and in the order of each; none if
    /// there is no such part, or once it is over.
    pub(super) fn wait(&self, part: usize) -> Option<Vec<OnDisk>> {
        let mut known = self.known.lock();
        loop {
            if self.is_over() {
                return None;
            }
            if let Some(announced) = self.announced.get() {
                if let Some(part) = known.parts.get(part).cloned() {
                    drop(known);
                    return Some(on_disks(&announced.names, &part));
                }
                if known.is_all {
                    return None;
                }
            }
            self.changed.wait(&mut known);
        }
    }

    /// Where pages of a block are; none if nothing is known of it.
    pub(super) fn of(&self, block: BlockId) -> Option<Places<'_>> {
        let announced = self.announced.get()?;
        let (number, parts) = (usize::from(block.0), self.known.lock().parts.clone());
        let (name, bits) = (announced.names.get(number)?, announced.bits.get(number)?);
        Places::of(name, parts, bits)
    }

    /// QEMU hands these over: they are not told ahead any more.
    pub(super) fn hand_over(&self, batch: &Batch) {
        let bits = self.announced.get().and_then(|all| all.bits.get(usize::from(batch.block.0)));
        let Some(bits) = bits else { return };
        batch.bodies().iter().for_each(|body| bits.hand_over(body.page));
        for fill in batch.fills() {
            let pages = fill.first.0..fill.first.0.saturating_add(fill.count);
            pages.for_each(|page| bits.hand_over(PageIndex(page)));
        }
    }

    /// QEMU has handed over all that is older than this.
    pub(super) fn all_before(&self, epoch: Epoch) {
        self.all_before.fetch_max(epoch.0, SeqCst);
    }

    pub(super) fn has_all_before(&self, epoch: Epoch) -> bool {
        self.all_before.load(SeqCst) >= epoch.0
    }
}

/// The thread that asks. Dropping it ends it.
pub(super) struct Asking {
    stream: Arc<Mutex<Option<UnixStream>>>,
    thread: Option<JoinHandle<()>>,
}

impl Asking {
    /// Asks the helper of this VM where its memory is on `disks`, numbered in this
    /// order; `ram` is what can be read of it. The answer may cost the guest
    /// `budget` and us `room`, and of what it says so many percent count.
    pub(super) fn start(
        machine: &Arc<Machine>,
        disks: Vec<GuestDisk>,
        ram: &RamBlocks,
        (budget, room): (Budget, Room),
        percent: Option<u8>,
        notes: &Arc<StorageNotes>,
    ) -> std::io::Result<(Self, Arc<GuestPageCache>)> {
        let (cached, stream) = (Arc::<GuestPageCache>::default(), Arc::<Mutex<_>>::default());
        let blocks = ram.reached.iter().map(|block| (block.name.clone(), block.bytes)).collect();
        let thread = thread::Builder::new().name("guest-asked".to_owned()).spawn({
            let (machine, notes) = (Arc::clone(machine), Arc::clone(notes));
            let (cached, stream) = (Arc::clone(&cached), Arc::clone(&stream));
            move || {
                let asking = Ask { machine: &machine, disks: &disks, blocks, budget, percent };
                if let Err(why) = asking.ask(room, &stream, &cached, &notes) {
                    notes.note(cached.without_the_rest(&why));
                }
                cached.knows_all();
                // QEMU serves one at a time, and the helper waits for whom it answers.
                drop(stream.lock().take());
            }
        })?;
        Ok((Self { stream, thread: Some(thread) }, cached))
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(stream) = &*self.stream.lock() {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What is asked, and of whom.
struct Ask<'a> {
    machine: &'a Machine,
    disks: &'a [GuestDisk],
    blocks: Vec<(String, u64)>,
    budget: Budget,
    percent: Option<u8>,
}

impl Ask<'_> {
    fn ask(
        &self,
        mut room: Room,
        shared: &Mutex<Option<UnixStream>>,
        cached: &GuestPageCache,
        notes: &StorageNotes,
    ) -> Result<(), String> {
        let Self { machine, blocks, budget, .. } = self;
        let said = |error: &dyn std::fmt::Display| error.to_string();
        let port = machine.open_guest_port(TURN_MAX).map_err(|error| said(&error))?;
        *shared.lock() = Some(port.stream.try_clone().map_err(|error| said(&error))?);
        let limits = guest_port::limits_of(&machine.qmp).map_err(|error| said(&error))?;
        let known = blocks.iter().map(|(name, bytes)| (name.as_str(), *bytes));
        let memory = GuestMemory::of(&machine.qmp, known).map_err(|error| said(&error))?;
        let patience = Patience::of(*budget);
        let mut looked_at = 0;
        let mut understood = |part: CacheMap| {
            notes.helper_answers();
            let (map, unread) = self.understood(&part, &memory, looked_at);
            looked_at = part.devices().len();
            unread.into_iter().for_each(|note| notes.note(note));
            map
        };
        let mut is_full = false;
        let mut learn = |map: Map| {
            let (map, is_all) = room.take(map);
            if !is_all && !std::mem::replace(&mut is_full, true) {
                notes.note(NO_ROOM);
            }
            cached.learn(map);
        };
        let summary = if let Some(percent) = self.percent {
            // Which are the lowest is known only at the end.
            let whole = port.ask(limits, *budget, patience).map_err(|error| said(&error))?;
            let summary = whole.summary().clone();
            let mut map = understood(whole);
            map.cut(percent.into());
            learn(map);
            summary
        } else {
            let mut part = |part| learn(understood(part));
            let heard = port.ask_in_parts(limits, *budget, patience, &mut part);
            heard.map_err(|error| said(&error))?
        };
        notes.helper_answers();
        unfinished(summary.end).into_iter().for_each(|note| notes.note(note));
        Ok(())
    }

    /// A part in terms of blocks, and of disks by their numbers; and why disks are not
    /// read that were not looked at before.
    fn understood(
        &self,
        part: &CacheMap,
        memory: &GuestMemory,
        looked_at: usize,
    ) -> (Map, Vec<String>) {
        let matched = guest_disks::matched(part.devices(), self.disks);
        let each = matched.iter().zip(part.devices()).skip(looked_at);
        let notes = each.filter_map(|(disk, device)| {
            let why = disk.as_ref().err()?;
            Some(format!("the guest's disk {} is not read: {why}", device.name))
        });
        let numbers: Vec<Option<u16>> =
            matched.iter().map(|disk| u16::try_from(*disk.as_ref().ok()?).ok()).collect();
        (stretches(part, &numbers, memory, self.blocks.clone()), notes.collect())
    }
}

/// What the operator can do about a map that is not whole.
fn unfinished(end: End) -> Option<String> {
    let what = match end {
        End::Complete => return None,
        End::Time => "its time was up",
        End::Memory => "it may use no more memory",
        End::Runs => "it names as many runs of pages as are taken",
    };
    Some(format!("the guest's helper told only a part (see --helper-budget): {what}"))
}

#[cfg(test)]
mod tests {
    use content::Name;
    use page::Pool;

    use super::map::tests::map;
    use super::*;

    fn known() -> GuestPageCache {
        let cached = GuestPageCache::default();
        cached.learn(map());
        cached.knows_all();
        assert!(cached.of(BlockId(0)).is_none(), "not announced");
        let block = |name: &str| tap::Block { name: name.to_owned(), bytes: 1 << 20 };
        cached.announce(&["vga", "ram"].map(block));
        cached
    }

    #[test]
    fn parts_come_in_the_order_of_disks_until_all_is_known() {
        let cached = known();
        let rows = cached.wait(0).unwrap();
        let order = rows.iter().map(|row| (row.block.0, row.disk, row.first.0, row.pages));
        let order: Vec<_> = order.collect();
        assert_eq!(order, [(1, 0, 14, 1), (1, 1, 20, 2), (1, 1, 10, 4)]);
        assert!(cached.wait(1).is_none(), "there are no more");
        cached.learn(map());
        assert_eq!(cached.wait(1).unwrap(), rows);
        cached.end();
        assert!(cached.wait(0).is_none());
    }

    #[test]
    fn who_comes_first_with_a_page_stays_so() {
        let cached = known();
        let mut places = cached.of(BlockId(1)).unwrap();
        let [one, other, third] = [12, 21, 20].map(|page| places.find(PageIndex(page)).unwrap());
        let name = Name([7; 20]);
        assert!(places.tell(PageIndex(12), one, name));
        assert_eq!((places.handed_over(one), places.handed_over(other)), (Some(name), None));
        assert!(!places.tell(PageIndex(21), other, name), "QEMU was first");
        assert_eq!((places.told(one), places.told(other)), (Some(name), None));
        // QEMU handed it over before the guest said where it is.
        cached.hand_over(&batch(BlockId(1), &[20, 1 << 30], &[]));
        assert!(!places.tell(PageIndex(20), third, name));
        assert_eq!(places.handed_over(third), None);
    }

    fn batch(block: BlockId, bodies: &[u32], fills: &[u32]) -> Batch {
        let mut batch = Pool::new(1).take().unwrap();
        batch.block = block;
        bodies.iter().for_each(|page| batch.push_body(PageIndex(*page), 0));
        fills.iter().for_each(|page| batch.push_fill(PageIndex(*page), 0));
        batch
    }

    /// It has been something else meanwhile, and that was sent.
    #[test]
    fn what_qemu_hands_over_once_more_is_not_left_out() {
        let cached = known();
        let mut places = cached.of(BlockId(1)).unwrap();
        let pages = [10, 11, 12, 13].map(PageIndex);
        let name = Name([9; 20]);
        for page in pages {
            let found = places.find(page).unwrap();
            assert!(places.tell(page, found, name));
        }
        cached.hand_over(&batch(BlockId(1), &[10, 11], &[12, 13]));
        cached.hand_over(&batch(BlockId(1), &[11, 12], &[]));
        assert_eq!(pages.map(|page| places.has(page)), [Some(name), None, None, Some(name)]);
        cached.all_before(Epoch(3));
        cached.all_before(Epoch(2));
        assert!(cached.has_all_before(Epoch(3)) && !cached.has_all_before(Epoch(4)));
    }

    /// What was read anew is not what was told, until that is seen: QEMU's own counts.
    #[test]
    fn what_is_read_anew_is_not_left_out() {
        let cached = known();
        let mut places = cached.of(BlockId(1)).unwrap();
        let page = PageIndex(11);
        let found = places.find(page).unwrap();
        let name = Name([3; 20]);
        assert!(places.begin_to_read(page).is_none(), "nothing was told");
        assert!(places.tell(page, found, name));
        assert_eq!(places.has(page), Some(name));
        let reading = places.begin_to_read(page).unwrap();
        assert_eq!((reading.name, places.has(page)), (name, None));
        places.is_as_told(&reading);
        assert_eq!(places.has(page), Some(name));
        // It was something else; once more as told says nothing of the first time.
        places.begin_to_read(page).unwrap();
        let again = places.begin_to_read(page).unwrap();
        places.is_as_told(&again);
        assert_eq!(places.has(page), None);
    }
}
