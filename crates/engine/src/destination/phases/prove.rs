//! The audit as a phase: from a VM that is delivered to one that is proved.

use wire::{Cost, ToSource};

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
        if let Some(Opened { placer, mappings, by_name }) = opened {
            if let Some(ledger) = placer.ledger() {
                connected.audit(ledger, &mappings, &totals, prepared.audit)?;
            }
            if let Some(by_name) = by_name {
                if let Some(sharing) = sharing {
                    sharing.keep(&by_name);
                }
                for text in by_name.storage_notes() {
                    connected.send(&ToSource::Note { text })?;
                }
            }
        }
        Ok(Proved { tail, cost, prepared })
    }
}
