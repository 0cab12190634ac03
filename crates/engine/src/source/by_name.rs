//! Deduplication, as the source requests it and the destination agrees to it.

use std::sync::Arc;

use api::{Share, Sharing};
use audit::HandedOver;
use content::Domain;
use dedup::source::{NamedBefore, Naming, Plan, Waits};
use ram::Numbered;
use wire::SharingOrder;

use super::phases::connect::Connected;
use super::phases::prepare::Prepared;
use crate::host::Local;

impl Connected<'_> {
    /// The VM's own sharing domain, unless the request changes it.
    pub(crate) fn domain(&self) -> Domain {
        let other = self.context.request.sharing.domain.clone().map(Domain);
        other.unwrap_or_else(|| self.context.vm.share_domain.clone())
    }

    /// The request to the destination to take pages by name.
    pub(crate) fn sharing(&self) -> Option<SharingOrder> {
        let context = &self.context;
        let asked = &context.request.sharing;
        let order = order(context.local, asked, self.domain());
        order.unwrap_or_else(|note| {
            context.report_builder.note(note);
            None
        })
    }
}

/// The request to a destination to take pages of this domain by name. None if it is off;
/// an error if the operator requested it and it is impossible.
pub(crate) fn order(
    local: &Local,
    asked: &Sharing,
    domain: Domain,
) -> Result<Option<SharingOrder>, &'static str> {
    let (rack, auto) = match asked.share {
        Share::Off => return Ok(None),
        Share::Auto => (true, true),
        Share::Host => (false, false),
        Share::Rack => (true, false),
    };
    let Some(sharing) = &local.sharing else {
        if auto {
            return Ok(None);
        }
        return Err("content is not shared: the agent here has sharing turned off");
    };
    let print = sharing.key(&domain).print().to_string();
    let if_any = auto && !asked.together;
    Ok(Some(SharingOrder { domain, print, rack, auto, if_any, may_sleep: false }))
}

impl Prepared<'_> {
    /// The naming of pages, if the destination takes names.
    pub(crate) fn naming(
        &self,
        ram: &Arc<Numbered>,
        handed_over: &Arc<HandedOver>,
        is_held: bool,
    ) -> Option<Naming> {
        let Self { connected, there, storage, .. } = self;
        let shared = connected.context.local.sharing.as_ref().filter(|_| there.sharing);
        let is_read = there.storage.contains(&true);
        let storage = storage.as_ref().filter(|_| is_read);
        let (key, before) = match (shared, storage) {
            (Some(sharing), _) => {
                let key = sharing.key(&connected.domain());
                let pid = connected.context.vm.machine.process.pid();
                let before = NamedBefore::of_vm(sharing, pid, &key);
                (key, before)
            }
            (None, Some(storage)) => (storage.key(), None),
            (None, None) => return None,
        };
        if let Some(storage) = storage.filter(|_| !is_held) {
            storage.notes.note("no page is read from storage: this QEMU can't be held for it");
        }
        let storage = storage.filter(|_| is_held);
        let cached = storage.map(|storage| (Arc::clone(&storage.cached), there.storage.clone()));
        Some(Naming::new(Plan {
            key,
            before,
            shares: shared.is_some(),
            names_with_bodies: there.names_with_bodies,
            only: None,
            cached,
            ram: Arc::clone(ram),
            handed_over: Arc::clone(handed_over),
            is_fixed: connected.context.request.storage.share.is_some(),
            sleeps: false,
            waits: if is_held { Waits::Held } else { Waits::Never },
        }))
    }
}
