//! Passes the room of the destination's disks from the control connection to
//! the lanes.
//!
//! The thread that reads the connection does this itself, because the leading
//! thread may be waiting for QEMU, which waits for a disk, which waits for
//! room.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::source::lanes::Lanes;
use wire::ToSource;

/// The last reported room, for lanes that may not exist yet.
#[derive(Debug, Default)]
pub(crate) struct DiskRoom(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    batches: Option<u64>,
    lanes: Weak<Lanes>,
}

impl DiskRoom {
    /// Takes messages about room, and returns all others.
    pub(crate) fn receive(&self, message: ToSource) -> Option<ToSource> {
        let ToSource::DiskRoom { batches } = message else { return Some(message) };
        let mut state = self.0.lock();
        state.batches = Some(batches);
        if let Some(lanes) = state.lanes.upgrade() {
            lanes.set_block_room(batches);
        }
        None
    }

    /// Sets the lanes.
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
    fn other_messages_are_passed_on() {
        let room = DiskRoom::default();
        assert!(room.receive(ToSource::DiskRoom { batches: 7 }).is_none());
        assert_eq!(room.0.lock().batches, Some(7), "for lanes that are not there yet");
        let other = room.receive(ToSource::Refused { reason: "no".to_owned() });
        assert!(matches!(other, Some(ToSource::Refused { .. })));
    }
}
