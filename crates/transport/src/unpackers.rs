//! The buffers in which lanes unpack what they receive.
//!
//! A lane needs them from a batch's header until its pages are placed. So the lanes of a VM share
//! them: a lane that waits for a batch has none, and one that finds all of them in use waits until
//! another has placed its batch. That one waits for its peer and for RAM, but for no other lane.
//!
//! A lane that waits reads nothing, so its window may close. Linux counts that time towards
//! `TCP_USER_TIMEOUT` even if probes are answered: after [`crate::DEAD_AFTER`] the source drops the
//! connection, connects again, and sends its batches by other lanes. So the lane that waits longest
//! is first.
//!
//! A dead connection keeps its buffers for as long, counted from its last packet. That came before
//! the windows closed which close because of it, so these connections are not dropped. They are
//! where a VM receives so slowly that the batches ahead take that long, which costs time and no
//! pages: such lanes rest, and the others have their buffers ([`crate::outage`]).

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use page::{BATCH_PAGES, Borrowed, Buffer, Decoder, PAGE_BYTES, Reserve};
use parking_lot::Mutex;

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
}

struct State {
    // Freed before others are promised their memory.
    free: Vec<Unpacker>,
    /// Lanes that wait, those that wait longest first. None is free meanwhile.
    waiting: VecDeque<SyncSender<Unpacker>>,
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
        let waiting = VecDeque::new();
        let state = State { free: Vec::new(), waiting, memory, count: 0, idle: 0 };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// Blocks while all are in use, and there is no memory for another one.
    pub(crate) fn take(&self) -> InUse<'_> {
        let mut state = self.state.lock();
        let unpacker = match state.unused() {
            Some(unpacker) if state.waiting.is_empty() => unpacker,
            unused => {
                let (give, given) = sync_channel(1);
                state.waiting.push_back(give);
                if let Some(unpacker) = unused {
                    state.give(unpacker);
                }
                drop(state);
                given.recv().expect("each that waits is given one")
            }
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

impl State {
    /// One that is free, or another one if there is memory.
    fn unused(&mut self) -> Option<Unpacker> {
        if let Some(unpacker) = self.free.pop() {
            self.idle = self.idle.min(self.free.len());
            return Some(unpacker);
        }
        let grows = self.memory.grow_to((self.count + 1) * UNPACKER_BYTES);
        self.count += usize::from(grows);
        grows.then(Unpacker::default)
    }

    /// Gives it to the lane that waits longest.
    fn give(&mut self, unpacker: Unpacker) {
        match self.waiting.pop_front() {
            // That lane waits for it, and there is room for one: this neither fails nor blocks.
            Some(give) => drop(give.send(unpacker)),
            None => self.free.push(unpacker),
        }
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
        let unpacker = std::mem::take(&mut self.unpacker);
        self.of.state.lock().give(unpacker);
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
    fn the_lane_that_waits_longest_is_first() {
        let reserve = Reserve::new(0);
        let unpackers = Unpackers::new(&reserve);
        let mut used: Vec<_> = (0..OWN).map(|_| unpackers.take()).collect();
        let order = Mutex::new(Vec::new());
        thread::scope(|scope| {
            scope.spawn(|| {
                let given = unpackers.take();
                order.lock().push("waited");
                drop(given);
            });
            while unpackers.state.lock().waiting.is_empty() {
                thread::yield_now();
            }
            used.pop();
            let given = unpackers.take();
            order.lock().push("came later");
            drop(given);
        });
        assert_eq!(*order.lock(), ["waited", "came later"]);
        assert_eq!(unpackers.state.lock().free.len(), 1);
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
