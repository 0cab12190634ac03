//! The source's half of the audit: the record of QEMU's pages, and the comparison.
//!
//! The message that everything is delivered has one number per RAM block. The
//! destination answers that its numbers are the same, or sends the digests of a block's
//! ranges. The source then requests the entries of the ranges that differ, and finds the
//! pages.

use std::sync::Arc;

use api::{Audit, Audited};
use audit::{HandedOver, Hash, Ledger, NotKept};
use page::BlockId;
use wire::{ToDestination, ToSource};

use super::stream::Streaming;
use crate::error::MigrationError;

/// Ranges whose entries are requested at a time: 32 KiB each.
const RANGES_AT_ONCE: usize = 16;
/// The comparison ends once it has found this many wrong pages ...
const DIFFERENCES_MAX: usize = 1000;
/// ... of which this many are described.
const EXAMPLES_MAX: usize = 8;

/// A comparison with a destination whose digests differ.
#[derive(Debug, Default)]
pub(crate) struct Comparison {
    /// Ranges that differ and were not examined yet, by block.
    differing: Vec<(u16, u32)>,
    /// Ranges whose entries were requested.
    asked: Vec<(u16, u32)>,
    found: usize,
    examples: Vec<String>,
    unproved_pages: u64,
    /// The destination has reported that the audit succeeded.
    is_over: bool,
}

impl Streaming<'_> {
    /// The totals to compare with the destination's: one per RAM block, none if there is
    /// no audit.
    pub(crate) fn audit_totals(&self) -> Vec<u64> {
        let why = match self.handed_over.ledger() {
            Ok(ledger) => return ledger.totals(),
            Err(NotKept::NotWanted) => "it was turned off (--audit off)",
            Err(NotKept::NoMemory) => "this host has no memory for it: 8 bytes for each page",
            Err(NotKept::NoBlocks) => "QEMU's stream was passed through whole",
        };
        self.connected
            .context
            .report_builder
            .tell(|report| report.audit = Audited::Nothing { why: why.to_owned() });
        Vec::new()
    }

    fn audit_failed(&self, pages: u64, examples: Vec<String>) -> MigrationError {
        for example in &examples {
            tracing::error!("the audit found a difference: {example}");
        }
        let first = examples.first().cloned().unwrap_or_default();
        self.connected
            .context
            .report_builder
            .tell(|report| report.audit = Audited::Differences { pages, examples });
        MigrationError::Audit { host: self.connected.context.peer.name.clone(), pages, first }
    }
}

/// The consequence of a message of the audit.
pub(crate) enum Compared {
    /// Wait for more.
    Waits,
    /// The audit succeeded.
    Same { reread_pages: u64, unproved_pages: u64 },
    /// Send this.
    Asks(ToDestination),
    /// The audit failed.
    Differs { pages: u64, examples: Vec<String> },
    /// The message was not requested.
    Unasked,
}

/// The error for a destination that chooses an unknown hash.
pub(crate) const UNKNOWN_HASH: &str = "it chose a hash for the audit that it was not offered";
/// The error for a destination that sends entries unasked.
pub(crate) const UNASKED: &str = "it sent entries for the audit that it was not asked for";

impl Comparison {
    /// Whether the destination may report the VM as loaded.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Handles a message of the audit for `streamed`. None if it is another message.
    pub(crate) fn hear(
        &mut self,
        streamed: &Streaming<'_>,
        heard: &ToSource,
    ) -> Option<Result<(), MigrationError>> {
        let context = &streamed.connected.context;
        Some(match self.compare(&streamed.handed_over, heard)? {
            Compared::Waits => Ok(()),
            Compared::Same { reread_pages, unproved_pages } => {
                let pages = streamed.handed_over.ledger().map_or(0, Ledger::pages);
                let same = Audited::Same { pages, reread_pages, unproved_pages };
                context.report_builder.tell(|report| report.audit = same);
                Ok(())
            }
            Compared::Asks(said) => streamed.connected.send(&said),
            Compared::Differs { pages, examples } => Err(streamed.audit_failed(pages, examples)),
            Compared::Unasked => Err(context.lost(UNASKED)),
        })
    }

