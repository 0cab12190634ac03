//! The destination's part of the audit: shows the source what was placed.

use std::sync::Arc;

use audit::{BlockLedger, Hash, Ledger};
use page::{BATCH_PAGES, BlockId, Buffer, PAGE_BYTES, PageIndex};
use placer::Placer;
use ram::{DataRanges, Mapping, RamError};
use wire::{AuditOrder, ToDestination, ToSource};

use super::connect::Connected;
use super::end::{End, ended};
use crate::link::Received;

/// Digests in one message.
const DIGESTS_AT_ONCE: usize = 1 << 14;
/// All wrong pages are counted, but only this many are named.
const EXAMPLES_MAX: usize = 8;

/// How a migration is audited.
#[derive(Clone, Copy)]
pub(super) struct Auditing {
    order: AuditOrder,
    hash: Hash,
}

impl Auditing {
    /// As ordered, with one of the hashes that the source offers.
    pub(super) fn new(order: AuditOrder, offered: &[String]) -> Self {
        Self { order, hash: Hash::choose(offered) }
    }

    /// The chosen hash.
    pub(super) fn hash(self) -> Hash {
        self.hash
    }

    /// Adds a ledger of what is placed, if the migration is audited.
    pub(super) fn of_placer(self, placer: Placer) -> Result<Placer, End> {
        match self.order {
            AuditOrder::Off => Ok(placer),
            AuditOrder::On | AuditOrder::Deep => placer.audited(self.hash).map_err(End::failed),
        }
    }

    /// The chosen hash for the source, if it is not the default.
    pub(super) fn chosen(self) -> Option<String> {
        (self.hash != Hash::default()).then(|| self.hash.name().to_owned())
    }
}

impl Connected<'_> {
    /// Compares what was placed with what QEMU handed over, whose `totals` are one for each RAM
    /// block. Returns once the source accepts the result.
    pub(super) fn audit(
        &self,
        ledger: &Ledger,
        mappings: &[Option<Arc<Mapping>>],
        totals: &[u64],
        auditing: Auditing,
    ) -> Result<(), End> {
        if totals.is_empty() {
            return Ok(());
        }
        let ours = ledger.totals();
        if ours.len() != totals.len() {
            return Err(End::failed(format!(
                "{} blocks of RAM were announced, {} were to be audited",
                ours.len(),
                totals.len()
            )));
        }
        let differ = ledger.blocks().zip(ours.iter().zip(totals));
        let differing: Vec<BlockId> = differ
            .filter(|(_, (ours, theirs))| ours != theirs)
            .map(|((block, _), _)| block)
            .collect();
        if !differing.is_empty() {
            self.show(ledger, &differing)?;
        }
        let reread_pages = match auditing.order {
            AuditOrder::Deep => self.read_back(ledger, mappings)?,
            AuditOrder::On | AuditOrder::Off => 0,
        };
        self.send(&ToSource::Audited { reread_pages })
    }

    /// Shows what was placed in these blocks, until the source has seen enough.
    fn show(&self, ledger: &Ledger, differing: &[BlockId]) -> Result<(), End> {
        for (nth, number) in differing.iter().enumerate() {
            let Some(block) = ledger.block(*number) else { continue };
            let digests: Vec<u64> = block.digests().collect();
            let mut first = 0;
            for piece in digests.chunks(DIGESTS_AT_ONCE) {
                let next = first + u32::try_from(piece.len()).unwrap_or(u32::MAX);
                let more = nth + 1 < differing.len() || (next as usize) < digests.len();
                let (block, digests) = (number.0, piece.to_vec());
                self.send(&ToSource::AuditDigests { block, first, digests, more })?;
                first = next;
            }
        }
        loop {
            match self.next()? {
                Received::Message(ToDestination::AuditRanges { ranges }) => {
                    for (block, range) in ranges {
                        let known = ledger.block(BlockId(block));
                        let entries = known.and_then(|block| block.entries(range));
                        let entries = entries.ok_or_else(|| {
                            End::failed("the source requested pages that do not exist")
                        })?;
                        self.send(&ToSource::AuditEntries { block, range, entries })?;
                    }
                }
                Received::Message(ToDestination::AuditAccepted) => return Ok(()),
                Received::Message(
                    ToDestination::Spare { .. } | ToDestination::FlushDisk { .. },
                ) => {}
                other => return Err(ended(other)),
            }
        }
    }

    /// Reads RAM back; returns the number of pages read.
    fn read_back(&self, ledger: &Ledger, mappings: &[Option<Arc<Mapping>>]) -> Result<u64, End> {
        let (mut read, mut wrong, mut examples) = (0, 0_u64, Vec::new());
        for ((number, block), mapping) in ledger.blocks().zip(mappings) {
            let Some(mapping) = mapping else { continue };
            let found = RereadBlock::new(block, mapping).and_then(|mut block| {
                let wrong = block.wrong()?;
                Ok((block.read, wrong))
            });
            let (pages, found) = found.map_err(End::failed)?;
            read += pages;
            wrong += found.len() as u64;
            examples.extend(found.iter().map(|page| (number.0, page.0)));
            examples.truncate(EXAMPLES_MAX);
        }
        if wrong == 0 {
            return Ok(read);
        }
        self.send(&ToSource::AuditReread { pages: wrong, examples })?;
        // The source lets the VM go on.
        Err(ended(self.next()?))
    }
}

