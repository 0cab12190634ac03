//! The source's half of the audit: the record of QEMU's pages, and the comparison.
//!
//! The message that everything is placed has one number per RAM block. The
//! destination answers that its numbers are the same, or sends the digests of a block's
//! ranges. The source then requests the entries of the ranges that differ, and finds the
//! pages.

use std::sync::Arc;

use api::{Audit, Audited};
use audit::{HandedOver, Hash, Ledger, NotKept};
use page::BlockId;
use wire::{ToDestination, ToSource};

use crate::error::MigrationError;
use crate::report_builder::ReportBuilder;

/// Ranges whose entries are requested at a time: 32 KiB each.
const RANGES_AT_ONCE: usize = 16;
/// The comparison ends once it has found this many wrong pages ...
const DIFFERENCES_MAX: usize = 1000;
/// ... of which this many are described.
const EXAMPLES_MAX: usize = 8;

/// The audit of one migration at its source.
pub(crate) struct SourceAudit {
    host: String,
    /// Where the operator has turned it off, for the report.
    turned_off: &'static str,
    handed_over: Arc<HandedOver>,
    report_builder: Arc<ReportBuilder>,
    /// None: the destination owes no result, yet or any more.
    comparison: Option<Comparison>,
}

/// A comparison with a destination that has not yet reported its result.
#[derive(Debug, Default)]
struct Comparison {
    /// Ranges that differ and were not examined yet, by block.
    differing: Vec<(u16, u32)>,
    /// Ranges whose entries were requested.
    requested: Vec<(u16, u32)>,
    found: usize,
    examples: Vec<String>,
    unproved_pages: u64,
}

/// The consequence of a message of the audit.
#[derive(Debug)]
pub(crate) enum Compared {
    /// Wait for more.
    Waits,
    /// Send this.
    Asks(ToDestination),
    /// The audit succeeded.
    Same,
}

/// Pages that differ.
struct Differences {
    pages: u64,
    examples: Vec<String>,
}

