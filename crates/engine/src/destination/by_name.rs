//! Pages sent by name: the stage that finds their content, and the thread that reports their fate
//! to the source.

use std::ops::Deref;
use std::sync::Arc;

use data_threads::{DataThreads, Joined};
use dedup::destination::{Outbox, Resolving};
use wire::{Cost, ToSource};

use crate::link::Link;

/// The stage and the thread of one VM.
pub(crate) struct ByName {
    /// Dropped first, which ends the thread.
    stage: Resolving,
    _telling: Joined,
}

impl ByName {
    pub(crate) fn start(
        (stage, outbox): (Resolving, Outbox),
        link: Arc<Link<ToSource>>,
        threads: &Arc<DataThreads>,
    ) -> std::io::Result<Self> {
        let threads = Arc::clone(threads);
        let telling = data_threads::spawn("late", move || {
            // A source that does not receive the fate of its pages waits forever.
            let _guard = threads.guard();
            for message in outbox {
                data_threads::point();
                if link.send(&message).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { stage, _telling: telling.into() })
    }
}

impl ByName {
    /// The cost of pages sent by name, without what the source sent.
    pub(crate) fn cost(&self) -> Cost {
        let stored = self.stored();
        Cost {
            peer_bytes: self.fetched_bytes(),
            again_bytes: self.again_bytes(),
            stored_bytes: stored.placed_bytes,
            storage_read_bytes: stored.read_bytes,
            ..Cost::default()
        }
    }
}

impl Deref for ByName {
    type Target = Resolving;

    fn deref(&self) -> &Resolving {
        &self.stage
    }
}
