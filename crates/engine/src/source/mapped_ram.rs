//! RAM that is handed over: the VM's next QEMU has mapped it as well, so nothing of it is sent.
//!
//! Its pages are compared from when the VM is stopped here until its next QEMU has loaded it. A
//! load that fails may have written to it: what it may write to is put back before the VM goes on
//! here.

use std::io;
use std::sync::Arc;

use ::audit::{Fingerprint, Hash};
use api::{Audit, Audited};
use page::{Buffer, PAGE_BYTES};
use qemu::ram_blocks::RamBlocks;
use ram::{DataRanges, RamError};

use super::context::local;
use crate::error::MigrationError;
use crate::host::{HandOver, SourceVm};

/// What is compared by default: the VM stands still while that is read, twice.
const BYTES_MAX: u64 = 64 << 20;
/// What is read at a time.
const PIECE_BYTES: usize = 16 * PAGE_BYTES;

/// A VM's RAM that its next QEMU has mapped.
pub(crate) struct MappedRam {
    ram: RamBlocks,
    hand_over: Arc<dyn HandOver>,
    audit: Audit,
    /// None before the VM is stopped, and without an audit.
    before: Option<Vec<Piece>>,
}

/// Consecutive pages of a block.
struct Piece {
    block: usize,
    offset: u64,
    bytes: usize,
    fingerprints: Vec<Fingerprint>,
}

impl MappedRam {
    /// That of a VM whose RAM is handed over.
    pub(crate) fn of(vm: &SourceVm, ram: &RamBlocks, audit: Audit) -> Option<Self> {
        let hand_over = Arc::clone(vm.hand_over.as_ref()?);
        Some(Self { ram: ram.clone(), hand_over, audit, before: None })
    }

    /// Notes what it holds, before the next QEMU loads anything; the VM is stopped.
    pub(crate) fn keep(&mut self) -> Result<(), MigrationError> {
        let kept = self.hand_over.keep().map_err(io::Error::other);
        kept.map_err(|error| local("keeping RAM that a load may change", error))?;
        if self.audit != Audit::Off {
            self.before = Some(self.fingerprints().map_err(unread)?);
        }
        Ok(())
    }

    /// Compares it with what it held; none if it is not audited.
    pub(crate) fn compare(&self) -> Result<Option<Audited>, MigrationError> {
        let Some(before) = &self.before else { return Ok(None) };
        let differing = self.differing(before).map_err(unread)?;
        let pages = before.iter().map(|piece| piece.fingerprints.len() as u64).sum();
        Ok(Some(match differing.is_empty() {
            true => Audited::Same { pages, reread_pages: pages, unproved_pages: 0 },
            false => Audited::Differences {
                pages: differing.len() as u64,
                examples: differing.into_iter().take(8).collect(),
            },
        }))
    }

    /// Whether only a part of it is compared.
    pub(crate) fn is_sampled(&self) -> bool {
        self.audit == Audit::On && self.bytes() > BYTES_MAX
    }

    fn bytes(&self) -> u64 {
        self.ram.reached.iter().map(|block| block.bytes).sum()
    }

    /// Ends the next QEMU, and puts back what its load may have written: the VM may go on here.
    pub(crate) fn take_back(&self) -> Result<(), String> {
        self.hand_over.take_back()?;
        let Some(before) = &self.before else { return Ok(()) };
        let differing = self.differing(before).map_err(|error| error.to_string())?;
        let Some(first) = differing.first() else { return Ok(()) };
        let pages = differing.len();
        let why = format!(
            "its next QEMU has changed {pages} pages of its RAM while it loaded the VM ({first}): \
             end the VM, and start it again"
        );
        self.hand_over.changed(&why);
        Err(why)
    }

    /// The pages that don't hold what they held.
    fn differing(&self, before: &[Piece]) -> Result<Vec<String>, RamError> {
        let (mut differing, mut bytes) = (Vec::new(), Buffer::new(PIECE_BYTES));
        for piece in before {
            let now = self.read(piece.block, piece.offset, &mut bytes[..piece.bytes])?;
            let pairs = piece.fingerprints.iter().zip(&now).enumerate();
            let changed = pairs.filter(|(_, (before, now))| before != now);
            let name = &self.ram.reached[piece.block].name;
            differing.extend(changed.map(|(nth, _)| {
                let page = piece.offset / PAGE_BYTES as u64 + nth as u64;
                format!("RAM block {name}, page {page}: it was changed")
            }));
        }
        Ok(differing)
    }

    fn fingerprints(&self) -> Result<Vec<Piece>, RamError> {
        let mut pieces = match self.audit {
            Audit::Deep => self.all_pieces()?,
            Audit::On | Audit::Off => self.some_pieces(),
        };
        let mut bytes = Buffer::new(PIECE_BYTES);
        for piece in &mut pieces {
            piece.fingerprints = self.read(piece.block, piece.offset, &mut bytes[..piece.bytes])?;
        }
        Ok(pieces)
    }

