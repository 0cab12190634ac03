//! What of the VM's memory its disks have, as a helper in the guest tells.
//!
//! It is asked on a thread of its own while the migration begins; pages that went
//! before it has answered went over the network. What it says is a hint: the
//! destination looks whether the disk has what the page's name says.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use cachemap::{Budget, CacheMap, PAGE_SECTORS, Run};
use page::{BlockId, PageIndex};
use parking_lot::Mutex;
use qemu::guest_disks::{self, GuestDisk};
use qemu::guest_memory::GuestMemory;
use qemu::guest_port::{self, Patience};
use qemu::machine::Machine;
use qemu::ram_blocks::RamBlocks;
use wire::DiskPlace;

use crate::story::Story;

/// Another one who speaks at the port is waited for so long.
const TURN_MAX: Duration = Duration::from_secs(5);

/// Pages of a RAM block that follow each other, and are on a disk in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stretch {
    first: u32,
    pages: u32,
    place: DiskPlace,
}

impl Stretch {
    fn place_of(&self, page: PageIndex) -> Option<DiskPlace> {
        let nth = page.0.checked_sub(self.first).filter(|nth| *nth < self.pages)?;
        let sector = self.place.sector + u64::from(nth) * PAGE_SECTORS;
        Some(DiskPlace { sector, ..self.place })
    }
}

/// Where pages are, of blocks by name. Stretches are in their pages' order.
type Stretches = Vec<(String, Vec<Stretch>)>;

/// What is known of it.
#[derive(Debug, Default)]
pub(super) struct Cached {
    /// Blocks in the order of their numbers, as QEMU announces them.
    announced: OnceLock<Vec<String>>,
    told: OnceLock<Stretches>,
}

impl Cached {
    /// The block list is known.
    pub(super) fn announce(&self, blocks: &[tap::Block]) {
        let _ = self.announced.set(blocks.iter().map(|block| block.name.clone()).collect());
    }

    /// Where pages of a block are; none if nothing is known of it.
    pub(super) fn of(&self, block: BlockId) -> Option<Places<'_>> {
        let name = self.announced.get()?.get(usize::from(block.0))?;
        let (_, stretches) = self.told.get()?.iter().find(|(known, _)| known == name)?;
        Some(Places { stretches, at: 0 })
    }
}

/// Finds pages' places, fast where they come in order.
pub(super) struct Places<'c> {
    stretches: &'c [Stretch],
    at: usize,
}

impl Places<'_> {
    pub(super) fn find(&mut self, page: PageIndex) -> Option<DiskPlace> {
        let here = self.stretches.get(self.at).and_then(|stretch| stretch.place_of(page));
        if here.is_some() {
            return here;
        }
        let after = self.stretches.partition_point(|stretch| stretch.first <= page.0);
        self.at = after.checked_sub(1)?;
        self.stretches.get(self.at)?.place_of(page)
    }
}

/// The thread that asks. Dropping it ends it.
pub(super) struct Asking {
    stream: Arc<Mutex<Option<UnixStream>>>,
    thread: Option<JoinHandle<()>>,
}

