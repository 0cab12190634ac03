//! The events of an arrival.

use std::sync::Arc;

use api::Happening;
use wire::Prepare;

use crate::events::Events;

/// An arrival whose begin was published; dropping it publishes the end, whatever the outcome.
pub(super) struct PublishedArrival {
    events: Arc<Events>,
    migration: String,
    vm: String,
    from: String,
    pub(super) arrived: bool,
}

impl PublishedArrival {
    pub(super) fn begin(events: &Arc<Events>, order: &Prepare) -> Self {
        let Prepare { migration, vm, from, .. } = order;
        let published = Self {
            events: Arc::clone(events),
            migration: migration.clone(),
            vm: vm.clone(),
            from: from.clone(),
            arrived: false,
        };
        let (migration, vm, from) = (migration.clone(), vm.clone(), from.clone());
        events.publish(Happening::ArrivalBegan { migration, vm, from });
        published
    }
}

impl Drop for PublishedArrival {
    fn drop(&mut self) {
        self.events.publish(Happening::ArrivalEnded {
            migration: std::mem::take(&mut self.migration),
            vm: std::mem::take(&mut self.vm),
            from: std::mem::take(&mut self.from),
            arrived: self.arrived,
        });
    }
}
