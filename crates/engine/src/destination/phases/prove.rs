//! The audit as a phase: from a VM that is delivered to one that is proved.

use std::sync::Arc;

use dedup::destination::Sharing;
use wire::{Cost, ToSource};

use super::audit::Auditing;
use super::connect::Connected;
use super::end::End;
use super::prepare::Prepared;
use super::receive::{Delivered, Opened};
use crate::tail::Tail;

/// The whole VM is here, as QEMU handed it over.
pub(super) struct Proved<'a, 's> {
    pub(super) tail: Tail,
    pub(super) cost: Cost,
    pub(super) prepared: Prepared<'a, 's>,
}

impl<'a, 's> Delivered<'a, 's> {
    /// Makes the source compare. From then on nothing is placed, and no content is looked up by
    /// name.
    pub(super) fn prove(self) -> Result<Proved<'a, 's>, End> {
        let Self { opened, tail, totals, sharing, prepared } = self;
        let connected = prepared.connected;
        let cost = opened.as_ref().map(Opened::cost).unwrap_or_default();
        if let Some(opened) = &opened {
            connected.prove_pages(opened, &totals, prepared.audit, sharing.as_ref())?;
        }
        Ok(Proved { tail, cost, prepared })
    }
}

impl Connected<'_> {
    /// Makes the source compare the pages that were placed. What was found by name serves other
    /// VMs later, where content is shared.
    pub(super) fn prove_pages(
        &self,
        opened: &Opened,
        totals: &[u64],
        audit: Auditing,
        sharing: Option<&Arc<Sharing>>,
    ) -> Result<(), End> {
        let Opened { placer, mappings, by_name } = opened;
        if let Some(ledger) = placer.ledger() {
            self.audit(ledger, mappings, totals, audit)?;
        }
        let Some(by_name) = by_name else { return Ok(()) };
        if let Some(sharing) = sharing {
            sharing.keep(by_name);
        }
        for text in by_name.storage_notes() {
            self.send(&ToSource::Note { text })?;
        }
        Ok(())
    }
}
