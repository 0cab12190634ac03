//! RAM that is handed over: the VM's next QEMU has mapped it as well, so nothing of it is sent.
//!
//! Its pages are compared from when the VM is stopped here until its next QEMU has loaded it. A
//! load that fails may have written to it: what it may write to is put back before the VM goes on
//! here. If it goes on already, because something else has ordered QEMU to run it, nothing is
//! written to its RAM.
//!
//! The VM stands still while pages are read, twice. So by default as many are read as there is time
//! for, spread over all of RAM.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::audit::{Fingerprint, Hash};
use api::{Audit, Audited};
use page::{Buffer, PAGE_BYTES};
use qemu::ram_blocks::RamBlocks;
use ram::{DataRanges, RamError, RamFile};

use super::context::local;
use crate::error::MigrationError;
use crate::host::{HandOver, RamBack, SourceVm};

/// How long the first reading may take. The second one reads the same, so both take a fifth of the
/// 50 ms for which a VM may stand still.
const READING_MAX: Duration = Duration::from_millis(5);
/// What is read at a time.
const PIECE_BYTES: usize = 16 * PAGE_BYTES;
/// The pieces that are read however long that takes: 1 MiB.
const PIECES_MIN: usize = 16;
/// How many pages that differ are named.
const NAMED_MAX: usize = 8;

/// A VM's RAM that its next QEMU has mapped.
pub(crate) struct MappedRam {
    ram: RamBlocks,
    /// The file of each block. None: it can't be opened, and its memory is read.
    files: Vec<Option<RamFile>>,
    hand_over: Arc<dyn HandOver>,
    audit: Audit,
    reading_max: Duration,
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
    /// That of a VM whose RAM is handed over. To be called while it runs.
    pub(crate) fn of(vm: &SourceVm, ram: &RamBlocks, audit: Audit) -> Option<Self> {
        let hand_over = Arc::clone(vm.hand_over.as_ref()?);
        let files = ram.reached.iter().map(|block| block.mapping.file()).collect();
        let (ram, reading_max) = (ram.clone(), READING_MAX);
        Some(Self { ram, files, hand_over, audit, reading_max, before: None })
    }

