//! What room the destination's disks have, from the control connection to the
//! lanes.
//!
//! The thread that reads the connection brings it there itself. The one that
//! leads may be waiting for QEMU, which waits for a disk, which waits for room.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::source::lanes::Lanes;
use wire::ToSource;

/// What was heard, for lanes that may not be there yet.
#[derive(Debug, Default)]
pub(crate) struct DiskRoom(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    batches: Option<u64>,
    lanes: Weak<Lanes>,
}

impl DiskRoom {
    /// Takes what concerns it, and passes on all else.
    pub(crate) fn hear(&self, message: ToSource) -> Option<ToSource> {
        let ToSource::DiskRoom { batches } = message else { return Some(message) };
        let mut state = self.0.lock();
        state.batches = Some(batches);
        if let Some(lanes) = state.lanes.upgrade() {
            lanes.set_block_room(batches);
        }
        None
    }

    /// The lanes are there.
    pub(crate) fn is_for(&self, lanes: &Arc<Lanes>) {
        let mut state = self.0.lock();
        state.lanes = Arc::downgrade(lanes);
        if let Some(batches) = state.batches {
            lanes.set_block_room(batches);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_about_room_is_passed_on() {
        let room = DiskRoom::default();
        assert!(room.hear(ToSource::DiskRoom { batches: 7 }).is_none());
        assert_eq!(room.0.lock().batches, Some(7), "for lanes that are not there yet");
        let other = room.hear(ToSource::Refused { reason: "no".to_owned() });
        assert!(matches!(other, Some(ToSource::Refused { .. })));
    }
}
