//! What is asked for and agreed on, for pages to go by name.

use std::sync::Arc;

use api::Share;
use content::Domain;
use dedup::source::{Announcer, Naming, Plan, Stage};
use ram::Numbered;
use wire::SharingOrder;

use super::Source;
use super::phases::stream::local;
use crate::error::MigrationError;

impl Source<'_> {
    /// The VM's own, unless it is to be another one's from now on.
    pub(super) fn domain(&self) -> Domain {
        let other = self.request.sharing.domain.clone().map(Domain);
        other.unwrap_or_else(|| self.vm.share_domain.clone())
    }

    /// What the destination is asked for, for pages to go by name.
    pub(super) fn sharing(&self) -> Option<SharingOrder> {
        let (rack, auto) = match self.request.sharing.share {
            Share::Off => return None,
            Share::Auto => (true, true),
            Share::Host => (false, false),
            Share::Rack => (true, false),
        };
        let Some(sharing) = &self.local.sharing else {
            if !auto {
                self.report_builder.note("content is not shared: the agent here is told not to");
            }
            return None;
        };
        let domain = self.domain();
        let print = sharing.key(&domain).print().to_string();
        let if_any = auto && !self.request.sharing.together;
        Some(SharingOrder { domain, print, rack, auto, if_any })
    }

    /// What names pages, if the destination takes names.
    pub(super) fn naming(&self, ram: &Arc<Numbered>, held: bool) -> Option<Naming> {
        let control = self.control.as_ref()?;
        let prepared = control.prepared.as_ref()?;
        let shared = self.local.sharing.as_ref().filter(|_| prepared.sharing);
        let is_read = prepared.storage.contains(&true);
        let storage = self.storage.as_ref().filter(|_| is_read);
        let key = match (shared, storage) {
            (Some(sharing), _) => sharing.key(&self.domain()),
            (None, Some(storage)) => storage.key(),
            (None, None) => return None,
        };
        if let Some(storage) = storage.filter(|_| !held) {
            storage.notes.note("no page is read from storage: this QEMU can't be held for it");
        }
        let cached = storage.map(|storage| (Arc::clone(&storage.cached), prepared.storage.clone()));
        Some(Naming::new(Plan {
            key,
            shares: shared.is_some(),
            cached,
            ram: Arc::clone(ram),
            is_fixed: self.request.storage.share.is_some(),
            held,
        }))
    }

    pub(super) fn tell_ahead(
        &self,
        stage: Option<&Arc<Stage>>,
    ) -> Result<Option<Announcer>, MigrationError> {
        let Some(stage) = stage else { return Ok(None) };
        let announcer = Announcer::start(stage, &self.threads);
        announcer.map_err(|error| local("starting a thread", error))
    }
}
