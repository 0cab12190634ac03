//! The source's half of the audit: what QEMU handed over, and the comparison.
//!
//! With the word that all is delivered goes one number for each RAM block. The
//! destination answers that its own are the same, or sends the digests of a
//! block's ranges; then the source asks for the entries of those that differ, and
//! looks which pages those are.

use std::sync::Arc;

use api::{Audit, Audited};
use audit::{HandedOver, Ledger, NotKept};
use page::BlockId;
use wire::{ToDestination, ToSource};

use crate::error::MigrationError;
use crate::source::Source;

/// Ranges whose entries are asked for at a time: 32 KiB each.
const RANGES_AT_ONCE: usize = 16;
/// So many wrong pages are enough to be told of.
const DIFFERENCES_MAX: usize = 1000;
/// Of which so many are described.
const EXAMPLES_MAX: usize = 8;

/// A comparison with a destination that has something else.
#[derive(Debug, Default)]
pub(crate) struct Comparison {
    /// Ranges that differ and were not looked at yet, by block.
    differing: Vec<(u16, u32)>,
    /// Those that the destination was asked for.
    asked: Vec<(u16, u32)>,
    found: usize,
    examples: Vec<String>,
    /// The destination has said that all is as it should be.
    is_over: bool,
}

impl Source<'_> {
    /// What to compare the destination's with: a number for each RAM block, none if
    /// nothing is audited.
    pub(crate) fn audit_totals(&self) -> Vec<u64> {
        let why = match self.handed_over.ledger() {
            Ok(ledger) => return ledger.totals(),
            Err(NotKept::NotWanted) => "it was turned off (--audit off)",
            Err(NotKept::NoMemory) => "this host has no memory for it: 8 bytes for each page",
            Err(NotKept::NoBlocks) => "QEMU's stream was passed through whole",
        };
        self.report_builder.tell(|report| report.audit = Audited::Nothing { why: why.to_owned() });
        Vec::new()
    }

    /// Whether the destination may say that it has loaded the VM.
    pub(crate) fn is_audited(&self, totals: &[u64]) -> bool {
        totals.is_empty() || self.comparison.is_over
    }

    /// What the destination says in an audit. None if it is something else.
    pub(crate) fn audit(&mut self, heard: &ToSource) -> Option<Result<(), MigrationError>> {
        Some(match heard {
            ToSource::Audited { reread_pages } => {
                self.comparison.is_over = true;
                let pages = self.handed_over.ledger().map_or(0, Ledger::pages);
                let reread_pages = *reread_pages;
                let same = Audited::Same { pages, reread_pages };
                self.report_builder.tell(|report| report.audit = same);
                Ok(())
            }
            ToSource::AuditDigests { block, first, digests, more } => {
                self.compare_digests(*block, *first, digests);
                if *more { Ok(()) } else { self.ask_for_entries() }
            }
            ToSource::AuditEntries { block, range, entries } => {
                self.compare_entries(*block, *range, entries)
            }
            ToSource::AuditReread { pages, examples } => {
                let described = examples.iter().take(EXAMPLES_MAX).map(|(block, page)| {
                    format!("RAM block {block}, page {page}: not in RAM as it was placed")
                });
                Err(self.audit_failed(*pages, described.collect()))
            }
            _ => return None,
        })
    }

    fn compare_digests(&mut self, block: u16, first: u32, theirs: &[u64]) {
        let Some(ours) = self.handed_over.block(BlockId(block)) else {
            return;
        };
        let ours = ours.digests().skip(first as usize);
        let differs = |(_, (ours, theirs)): &(u32, (u64, &u64))| ours != *theirs;
        let ranges = (first..).zip(ours.zip(theirs)).filter(differs);
        self.comparison.differing.extend(ranges.map(|(range, _)| (block, range)));
    }

    fn ask_for_entries(&mut self) -> Result<(), MigrationError> {
        let Comparison { differing, asked, found, examples, .. } = &mut self.comparison;
        if *found > 0 && (differing.is_empty() || *found >= DIFFERENCES_MAX) {
            let (pages, examples) = (*found as u64, std::mem::take(examples));
            return Err(self.audit_failed(pages, examples));
        }
        let left = differing.len().saturating_sub(RANGES_AT_ONCE);
        *asked = differing.split_off(left);
        let ranges = asked.clone();
        // Only pages differ that QEMU never handed over: they may be anything.
        let said = if ranges.is_empty() {
            ToDestination::AuditAccepted
        } else {
            ToDestination::AuditRanges { ranges }
        };
        self.send(&said)
    }

    fn compare_entries(
        &mut self,
        block: u16,
        range: u32,
        theirs: &[u64],
    ) -> Result<(), MigrationError> {
        let Comparison { asked, found, examples, .. } = &mut self.comparison;
        let place = asked.iter().position(|asked| *asked == (block, range));
        let ours = self.handed_over.block(BlockId(block));
        let differences = ours.and_then(|ours| ours.differences(range, theirs));
        let (Some(place), Some(differences)) = (place, differences) else {
            return Err(MigrationError::PeerLost {
                host: self.peer.name.clone(),
                why: "it sent entries for the audit that it was not asked for".to_owned(),
            });
        };
        asked.swap_remove(place);
        let is_over = asked.is_empty();
        *found += differences.len();
        let wanted = EXAMPLES_MAX.saturating_sub(examples.len());
        let described = differences.iter().take(wanted);
        examples.extend(described.map(|one| format!("RAM block {block}, {one}")));
        if is_over { self.ask_for_entries() } else { Ok(()) }
    }

    fn audit_failed(&self, pages: u64, examples: Vec<String>) -> MigrationError {
        for example in &examples {
            tracing::error!(vm = self.vm.name, "the audit found a difference: {example}");
        }
        let first = examples.first().cloned().unwrap_or_default();
        self.report_builder.tell(|report| report.audit = Audited::Differences { pages, examples });
        MigrationError::Audit { host: self.peer.name.clone(), pages, first }
    }
}

/// What the destination is told of the audit in its order.
pub(crate) fn ordered(audit: Audit) -> wire::AuditOrder {
    match audit {
        Audit::Off => wire::AuditOrder::Off,
        Audit::On => wire::AuditOrder::On,
        Audit::Deep => wire::AuditOrder::Deep,
    }
}

/// Where the data path's threads note what QEMU hands over.
pub(crate) fn handed_over(audit: Audit) -> Arc<HandedOver> {
    Arc::new(HandedOver::new(audit != Audit::Off))
}
