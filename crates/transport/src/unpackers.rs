//! The buffers in which lanes unpack what they receive.
//!
//! A lane needs them from a batch's header until its pages are placed. So the lanes of a VM share
//! them: a lane that waits for a batch has none, and one that finds all of them in use waits until
//! another has placed its batch. That one waits for its peer and for RAM, but for no other lane.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use page::{BATCH_PAGES, Borrowed, Buffer, Decoder, PAGE_BYTES, Reserve};
use parking_lot::{Condvar, Mutex};

/// A payload, what it decodes to, and the pages that are made of that; and a decoder's state.
const UNPACKER_BYTES: usize = 3 * BATCH_PAGES * PAGE_BYTES + (128 << 10);
/// What each VM has by itself: one lane receives while another places.
const OWN: usize = 2;

/// Buffers for one batch.
#[derive(Default)]
pub(crate) struct Unpacker {
    pub(crate) payload: Buffer,
    pub(crate) decoder: Decoder,
    /// The pages that deltas are applied to, or that are copied from other VMs.
    pub(crate) bodies: Buffer,
}

/// The buffers that the lanes of one VM share.
pub struct Unpackers {
    state: Mutex<State>,
    freed: Condvar,
}

struct State {
    // Freed before others are promised their memory.
    free: Vec<Unpacker>,
    memory: Borrowed,
    /// Those that exist, free or in use.
    count: usize,
    /// Those that were free all the time since [`Unpackers::trim`].
    idle: usize,
}

/// One that a lane uses, until it is dropped.
pub(crate) struct InUse<'u> {
    of: &'u Unpackers,
    unpacker: Unpacker,
}

impl Unpackers {
    /// The most memory of all VMs together, beyond what each has by itself: one VM alone has
    /// buffers for each of so many lanes.
    #[must_use]
    pub const fn bytes_max(lanes: usize) -> usize {
        lanes * UNPACKER_BYTES
    }

    /// Those of one VM, which borrows from this reserve.
    #[must_use]
    pub fn new(reserve: &Arc<Reserve>) -> Arc<Self> {
        let memory = Borrowed::new(reserve, OWN * UNPACKER_BYTES);
        let state = State { free: Vec::new(), memory, count: 0, idle: 0 };
        Arc::new(Self { state: Mutex::new(state), freed: Condvar::new() })
    }

    /// Blocks while all are in use, and there is no memory for another one.
    pub(crate) fn take(&self) -> InUse<'_> {
        let mut state = self.state.lock();
        let unpacker = loop {
            if let Some(unpacker) = state.free.pop() {
                state.idle = state.idle.min(state.free.len());
                break unpacker;
            }
            let bytes = (state.count + 1) * UNPACKER_BYTES;
            if state.memory.grow_to(bytes) {
                state.count += 1;
                break Unpacker::default();
            }
            self.freed.wait(&mut state);
        };
        InUse { of: self, unpacker }
    }

    /// Frees those that no lane has used since the last call.
    pub fn trim(&self) {
        let mut state = self.state.lock();
        let idle = state.idle;
        // The others were used last.
        state.free.drain(..idle);
        state.count -= idle;
        state.idle = state.free.len();
        let bytes = state.count * UNPACKER_BYTES;
        state.memory.shrink_to(bytes);
    }
}

impl Deref for InUse<'_> {
    type Target = Unpacker;

    fn deref(&self) -> &Unpacker {
        &self.unpacker
    }
}

impl DerefMut for InUse<'_> {
    fn deref_mut(&mut self) -> &mut Unpacker {
        &mut self.unpacker
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.of.state.lock().free.push(std::mem::take(&mut self.unpacker));
        self.of.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn lanes_of_all_vms_have_so_many_and_each_vm_has_some() {
        let reserve = Reserve::new(Unpackers::bytes_max(3));
        let [one, other] = [(); 2].map(|()| Unpackers::new(&reserve));
        let mut used: Vec<_> = (0..OWN + 3).map(|_| one.take()).collect();
        let others: Vec<_> = (0..OWN).map(|_| other.take()).collect();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| drop(one.take()));
            let also_waiting = scope.spawn(|| drop(other.take()));
            used.pop();
            waiting.join().unwrap();
            drop(others);
            also_waiting.join().unwrap();
        });
        assert_eq!((one.state.lock().count, other.state.lock().count), (OWN + 3, OWN));
        assert_eq!(reserve.borrowed_bytes(), reserve.bytes());
    }

    #[test]
    fn those_that_no_lane_uses_any_more_are_freed() {
        let reserve = Reserve::new(Unpackers::bytes_max(3));
        let unpackers = Unpackers::new(&reserve);
        let used: Vec<_> = (0..OWN + 3).map(|_| unpackers.take()).collect();
        unpackers.trim();
        drop(used);
        unpackers.trim();
        assert_eq!(unpackers.state.lock().count, OWN + 3, "they were used until now");
        // Two lanes continue.
        drop([unpackers.take(), unpackers.take()]);
        unpackers.trim();
        assert_eq!((unpackers.state.lock().count, reserve.borrowed_bytes()), (2, 0));
        unpackers.trim();
        assert_eq!(unpackers.state.lock().count, 0);
        drop(unpackers.take());
    }
}
