//! Measures, by a sample of pages, what is sent of them: how far they can be compressed, and how
//! much of a page changes when the guest writes it again.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use page::{BATCH_PAGES, DeltaWriter, Encoder, Encoding, Epoch, PAGE_BYTES, PART_BYTES, is_zero};
use qemu::machine::Machine;
use qemu::ram_blocks::RamBlocks;
use ram::Mapping;
use transport::Deltas;

/// The number of sampled pages: 32 MiB.
const PAGES: u64 = 8192;
/// With fewer changed pages, the sample says nothing about the others.
const CHANGED_LEAST: usize = 16;

/// The most pages that are compressed: 8 MiB.
const COMPRESSED_PAGES: usize = 2048;

/// Sampled pages that the guest has written.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Changed {
    /// The average share of a page that would be sent again.
    pub(super) share: f64,
    /// What they have now.
    pub(super) content: Vec<u8>,
}

/// What compression makes of content.
#[derive(Clone, Copy, Debug)]
pub(super) struct Encoded {
    /// The share of its size that is left.
    pub(super) share: f64,
    /// Bytes of content that one CPU compresses per second.
    pub(super) bytes_per_s: f64,
}

impl Encoded {
    /// Compresses pages as lanes do; none without any.
    pub(super) fn of(content: &[u8], encoding: Encoding) -> Option<Self> {
        let (mut encoder, began, mut left) = (Encoder::new(), Instant::now(), 0);
        for batch in content.chunks(BATCH_PAGES * PAGE_BYTES) {
            let encoded = encoder.encode_bodies(encoding, batch);
            let is_raw = encoded.encoding == Encoding::Raw;
            left += if is_raw { batch.len() } else { encoded.bytes.len() };
        }
        let (bytes, took) = (content.len() as f64, began.elapsed().max(Duration::from_nanos(1)));
        let share = left as f64 / bytes;
        (bytes > 0.0).then(|| Self { share, bytes_per_s: bytes / took.as_secs_f64() })
    }
}

/// A sample of a VM's pages with their former content.
pub(super) struct Seen {
    places: Vec<(Arc<Mapping>, u64)>,
    contents: Vec<u8>,
    /// Pages that were tried, of which some are not in memory.
    tried: usize,
    /// The size of all blocks.
    bytes: u64,
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
        let bytes: u64 = blocks.iter().map(|block| block.bytes()).sum();
        let mut seen = Self { places: Vec::new(), contents: Vec::new(), tried: 0, bytes };
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
                seen.tried += 1;
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

    /// Bytes of RAM that are in memory, by the sample; none if it has no page.
    pub(super) fn present_bytes(&self) -> Option<u64> {
        self.bytes_like(self.places.len())
    }

    /// Those of pages that are not all zeros: of others next to nothing is sent.
    pub(super) fn filled_bytes(&self) -> Option<u64> {
        self.bytes_like(self.contents.chunks(PAGE_BYTES).filter(|page| !is_zero(page)).count())
    }

    /// Bytes of RAM of which so many pages were found.
    fn bytes_like(&self, pages: usize) -> Option<u64> {
        let share = pages as f64 / self.tried as f64;
        (!self.places.is_empty()).then(|| part(self.bytes, share))
    }

    /// The content of pages that are not all zeros.
    pub(super) fn content(&self) -> Vec<u8> {
        let filled = self.contents.chunks(PAGE_BYTES).filter(|page| !is_zero(page));
        let every = self.places.len().div_ceil(COMPRESSED_PAGES).max(1);
        filled.step_by(every).flatten().copied().collect()
    }

    /// The pages that have changed. None if there are too few.
    pub(super) fn changed(&self) -> Option<Changed> {
        let (mut now, mut deltas, mut sent_bytes) = ([0; PAGE_BYTES], DeltaWriter::default(), 0);
        let (mut pages, mut content) = (0, Vec::new());
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
            if pages < COMPRESSED_PAGES {
                content.extend_from_slice(&now);
            }
            pages += 1;
        }
        let share = sent_bytes as f64 / (pages * PAGE_BYTES) as f64;
        let share = if share > Deltas::WORTH { 1.0 } else { share };
        (pages >= CHANGED_LEAST).then_some(Changed { share, content })
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
        let share = seen.changed().unwrap().share;
        assert!((share - 136.0 / 4096.0).abs() < 1e-9, "{share}");
        write(&low, 100, 4096);
        let Changed { share, content } = seen.changed().unwrap();
        assert_eq!(content.len(), 200 * PAGE_BYTES);
        assert!((share - (136.0 + 4104.0) / 8192.0).abs() < 1e-9, "{share}");
        write(&high, 100, 4096);
        assert_eq!(seen.changed().unwrap().share, 1.0, "that is not less than the pages");
    }

    #[test]
    fn content_that_shrinks_and_pages_of_zeros_are_told_from_others() {
        let ram = ram();
        let of = |ram: &Arc<Mapping>| Seen::of(std::iter::once(Arc::clone(ram)));
        let encoded = |seen: &Seen| {
            let content = seen.content();
            [Encoding::Lz4, Encoding::Zstd].map(|encoding| Encoded::of(&content, encoding))
        };
        let repeated = encoded(&of(&ram)).map(Option::unwrap);
        assert!(
            repeated.iter().all(|one| one.share < 0.1 && one.bytes_per_s > 0.0),
            "{repeated:?}"
        );
        assert_eq!(of(&ram).filled_bytes(), Some(BYTES));
        let mut random = vec![0; usize::try_from(BYTES).unwrap()];
        let state = RandomState::new();
        for (nth, bytes) in random.chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&state.hash_one(nth).to_ne_bytes());
        }
        ram.write(0, &random).unwrap();
        let random = encoded(&of(&ram)).map(Option::unwrap);
        assert!(random.iter().all(|one| one.share > 0.99), "{random:?}");
        ram.fill(0, BYTES / 4, 0).unwrap();
        assert_eq!(of(&ram).filled_bytes(), Some(BYTES / 4 * 3));
        ram.fill(0, BYTES, 0).unwrap();
        assert_eq!(of(&ram).filled_bytes(), Some(0));
        assert!(encoded(&of(&ram)).iter().all(Option::is_none));
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
        let present = seen.present_bytes().unwrap();
        assert!((BYTES..=2 * BYTES).contains(&present), "{present}");
        let none = Seen::of(std::iter::once(Arc::new(Mapping::own(BYTES))));
        assert_eq!((none.present_bytes(), none.filled_bytes()), (None, None));
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