    /// Compares a message of the audit with the source's record. None if it is another
    /// message.
    pub(crate) fn compare(&mut self, ours: &HandedOver, heard: &ToSource) -> Option<Compared> {
        Some(match heard {
            ToSource::Audited { reread_pages } => {
                self.is_over = true;
                let unproved_pages = self.unproved_pages;
                Compared::Same { reread_pages: *reread_pages, unproved_pages }
            }
            ToSource::AuditDigests { block, first, digests, more } => {
                self.compare_digests(ours, *block, *first, digests);
                if *more { Compared::Waits } else { self.ask_for_entries() }
            }
            ToSource::AuditEntries { block, range, entries } => {
                self.compare_entries(ours, *block, *range, entries)
            }
            ToSource::AuditReread { pages, examples } => {
                let described = examples.iter().take(EXAMPLES_MAX).map(|(block, page)| {
                    format!("RAM block {block}, page {page}: not in RAM as it was placed")
                });
                Compared::Differs { pages: *pages, examples: described.collect() }
            }
            _ => return None,
        })
    }

    fn compare_digests(&mut self, ours: &HandedOver, block: u16, first: u32, theirs: &[u64]) {
        let Some(ours) = ours.block(BlockId(block)) else {
            return;
        };
        let ours = ours.digests().skip(first as usize);
        let differs = |(_, (ours, theirs)): &(u32, (u64, &u64))| ours != *theirs;
        let ranges = (first..).zip(ours.zip(theirs)).filter(differs);
        self.differing.extend(ranges.map(|(range, _)| (block, range)));
    }

    fn ask_for_entries(&mut self) -> Compared {
        let Self { differing, asked, found, examples, .. } = self;
        if *found > 0 && (differing.is_empty() || *found >= DIFFERENCES_MAX) {
            return Compared::Differs { pages: *found as u64, examples: std::mem::take(examples) };
        }
        let left = differing.len().saturating_sub(RANGES_AT_ONCE);
        *asked = differing.split_off(left);
        let ranges = asked.clone();
        // Only pages differ that QEMU never handed over, or that can't be proved.
        Compared::Asks(if ranges.is_empty() {
            ToDestination::AuditAccepted
        } else {
            ToDestination::AuditRanges { ranges }
        })
    }

    fn compare_entries(
        &mut self,
        ours: &HandedOver,
        block: u16,
        range: u32,
        theirs: &[u64],
    ) -> Compared {
        let Self { asked, found, examples, unproved_pages, .. } = self;
        let place = asked.iter().position(|asked| *asked == (block, range));
        let ours = ours.block(BlockId(block));
        let compared = ours.and_then(|ours| ours.compare(range, theirs));
        let (Some(place), Some(compared)) = (place, compared) else {
            return Compared::Unasked;
        };
        asked.swap_remove(place);
        let is_over = asked.is_empty();
        *unproved_pages += compared.unproved_pages;
        *found += compared.differences.len();
        let wanted = EXAMPLES_MAX.saturating_sub(examples.len());
        let described = compared.differences.iter().take(wanted);
        examples.extend(described.map(|one| format!("RAM block {block}, {one}")));
        if is_over { self.ask_for_entries() } else { Compared::Waits }
    }
}

/// The audit setting for the destination's order.
pub(crate) fn ordered(audit: Audit) -> wire::AuditOrder {
    match audit {
        Audit::Off => wire::AuditOrder::Off,
        Audit::On => wire::AuditOrder::On,
        Audit::Deep => wire::AuditOrder::Deep,
    }
}

/// The record in which the data path's threads note QEMU's pages, with the hash that the
/// destination has chosen. None if it was not offered that hash.
pub(crate) fn handed_over(audit: Audit, chosen: Option<&str>) -> Option<Arc<HandedOver>> {
    let hash = chosen.map_or_else(|| Some(Hash::default()), Hash::named)?;
    Some(Arc::new(HandedOver::new((audit != Audit::Off).then_some(hash))))
}