    /// Notes what it holds, before the next QEMU loads anything; the VM is stopped.
    pub(crate) fn keep(&mut self) -> Result<(), MigrationError> {
        let kept = self.hand_over.keep(&self.ram).map_err(io::Error::other);
        kept.map_err(|error| local("keeping RAM that a load may change", error))?;
        self.before = match self.audit {
            Audit::Off => None,
            Audit::On => Some(self.sample().map_err(unread)?),
            Audit::Deep => Some(self.all().map_err(unread)?),
        };
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
                examples: differing.into_iter().take(NAMED_MAX).collect(),
            },
        }))
    }

    /// Whether only a part of it is compared.
    pub(crate) fn is_sampled(&self) -> bool {
        let read = self.before.as_ref().map(|before| before.len() as u64);
        self.audit == Audit::On && read.is_some_and(|read| read < self.pieces())
    }

    /// Ends the next QEMU, and puts back what its load may have written: the VM may go on here.
    /// If it goes on already, returns what the operator has to know.
    pub(crate) fn take_back(&mut self) -> Result<Option<String>, String> {
        if let RamBack::Ran(why) = self.hand_over.take_back()? {
            return Ok(Some(self.ran(why)));
        }
        let Some(before) = &self.before else { return Ok(None) };
        let differing = self.differing(before).map_err(|error| error.to_string())?;
        let Some(first) = differing.first() else {
            // What the guest writes from now on is no fault.
            self.before = None;
            return Ok(None);
        };
        let pages = differing.len();
        let why = format!(
            "its next QEMU has changed {pages} pages of its RAM while it loaded the VM ({first}): \
             end the VM, and start it again"
        );
        self.hand_over.changed(&why);
        Err(why)
    }

    /// What the operator has to know of RAM that is not put back: the guest changes pages as well.
    fn ran(&mut self, why: String) -> String {
        let Some(before) = self.before.take() else { return why };
        let pages: usize = before.iter().map(|piece| piece.fingerprints.len()).sum();
        match self.differing(&before) {
            Ok(differing) => {
                let named = differing.iter().take(NAMED_MAX).map(|page| format!("; {page}"));
                let (count, named) = (differing.len(), named.collect::<String>());
                format!("{why}. Of {pages} pages that the audit had read, {count} differ{named}")
            }
            Err(error) => format!("{why}. The audit can't read its pages again: {error}"),
        }
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

    /// As many pieces as can be read in time.
    fn sample(&self) -> Result<Vec<Piece>, RamError> {
        let until = Instant::now().checked_add(self.reading_max);
        let (mut sample, mut bytes) = (Vec::new(), Buffer::new(PIECE_BYTES));
        for mut piece in self.spread() {
            let is_late = until.is_some_and(|until| Instant::now() >= until);
            if is_late && sample.len() >= PIECES_MIN {
                break;
            }
            piece.fingerprints = self.read(piece.block, piece.offset, &mut bytes[..piece.bytes])?;
            sample.push(piece);
        }
        Ok(sample)
    }

    fn all(&self) -> Result<Vec<Piece>, RamError> {
        let (mut pieces, mut bytes) = (self.all_pieces()?, Buffer::new(PIECE_BYTES));
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

    /// All pieces, each once. However many are taken, they are spread evenly.
    fn spread(&self) -> impl Iterator<Item = Piece> {
        turns(self.pieces()).filter_map(move |nth| self.piece(nth))
    }

    /// How many pieces it has.
    fn pieces(&self) -> u64 {
        self.ram.reached.iter().map(|block| pieces_in(block.bytes)).sum()
    }

    fn piece(&self, mut nth: u64) -> Option<Piece> {
        for (block, its) in self.ram.reached.iter().enumerate() {
            let pieces = pieces_in(its.bytes);
            if nth < pieces {
                let start = nth * PIECE_BYTES as u64;
                return pieces_of(block, start, its.bytes).next();
            }
            nth -= pieces;
        }
        None
    }

    fn read(
        &self,
        block: usize,
        offset: u64,
        into: &mut [u8],
    ) -> Result<Vec<Fingerprint>, RamError> {
        let hash = Hash::fastest();
        match &self.files[block] {
            Some(file) => file.read(offset, into)?,
            None => self.ram.reached[block].mapping.read(offset, into)?,
        }
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

/// How many pieces a block of this size has.
fn pieces_in(bytes: u64) -> u64 {
    (bytes / PAGE_BYTES as u64 * PAGE_BYTES as u64).div_ceil(PIECE_BYTES as u64)
}

/// The numbers below this one, each once: at every half, then at every quarter, and so on. So
/// however many are taken, no gap is longer than twice the mean.
fn turns(count: u64) -> impl Iterator<Item = u64> {
    let all = count.next_power_of_two();
    let unused = u64::BITS - all.trailing_zeros();
    let reversed = move |turn: u64| turn.reverse_bits().checked_shr(unused).unwrap_or(0);
    (0..all).map(reversed).filter(move |nth| *nth < count)
}

fn unread(error: RamError) -> MigrationError {
    local("comparing RAM that is handed over", io::Error::other(error))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

    use qemu::ram_blocks::Reached;
    use ram::Mapping;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Counts what is requested.
    #[derive(Debug, Default)]
    struct Counted {
        kept: AtomicUsize,
        taken_back: AtomicUsize,
        changed: AtomicUsize,
        /// Whether something else has ordered the former QEMU to run the VM.
        has_run: AtomicBool,
    }

    impl HandOver for Counted {
        fn keep(&self, _: &RamBlocks) -> Result<(), String> {
            self.kept.fetch_add(1, Relaxed);
            Ok(())
        }

        fn take_back(&self) -> Result<RamBack, String> {
            self.taken_back.fetch_add(1, Relaxed);
            Ok(match self.has_run.swap(false, Relaxed) {
                true => RamBack::Ran("it was ordered to".to_owned()),
                false => RamBack::PutBack,
            })
        }

        fn changed(&self, _: &str) {
            self.changed.fetch_add(1, Relaxed);
        }
    }

    /// RAM of which as much is compared by default as can be read in this time.
    fn mapped(
        mib: u64,
        audit: Audit,
        reading_max: Duration,
    ) -> (MappedRam, Arc<Mapping>, Arc<Counted>) {
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
        let ram = MappedRam { ram, files: vec![None], hand_over, audit, reading_max, before: None };
        (ram, mapping, counted)
    }

    #[test]
    fn a_page_that_a_load_has_changed_is_found() {
        for (mib, audit) in [(32, Audit::On), (32, Audit::Deep)] {
            let (mut ram, mapping, counted) = mapped(mib, audit, Duration::MAX);
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

    /// It can't be told from what the load has changed.
    #[test]
    fn what_a_vm_that_ran_has_changed_is_reported_and_keeps_it_from_nothing() {
        for (audit, has_run, expected) in [
            (Audit::Deep, true, "8192 pages that the audit had read, 1 differ; RAM block r, "),
            (Audit::Off, true, "it was ordered to"),
            (Audit::Deep, false, ""),
        ] {
            let (mut ram, mapping, counted) = mapped(32, audit, Duration::MAX);
            mapping.fill(0, 32 * MIB, 7).unwrap();
            ram.keep().unwrap();
            if has_run {
                mapping.write(5 * PAGE_BYTES as u64, &[8]).unwrap();
            }
            counted.has_run.store(has_run, Relaxed);
            let why = ram.take_back().unwrap();
            assert_eq!(why.is_some(), has_run, "{why:?}");
            assert!(why.unwrap_or_default().contains(expected));
            // Again, after QEMU could not be set up as before.
            mapping.write(6 * PAGE_BYTES as u64, &[8]).unwrap();
            assert_eq!(ram.take_back().unwrap(), None);
            assert_eq!(counted.changed.load(Relaxed), 0);
        }
    }

    #[test]
    fn as_much_is_compared_as_can_be_read_in_time_and_without_an_audit_nothing() {
        let all = 256 * MIB / PAGE_BYTES as u64;
        let least = (PIECES_MIN * PIECE_BYTES / PAGE_BYTES) as u64;
        for (reading_max, expected) in [(Duration::ZERO, least), (Duration::MAX, all)] {
            let (mut ram, _, _) = mapped(256, Audit::On, reading_max);
            ram.keep().unwrap();
            let Some(Audited::Same { pages, .. }) = ram.compare().unwrap() else { panic!() };
            assert_eq!(pages, expected);
            assert_eq!(ram.is_sampled(), pages < all);
        }
        let (mut ram, mapping, counted) = mapped(32, Audit::Off, Duration::MAX);
        ram.keep().unwrap();
        assert!(!ram.is_sampled());
        mapping.write(0, &[8]).unwrap();
        assert_eq!(ram.compare().unwrap(), None);
        assert_eq!(ram.take_back().unwrap(), None);
        assert_eq!((counted.kept.load(Relaxed), counted.changed.load(Relaxed)), (1, 0));
    }

    #[test]
    fn pieces_are_each_read_once_and_the_first_ones_are_spread_evenly() {
        for pieces in [0, 1, 2, 3, 999, 1000, 16_384, 131_073, 1_000_003] {
            let mut seen: Vec<u64> = turns(pieces).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..pieces), "{pieces}");
            for count in [16, 400, 1000] {
                let mut first: Vec<u64> = turns(pieces).take(count).collect();
                first.push(pieces);
                first.sort_unstable();
                let widest = first.windows(2).map(|pair| pair[1] - pair[0]).max();
                let mean = pieces.div_ceil(count as u64);
                assert!(widest <= Some(2 * mean), "{count} of {pieces}: {widest:?}");
            }
        }
    }

    #[test]
    fn the_last_piece_of_a_block_ends_with_it() {
        let (mut ram, _, _) = mapped(32, Audit::On, Duration::MAX);
        ram.ram.reached[0].bytes = 3 * PIECE_BYTES as u64 + 2 * PAGE_BYTES as u64 + 9;
        let pieces: Vec<_> = (0..5).map(|nth| ram.piece(nth)).collect();
        let ends = pieces.iter().flatten().map(|piece| piece.offset + piece.bytes as u64);
        assert_eq!(ends.max(), Some(3 * PIECE_BYTES as u64 + 2 * PAGE_BYTES as u64));
        assert_eq!((ram.pieces(), pieces.iter().flatten().count()), (4, 4));
    }
}