/// A block whose RAM is read back. Holes stay holes: if the kernel reports no memory, and only
/// zeros were placed, nothing is read.
struct RereadBlock<'b> {
    block: &'b BlockLedger,
    mapping: &'b Mapping,
    data: DataRanges,
    bytes: Buffer,
    read: u64,
}

impl<'b> RereadBlock<'b> {
    fn new(block: &'b BlockLedger, mapping: &'b Mapping) -> Result<Self, RamError> {
        let data = mapping.data_ranges()?;
        let bytes = Buffer::new(BATCH_PAGES * PAGE_BYTES);
        Ok(Self { block, mapping, data, bytes, read: 0 })
    }

    /// The pages that don't hold what was placed last.
    fn wrong(&mut self) -> Result<Vec<PageIndex>, RamError> {
        let pages = self.mapping.bytes() / PAGE_BYTES as u64;
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        let (mut wrong, mut begun) = (Vec::new(), 0);
        for page in 0..=pages {
            let wanted = page < pages && self.is_wanted(PageIndex(page));
            if page > begun && (!wanted || (page - begun) as usize == BATCH_PAGES) {
                wrong.extend(self.read(begun..page)?);
                begun = page;
            }
            if !wanted {
                begun = page.saturating_add(1);
            }
        }
        Ok(wrong)
    }

    fn is_wanted(&self, page: PageIndex) -> bool {
        let holds = || match &self.data {
            DataRanges::Unknown => true,
            DataRanges::Known(ranges) => {
                let after = ranges.partition_point(|range| range.end <= page.offset());
                let end = page.offset() + PAGE_BYTES as u64;
                ranges.get(after).is_some_and(|range| range.start < end)
            }
        };
        self.block.holds_data(page) || holds()
    }

    fn read(&mut self, pages: std::ops::Range<u32>) -> Result<Vec<PageIndex>, RamError> {
        let first = PageIndex(pages.start);
        let bytes = &mut self.bytes[..pages.len() * PAGE_BYTES];
        self.mapping.read(first.offset(), bytes)?;
        self.read += pages.len() as u64;
        Ok(self.block.not_as_placed(first, bytes))
    }
}

#[cfg(test)]
mod tests {
    use audit::Delivery;
    use page::Epoch;

    use super::*;

    #[test]
    fn reading_back_finds_wrong_pages_and_keeps_holes() {
        const PAGES: u64 = 4096;
        let mapping = Mapping::own(PAGES * PAGE_BYTES as u64);
        let ledger = Ledger::new(Hash::fastest(), [PAGES]).unwrap();
        let block = ledger.block(BlockId(0)).unwrap();
        let place = |page: u32, byte: u8| {
            block.write().placed(
                PageIndex(page),
                block.hash().of_fill(byte),
                Epoch(1),
                Delivery::Fill,
            );
        };
        (0..4096).for_each(|page| place(page, 0));
        let written = [0, 1, 129, 130, 131, 900, 4095];
        for page in written {
            mapping.fill(PageIndex(page).offset(), PAGE_BYTES as u64, 7).unwrap();
            place(page, 7);
        }
        let look = || {
            let mut reread = RereadBlock::new(block, &mapping).unwrap();
            let wrong: Vec<u32> = reread.wrong().unwrap().iter().map(|page| page.0).collect();
            (reread.read, wrong)
        };
        let (read, wrong) = look();
        assert_eq!(wrong, [0_u32; 0]);
        assert!((7..4096).contains(&read), "{read} pages were read");
        mapping.fill(PageIndex(130).offset() + 77, 1, 8).unwrap();
        // Placed, but not in RAM.
        place(2000, 9);
        // In RAM, but not placed.
        mapping.fill(PageIndex(3000).offset(), 1, 1).unwrap();
        assert_eq!(look().1, [130, 2000, 3000]);
    }
}