impl SourceAudit {
    /// The audit of a migration to `host`, with the hash that the destination has chosen.
    ///
    /// # Errors
    /// If it was not offered that hash.
    pub(crate) fn new(
        (audit, turned_off): (Audit, &'static str),
        chosen: Option<&str>,
        host: &str,
        report_builder: &Arc<ReportBuilder>,
    ) -> Result<Self, MigrationError> {
        let hash = chosen.map_or_else(|| Some(Hash::default()), Hash::named);
        let why = "it chose a hash for the audit that was not offered";
        let hash = hash.ok_or_else(|| MigrationError::lost(host, why))?;
        Ok(Self {
            host: host.to_owned(),
            turned_off,
            handed_over: Arc::new(HandedOver::new((audit != Audit::Off).then_some(hash))),
            report_builder: Arc::clone(report_builder),
            comparison: None,
        })
    }

    /// The record in which the data path's threads note QEMU's pages.
    pub(crate) fn handed_over(&self) -> &Arc<HandedOver> {
        &self.handed_over
    }

    /// Begins the comparison. Returns the totals that the destination compares with its own:
    /// one per RAM block, none if there is no audit.
    pub(crate) fn begin(&mut self) -> Vec<u64> {
        let why = match self.handed_over.ledger() {
            Ok(ledger) => {
                let totals = ledger.totals();
                self.comparison = (!totals.is_empty()).then(Comparison::default);
                return totals;
            }
            Err(NotKept::NotWanted) => self.turned_off,
            Err(NotKept::NoMemory) => "this host has no memory for it: 8 bytes for each page",
            Err(NotKept::NoBlocks) => "QEMU's stream was relayed unchanged",
        };
        self.report(Audited::Nothing { why: why.to_owned() });
        Vec::new()
    }

    /// Whether the destination owes the result. Until then it may not load the VM.
    pub(crate) fn is_open(&self) -> bool {
        self.comparison.is_some()
    }

    /// Compares a message of the audit with the record. None if it is another message, or was
    /// not requested.
    ///
    /// # Errors
    /// If pages differ, which the report then names.
    pub(crate) fn receive(
        &mut self,
        received: &ToSource,
    ) -> Result<Option<Compared>, MigrationError> {
        let Some(comparison) = &mut self.comparison else { return Ok(None) };
        if let ToSource::Audited { reread_pages } = *received {
            let unproved_pages = comparison.unproved_pages;
            self.comparison = None;
            let pages = self.handed_over.ledger().map_or(0, Ledger::pages);
            self.report(Audited::Same { pages, reread_pages, unproved_pages });
            return Ok(Some(Compared::Same));
        }
        comparison.compare(&self.handed_over, received).map_err(
            |Differences { pages, examples }| {
                for example in &examples {
                    tracing::error!("the audit found a difference: {example}");
                }
                let first = examples.first().cloned().unwrap_or_default();
                self.report(Audited::Differences { pages, examples });
                MigrationError::Audit { host: self.host.clone(), pages, first }
            },
        )
    }

    fn report(&self, audited: Audited) {
        self.report_builder.update(|report| report.audit = audited);
    }
}

impl Comparison {
    fn compare(
        &mut self,
        ours: &HandedOver,
        received: &ToSource,
    ) -> Result<Option<Compared>, Differences> {
        match received {
            ToSource::AuditDigests { block, first, digests, more } => {
                self.compare_digests(ours, *block, *first, digests);
                if *more { Ok(Some(Compared::Waits)) } else { self.ask_for_entries() }
            }
            ToSource::AuditEntries { block, range, entries } => {
                self.compare_entries(ours, *block, *range, entries)
            }
            ToSource::AuditReread { pages, examples } => {
                let described = examples.iter().take(EXAMPLES_MAX).map(|(block, page)| {
                    format!("RAM block {block}, page {page}: not in RAM as it was placed")
                });
                Err(Differences { pages: *pages, examples: described.collect() })
            }
            _ => Ok(None),
        }
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

    fn ask_for_entries(&mut self) -> Result<Option<Compared>, Differences> {
        let Self { differing, requested, found, examples, .. } = self;
        if *found > 0 && (differing.is_empty() || *found >= DIFFERENCES_MAX) {
            return Err(Differences { pages: *found as u64, examples: std::mem::take(examples) });
        }
        let left = differing.len().saturating_sub(RANGES_AT_ONCE);
        *requested = differing.split_off(left);
        let ranges = requested.clone();
        // Only pages differ that QEMU never handed over, or that can't be proved.
        Ok(Some(Compared::Asks(if ranges.is_empty() {
            ToDestination::AuditAccepted
        } else {
            ToDestination::AuditRanges { ranges }
        })))
    }

    fn compare_entries(
        &mut self,
        ours: &HandedOver,
        block: u16,
        range: u32,
        theirs: &[u64],
    ) -> Result<Option<Compared>, Differences> {
        let Self { requested, found, examples, unproved_pages, .. } = self;
        let place = requested.iter().position(|requested| *requested == (block, range));
        let ours = ours.block(BlockId(block));
        let compared = ours.and_then(|ours| ours.compare(range, theirs));
        let (Some(place), Some(compared)) = (place, compared) else {
            return Ok(None);
        };
        requested.swap_remove(place);
        let is_over = requested.is_empty();
        *unproved_pages += compared.unproved_pages;
        *found += compared.differences.len();
        let wanted = EXAMPLES_MAX.saturating_sub(examples.len());
        let described = compared.differences.iter().take(wanted);
        examples.extend(described.map(|one| format!("RAM block {block}, {one}")));
        if is_over { self.ask_for_entries() } else { Ok(Some(Compared::Waits)) }
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

#[cfg(test)]
mod tests {
    use api::{Bounds, Outcome, Progress};
    use audit::Delivery;
    use page::{Epoch, PageIndex};

    use super::*;
    use crate::watch::Watch;

    const AUDITED: ToSource = ToSource::Audited { reread_pages: 0 };

    fn audit(audit: Audit, chosen: Option<&str>) -> Result<SourceAudit, MigrationError> {
        let progress = Progress::new(("deadbeef", "web1"), ("host-a", "host-b"), 0);
        let watch = Arc::new(Watch::new(progress, Bounds::default()));
        let report_builder = Arc::new(ReportBuilder::new(watch, 300));
        SourceAudit::new((audit, "it was turned off"), chosen, "host-b", &report_builder)
    }

    #[test]
    fn a_result_counts_once_and_only_if_there_is_an_audit() {
        let mut audited = audit(Audit::On, None).unwrap();
        audited.handed_over().announce([16].into_iter());
        assert!(audited.receive(&AUDITED).unwrap().is_none(), "nothing is compared yet");
        assert_eq!(audited.begin().len(), 1);
        assert!(audited.is_open());
        assert!(matches!(audited.receive(&AUDITED).unwrap(), Some(Compared::Same)));
        assert!(!audited.is_open() && audited.receive(&AUDITED).unwrap().is_none());

        for (setting, why) in [(Audit::Off, "turned off"), (Audit::On, "relayed unchanged")] {
            let mut none = audit(setting, None).unwrap();
            assert!(none.begin().is_empty() && !none.is_open());
            assert!(none.receive(&AUDITED).unwrap().is_none());
            let found = none.report_builder.end(Outcome::Done).audit;
            assert!(
                matches!(&found, Audited::Nothing { why: said } if said.contains(why)),
                "{found:?}"
            );
        }
    }

    #[test]
    fn what_was_not_requested_is_no_message_of_the_audit() {
        assert!(matches!(audit(Audit::On, Some("rot13")), Err(MigrationError::PeerLost { .. })));
        let mut audited = audit(Audit::On, None).unwrap();
        audited.handed_over().announce([16].into_iter());
        audited.begin();
        let entries = ToSource::AuditEntries { block: 0, range: 0, entries: vec![0; 16] };
        assert!(audited.receive(&entries).unwrap().is_none());
    }

    /// QEMU handed over two contents of one page in one epoch, and the destination holds the first.
    #[test]
    fn pages_that_can_not_be_proved_are_counted_in_the_report() {
        const PAGES: u64 = 16;
        let mut audited = audit(Audit::On, None).unwrap();
        let handed_over = Arc::clone(audited.handed_over());
        handed_over.announce([PAGES].into_iter());
        let theirs = Ledger::new(Hash::default(), [PAGES]).unwrap();
        let block = theirs.block(BlockId(0)).unwrap();
        let (page, epoch) = (PageIndex(1), Epoch(1));
        for byte in [7, 8] {
            let mut ours = handed_over.block(BlockId(0)).unwrap().write();
            ours.handed_over(page, Hash::default().of_fill(byte), epoch);
        }
        block.write().placed(page, Hash::default().of_fill(7), epoch, Delivery::Fill);

        audited.begin();
        let digests = block.digests().collect();
        let differs = ToSource::AuditDigests { block: 0, first: 0, digests, more: false };
        let asked = audited.receive(&differs).unwrap();
        let Some(Compared::Asks(ToDestination::AuditRanges { ranges })) = asked else { panic!() };
        assert_eq!(ranges, [(0, 0)]);
        let entries = block.entries(0).unwrap();
        let entries = ToSource::AuditEntries { block: 0, range: 0, entries };
        let accepted = audited.receive(&entries).unwrap();
        assert!(matches!(accepted, Some(Compared::Asks(ToDestination::AuditAccepted))));
        assert!(matches!(audited.receive(&AUDITED).unwrap(), Some(Compared::Same)));
        let found = audited.report_builder.end(Outcome::Done).audit;
        assert_eq!(found, Audited::Same { pages: PAGES, reread_pages: 0, unproved_pages: 1 });
    }

    #[test]
    fn a_difference_is_reported_with_its_page() {
        let mut audited = audit(Audit::On, None).unwrap();
        audited.handed_over().announce([16].into_iter());
        audited.begin();
        let wrong = ToSource::AuditReread { pages: 2, examples: vec![(0, 7)] };
        let Err(MigrationError::Audit { pages: 2, first, .. }) = audited.receive(&wrong) else {
            panic!("two pages differ");
        };
        assert!(first.contains("page 7"), "{first}");
        let found = audited.report_builder.end(Outcome::Done).audit;
        assert!(matches!(found, Audited::Differences { pages: 2, .. }), "{found:?}");
    }
}
