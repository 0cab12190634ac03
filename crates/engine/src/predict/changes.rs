//! Measures how much of a page changes when the guest writes it again, which is what is sent again.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use page::{DeltaWriter, Epoch, PAGE_BYTES, PART_BYTES};
use qemu::machine::Machine;
use qemu::ram_blocks::RamBlocks;
use ram::Mapping;
use transport::Deltas;

/// The number of sampled pages: 32 MiB.
const PAGES: u64 = 8192;
/// With fewer changed pages, the sample says nothing about the others.
const CHANGED_LEAST: usize = 16;

/// A sample of a VM's pages with their former content.
pub(super) struct Seen {
    places: Vec<(Arc<Mapping>, u64)>,
    contents: Vec<u8>,
}

impl Seen {
    /// Samples a VM that this agent can read; a hole stays a hole.
    pub(super) fn now(machine: &Machine) -> Self {
        let blocks = RamBlocks::of(machine).reached;
        Self::of(blocks.into_iter().map(|block| block.mapping))
    }

    fn of(blocks: impl Iterator<Item = Arc<Mapping>>) -> Self {
        let blocks: Vec<_> = blocks.collect();
        let pages_of = |block: &Arc<Mapping>| block.bytes() / PAGE_BYTES as u64;
        let pages: u64 = blocks.iter().map(pages_of).sum();
        let (random, stride) = (RandomState::new(), pages.div_ceil(PAGES).max(1));
        let mut seen = Self { places: Vec::new(), contents: Vec::new() };
        let mut page = [0; PAGE_BYTES];
        let mut first = 0;
        for block in blocks {
            let end = first + pages_of(&block);
            // A random page of each stride, because guests have patterns too.
            let one = |stride_first: u64| stride_first + random.hash_one(stride_first) % stride;
            let begin = first.next_multiple_of(stride).saturating_sub(stride);
            let strides = (begin..end).step_by(usize::try_from(stride).unwrap_or(usize::MAX));
            for at in strides.map(one).filter(|at| (first..end).contains(at)) {
                let offset = (at - first) * PAGE_BYTES as u64;
                let mut present = [false];
                let is_present = block.present(offset, &mut present).is_ok() && present[0];
                if is_present && block.read(offset, &mut page).is_ok() {
                    seen.places.push((Arc::clone(&block), offset));
                    seen.contents.extend_from_slice(&page);
                }
            }
            first = end;
        }
        seen
    }

    /// The average share of a changed page that would be sent again. None if too few pages have
    /// changed.
    pub(super) fn changed(&self) -> Option<f64> {
        let (mut now, mut deltas, mut sent_bytes) = ([0; PAGE_BYTES], DeltaWriter::default(), 0);
        let mut pages = 0;
        for ((block, offset), before) in self.places.iter().zip(self.contents.chunks(PAGE_BYTES)) {
            if block.read(*offset, &mut now).is_err() || now == *before {
                continue;
            }
            let parts = before.chunks(PART_BYTES).zip(now.chunks(PART_BYTES)).enumerate();
            let changed =
                parts.fold(0, |bits, (nth, (was, is))| bits | u32::from(was != is) << nth);
            deltas.begin(1);
            deltas.push(&now, Some((Epoch(0), changed)));
            sent_bytes += deltas.bytes().len();
            pages += 1;
        }
        let share = sent_bytes as f64 / (pages * PAGE_BYTES) as f64;
        (pages >= CHANGED_LEAST).then_some(if share > Deltas::WORTH { 1.0 } else { share })
    }
}

/// The share of rewritten pages' bytes that is sent again: only the changes, as far as the source
/// can keep the copies that deltas need.
pub(super) fn sent_share(changed: f64, ram_bytes: u64, written_bytes: u64) -> f64 {
    let known = Deltas::pages_max(ram_bytes) as f64 * PAGE_BYTES as f64;
    let covered = (known / (written_bytes as f64).max(1.0)).min(1.0);
    covered * changed + (1.0 - covered)
}

/// This share of `bytes`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "no more than there were, and not less than none"
)]
pub(super) fn part(bytes: u64, share: f64) -> u64 {
    (bytes as f64 * share) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 8 << 20;

    /// RAM that is fully allocated.
    fn ram() -> Arc<Mapping> {
        let ram = Mapping::own(BYTES);
        ram.fill(0, BYTES, 7).unwrap();
        Arc::new(ram)
    }

    fn write(ram: &Mapping, pages: u64, bytes: usize) {
        for page in 0..pages {
            ram.write(page * PAGE_BYTES as u64, &vec![9; bytes]).unwrap();
        }
    }

    #[test]
    fn only_changed_parts_of_a_page_are_counted() {
        let (low, high) = (ram(), ram());
        let seen = Seen::of([&low, &high].into_iter().map(Arc::clone));
        assert_eq!(seen.places.len() as u64, 2 * BYTES / PAGE_BYTES as u64);
        assert_eq!(seen.changed(), None);
        write(&high, 15, 64);
        assert_eq!(seen.changed(), None, "too few");
        write(&high, 100, 64);
        let share = seen.changed().unwrap();
        assert!((share - 136.0 / 4096.0).abs() < 1e-9, "{share}");
        write(&low, 100, 4096);
        let share = seen.changed().unwrap();
        assert!((share - (136.0 + 4104.0) / 8192.0).abs() < 1e-9, "{share}");
        write(&high, 100, 4096);
        assert_eq!(seen.changed(), Some(1.0), "that is not less than the pages");
    }

    #[test]
    fn untouched_memory_is_not_read() {
        let ram = Arc::new(Mapping::own(64 << 20));
        ram.fill(0, BYTES, 7).unwrap();
        let seen = Seen::of(std::iter::once(Arc::clone(&ram)));
        let touched = BYTES / PAGE_BYTES as u64 / 2;
        let places = seen.places.len() as u64;
        // Huge pages may have allocated more.
        assert!((touched..=2 * touched).contains(&places), "{places}");
    }

    #[test]
    fn pages_without_a_kept_copy_are_sent_whole() {
        let gib = 1 << 30;
        assert!((sent_share(0.1, gib, 128 << 20) - 0.1).abs() < 1e-9);
        let all = sent_share(0.1, 64 * gib, 64 * gib);
        assert!((0.7..0.9).contains(&all), "{all}");
        assert!((sent_share(1.0, gib, gib) - 1.0).abs() < 1e-9);
    }
}
