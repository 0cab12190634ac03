//! VMs that arrive from other hosts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qemu::disks::GoesOn;

use super::slot::{Busy, Slot};
use super::{Claim, Registry};
use crate::denied::Denied;

/// How often an order that waits for an earlier arrival's end checks whether its source still
/// waits for the answer.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

impl Registry {
    /// Claims a name for a VM that arrives from the host `from` with migration `id`.
    pub(crate) fn expect(
        self: &Arc<Self>,
        name: &str,
        id: &str,
        from: &str,
    ) -> Result<Claim, Denied> {
        self.claim(name, Busy::Arriving { id: id.to_owned(), from: from.to_owned() })
    }

    /// Waits until an earlier arrival of a VM that the host `from` sends again has ended, for
    /// `limit` at most, and while it `goes_on`.
    ///
    /// A host sends a VM again only after its earlier migration has ended there. So an arrival of
    /// that name from the same host is about to end here, even if its messages are not read yet
    /// because its QEMU is busy or still starts. No other VM of that name is waited for.
    pub(crate) fn wait_ended(
        &self,
        name: &str,
        from: &str,
        limit: Duration,
        goes_on: GoesOn<'_>,
    ) -> Result<(), Denied> {
        let Some(id) = self.arriving_from(name, from) else { return Ok(()) };
        tracing::info!(vm = name, earlier = id, "waiting until its earlier arrival has ended");
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let has_ended = self.has_ended_within(name, from, left.min(CHECK_INTERVAL));
            // Checked also if it has ended: an agent that stops ends all arrivals.
            goes_on().map_err(Denied::Conflict)?;
            if has_ended {
                return Ok(());
            }
            if left.is_zero() {
                return Err(Denied::Conflict(format!(
                    "an earlier migration of `{name}`, {id}, is still ending there: try again \
                     when its QEMU there has ended"
                )));
            }
        }
    }

    /// The host that sends the VM of that name; none if it does not arrive.
    pub(crate) fn sender_of(&self, name: &str) -> Option<String> {
        match &self.slots.lock().get(name)?.busy {
            Busy::Arriving { from, .. } => Some(from.clone()),
            _ => None,
        }
    }

    /// The migration that brings a VM of that name here, if it comes from this host.
    fn arriving_from(&self, name: &str, from: &str) -> Option<String> {
        self.slots.lock().get(name)?.arrives_from(from).map(str::to_owned)
    }

    fn has_ended_within(&self, name: &str, from: &str, limit: Duration) -> bool {
        let arrives = |slots: &mut BTreeMap<String, Slot>| {
            slots.get(name).is_some_and(|slot| slot.arrives_from(from).is_some())
        };
        let mut slots = self.slots.lock();
        self.settled.wait_while_for(&mut slots, arrives, limit);
        !arrives(&mut slots)
    }

    /// The VM that arrives with this migration.
    pub(crate) fn arriving_with(&self, id: &str) -> Option<String> {
        let slots = self.slots.lock();
        let mut names = slots.iter();
        let is_its =
            |slot: &Slot| matches!(&slot.busy, Busy::Arriving { id: its, .. } if its == id);
        names.find(|(_, slot)| is_its(slot)).map(|(name, _)| name.clone())
    }

    /// Waits until no VM is arriving; false after `timeout`.
    pub(crate) fn wait_none_arriving(&self, timeout: Duration) -> bool {
        let mut slots = self.slots.lock();
        let any = |slots: &mut BTreeMap<String, Slot>| {
            slots.values().any(|slot| matches!(slot.busy, Busy::Arriving { .. }))
        };
        !self.settled.wait_while_for(&mut slots, any, timeout).timed_out()
    }
}