    /// The pieces that may hold data. Holes stay holes.
    fn all_pieces(&self) -> Result<Vec<Piece>, RamError> {
        let mut pieces = Vec::new();
        for (nth, block) in self.ram.reached.iter().enumerate() {
            let ranges = match block.mapping.data_ranges()? {
                DataRanges::Known(ranges) => ranges,
                DataRanges::Unknown => std::iter::once(0..block.bytes).collect(),
            };
            for range in ranges {
                pieces.extend(pieces_of(nth, range.start, range.end.min(block.bytes)));
            }
        }
        Ok(pieces)
    }

    /// All pieces of RAM that is small, else some of them, evenly spread.
    fn some_pieces(&self) -> Vec<Piece> {
        let stride = self.bytes().div_ceil(BYTES_MAX).max(1);
        let stride = usize::try_from(stride).unwrap_or(usize::MAX);
        let blocks = self.ram.reached.iter().enumerate();
        blocks.flat_map(|(nth, block)| pieces_of(nth, 0, block.bytes).step_by(stride)).collect()
    }

    fn read(
        &self,
        block: usize,
        offset: u64,
        into: &mut [u8],
    ) -> Result<Vec<Fingerprint>, RamError> {
        let hash = Hash::fastest();
        self.ram.reached[block].mapping.read(offset, into)?;
        Ok(into.chunks(PAGE_BYTES).map(|page| hash.of(page)).collect())
    }
}

/// The pieces of a range of a block, from and to whole pages.
fn pieces_of(block: usize, start: u64, end: u64) -> impl Iterator<Item = Piece> {
    const PAGE: u64 = PAGE_BYTES as u64;
    let (start, end) = (start / PAGE * PAGE, end / PAGE * PAGE);
    (start..end).step_by(PIECE_BYTES).map(move |offset| {
        let left = usize::try_from(end - offset).unwrap_or(usize::MAX);
        Piece { block, offset, bytes: left.min(PIECE_BYTES), fingerprints: Vec::new() }
    })
}

fn unread(error: RamError) -> MigrationError {
    local("comparing RAM that is handed over", io::Error::other(error))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use qemu::ram_blocks::Reached;
    use ram::Mapping;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Counts what it is asked for.
    #[derive(Debug, Default)]
    struct Counted {
        kept: AtomicUsize,
        taken_back: AtomicUsize,
        changed: AtomicUsize,
    }

    impl HandOver for Counted {
        fn keep(&self) -> Result<(), String> {
            self.kept.fetch_add(1, Relaxed);
            Ok(())
        }

        fn take_back(&self) -> Result<(), String> {
            self.taken_back.fetch_add(1, Relaxed);
            Ok(())
        }

        fn changed(&self, _: &str) {
            self.changed.fetch_add(1, Relaxed);
        }
    }

    fn mapped(mib: u64, audit: Audit) -> (MappedRam, Arc<Mapping>, Arc<Counted>) {
        let mapping = Arc::new(Mapping::own(mib * MIB));
        let reached = Reached {
            name: "r".to_owned(),
            bytes: mib * MIB,
            mapping: Arc::clone(&mapping),
            may_be_unplugged: false,
        };
        let ram = RamBlocks { reached: vec![reached], notes: Vec::new() };
        let counted = Arc::<Counted>::default();
        let hand_over = Arc::clone(&counted) as Arc<dyn HandOver>;
        (MappedRam { ram, hand_over, audit, before: None }, mapping, counted)
    }

    #[test]
    fn a_page_that_a_load_has_changed_is_found() {
        for (mib, audit) in [(32, Audit::On), (32, Audit::Deep)] {
            let (mut ram, mapping, counted) = mapped(mib, audit);
            mapping.fill(MIB, MIB, 7).unwrap();
            ram.keep().unwrap();
            assert_eq!(counted.kept.load(Relaxed), 1);
            assert!(matches!(ram.compare().unwrap(), Some(Audited::Same { pages: 256.., .. })));
            mapping.write(MIB + 5 * PAGE_BYTES as u64 + 9, &[8]).unwrap();
            let found = ram.compare().unwrap().unwrap();
            let Audited::Differences { pages: 1, examples } = found else { panic!("{found:?}") };
            assert_eq!(examples, ["RAM block r, page 261: it was changed"]);
            let why = ram.take_back().unwrap_err();
            assert!(why.contains("changed 1 pages of its RAM"), "{why}");
            assert_eq!(counted.taken_back.load(Relaxed), 1);
            assert_eq!(counted.changed.load(Relaxed), 1);
        }
    }

    #[test]
    fn of_large_ram_a_part_is_compared_and_without_an_audit_nothing() {
        let (mut ram, _, _) = mapped(256, Audit::On);
        ram.keep().unwrap();
        let Some(Audited::Same { pages, .. }) = ram.compare().unwrap() else { panic!("no audit") };
        assert_eq!(pages, BYTES_MAX / PAGE_BYTES as u64);
        assert!(ram.is_sampled() && !mapped(256, Audit::Deep).0.is_sampled());
        let (mut ram, mapping, counted) = mapped(32, Audit::Off);
        ram.keep().unwrap();
        mapping.write(0, &[8]).unwrap();
        assert_eq!(ram.compare().unwrap(), None);
        ram.take_back().unwrap();
        assert_eq!((counted.kept.load(Relaxed), counted.changed.load(Relaxed)), (1, 0));
    }
}