impl Asking {
    /// Asks the helper of this VM where its memory is on `disks`, numbered in this
    /// order; `ram` is what can be read of it.
    pub(super) fn start(
        machine: &Arc<Machine>,
        disks: Vec<GuestDisk>,
        ram: &RamBlocks,
        story: &Arc<Story>,
    ) -> std::io::Result<(Self, Arc<Cached>)> {
        let (cached, stream) = (Arc::<Cached>::default(), Arc::<Mutex<_>>::default());
        let blocks = ram.reached.iter().map(|block| (block.name.clone(), block.bytes)).collect();
        let thread = thread::Builder::new().name("guest-asked".to_owned()).spawn({
            let (machine, story) = (Arc::clone(machine), Arc::clone(story));
            let (cached, stream) = (Arc::clone(&cached), Arc::clone(&stream));
            move || match ask(&machine, &disks, blocks, &stream) {
                Ok((stretches, notes)) => {
                    notes.into_iter().for_each(|note| story.note(note));
                    let _ = cached.told.set(stretches);
                }
                Err(why) => story.note(format!("no page is read from storage: {why}")),
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

fn ask(
    machine: &Machine,
    disks: &[GuestDisk],
    blocks: Vec<(String, u64)>,
    shared: &Mutex<Option<UnixStream>>,
) -> Result<(Stretches, Vec<String>), String> {
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let port = machine.open_guest_port(TURN_MAX).map_err(|error| said(&error))?;
    *shared.lock() = Some(port.stream.try_clone().map_err(|error| said(&error))?);
    let limits = guest_port::limits_of(&machine.qmp).map_err(|error| said(&error))?;
    let budget = Budget::default();
    let map = port.ask(limits, budget, Patience::of(budget)).map_err(|error| said(&error))?;
    let known = blocks.iter().map(|(name, bytes)| (name.as_str(), *bytes));
    let memory = GuestMemory::of(&machine.qmp, known).map_err(|error| said(&error))?;
    let matched = guest_disks::matched(map.devices(), disks);
    let notes = matched.iter().zip(map.devices()).filter_map(|(disk, device)| {
        let why = disk.as_ref().err()?;
        Some(format!("the guest's disk {} is not read: {why}", device.name))
    });
    let notes = notes.collect();
    let numbers: Vec<Option<u16>> =
        matched.iter().map(|disk| u16::try_from(*disk.as_ref().ok()?).ok()).collect();
    Ok((stretches(&map, &numbers, &memory, blocks), notes))
}

/// The map in terms of blocks, and of disks by their numbers.
fn stretches(
    map: &CacheMap,
    numbers: &[Option<u16>],
    memory: &GuestMemory,
    blocks: Vec<(String, u64)>,
) -> Stretches {
    let mut stretches: Stretches = blocks.into_iter().map(|(name, _)| (name, Vec::new())).collect();
    for run in map.runs() {
        let Some(disk) = numbers.get(usize::from(run.device)).copied().flatten() else { continue };
        add(run, disk, memory, &mut stretches);
    }
    for (_, each) in &mut stretches {
        each.sort_unstable_by_key(|stretch| stretch.first);
    }
    stretches
}

/// A run may go over the end of a piece of memory.
fn add(run: &Run, disk: u16, memory: &GuestMemory, stretches: &mut Stretches) {
    let mut done = 0_u64;
    while done < u64::from(run.pages) {
        let left = u64::from(run.pages) - done;
        let found = memory.lookup_run(run.page + done, left);
        let Some((place, pages)) = found.filter(|(_, pages)| *pages > 0) else {
            done += 1;
            continue;
        };
        let first = u32::try_from(place.offset / cachemap::PAGE_BYTES);
        if let (Ok(first), Ok(pages), Some((_, each))) =
            (first, u32::try_from(pages), stretches.get_mut(place.block))
        {
            let sector = run.sector + done * PAGE_SECTORS;
            each.push(Stretch { first, pages, place: DiskPlace { disk, sector } });
        }
        done += pages;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stretch(first: u32, pages: u32, disk: u16, sector: u64) -> Stretch {
        Stretch { first, pages, place: DiskPlace { disk, sector } }
    }

    #[test]
    fn pages_are_found_in_any_order() {
        let stretches = [stretch(10, 4, 0, 800), stretch(14, 1, 1, 63), stretch(20, 2, 0, 8)];
        let mut places = Places { stretches: &stretches, at: 0 };
        for (page, expected) in [
            (10, Some((0, 800))),
            (13, Some((0, 824))),
            (14, Some((1, 63))),
            (15, None),
            (21, Some((0, 16))),
            (11, Some((0, 808))),
            (9, None),
            (22, None),
            (20, Some((0, 8))),
        ] {
            let found = places.find(PageIndex(page));
            let expected = expected.map(|(disk, sector)| DiskPlace { disk, sector });
            assert_eq!(found, expected, "{page}");
        }
    }

    /// A run from below the gap to above it, as q35 has it.
    #[test]
    fn a_run_is_cut_where_memory_is() {
        let text = "FlatView #0\n AS \"memory\", root: system\n \
            0000000000000000-0000000000003fff (prio 0, ram): pc.ram\n \
            0000000100000000-0000000100001fff (prio 0, ram): pc.ram @0000000000004000\n";
        let memory = GuestMemory::read(text, [("pc.ram", 0x6000)]);
        assert_eq!(memory.pages(), 6);
        let mut stretches = vec![("pc.ram".to_owned(), Vec::new())];
        let run = |page, pages| Run { page, sector: 1000, pages, device: 0 };
        add(&run(2, 9), 3, &memory, &mut stretches);
        add(&run(0xf_ffff, 3), 4, &memory, &mut stretches);
        let expected = [stretch(2, 2, 3, 1000), stretch(4, 2, 4, 1008)];
        assert_eq!(stretches[0].1, expected);
    }
}
