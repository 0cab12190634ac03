//! VMs that arrive from other hosts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::slot::{Busy, Slot};
use super::{Claim, Registry};
use crate::denied::Denied;

impl Registry {
    /// Claims a name for a VM that arrives with migration `id`.
    pub(crate) fn expect(self: &Arc<Self>, name: &str, id: &str) -> Result<Claim, Denied> {
        self.claim(name, Busy::Arriving(id.to_owned()))
    }

    /// The VM that arrives with this migration.
    pub(crate) fn arriving_with(&self, id: &str) -> Option<String> {
        let slots = self.slots.lock();
        let mut names = slots.iter();
        let is_its = |slot: &Slot| matches!(&slot.busy, Busy::Arriving(its) if its == id);
        names.find(|(_, slot)| is_its(slot)).map(|(name, _)| name.clone())
    }

    /// Waits until no VM is arriving; false after `timeout`.
    pub(crate) fn wait_none_arriving(&self, timeout: Duration) -> bool {
        let mut slots = self.slots.lock();
        let any = |slots: &mut BTreeMap<String, Slot>| {
            slots.values().any(|slot| matches!(slot.busy, Busy::Arriving(_)))
        };
        !self.settled.wait_while_for(&mut slots, any, timeout).timed_out()
    }
}
