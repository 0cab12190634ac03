//! Batches that go by name, and what their answers make of them.

use std::time::Instant;

use super::{BATCH_BYTES, Queue, TOLD_MAX_BYTES};
use crate::load::{Asked, Load, Named, Told};
use crate::namer::{Unkept, bits_of, is_set};
use crate::pending::Nonsense;

impl Queue {
    /// A batch that is told ahead is as good as submitted: nothing is drained before it
    /// is delivered. Blocks while the destination waits for too much. None if there
    /// will be no more batches, or once it is `over`.
    pub(crate) fn reserve(&self, over: impl Fn() -> bool) -> Option<()> {
        let mut state = self.state.lock();
        loop {
            if over() || state.failed.is_some() || state.closed {
                return None;
            }
            if state.pending.bytes() + (state.told.len() * BATCH_BYTES) as u64 <= TOLD_MAX_BYTES {
                state.enters();
                state.busy_since.get_or_insert_with(Instant::now);
                return Some(());
            }
            self.has_room.wait(&mut state);
        }
    }

    /// Who waits to reserve looks again.
    pub(crate) fn wake_reserving(&self) {
        let _state = self.state.lock();
        self.has_room.notify_all();
    }

    /// What was reserved is told, or is nothing.
    pub(crate) fn tell(&self, told: Option<Told>) {
        let mut state = self.state.lock();
        match told {
            Some(told) if state.failed.is_none() => {
                state.delivered.backlog_bytes += told.unkept.bytes();
                state.told.push_back(Load::Told(told));
                drop(state);
                self.work.notify_one();
            }
            _ => {
                state.leaves();
                self.has_less(state);
            }
        }
    }

    /// Pages of a batch that a lane has taken were told of ahead.
    pub(crate) fn came_after_told(&self, pages: usize) {
        if pages > 0 {
            let mut state = self.state.lock();
            state.delivered.backlog_bytes -= (pages * page::PAGE_BYTES) as u64;
        }
    }

    /// What a batch of names is to be called by.
    pub(crate) fn ticket(&self) -> u32 {
        let mut state = self.state.lock();
        state.ticket = state.ticket.wrapping_add(1);
        state.ticket
    }

    /// A batch goes by name.
    pub(crate) fn asks(&self) {
        self.state.lock().asked += 1;
    }

    /// The destination says what of a batch of names it wants, and what it has
    /// later; it has placed the rest.
    pub(crate) fn answered(&self, named: Named, wanted: u128, later: u128) -> Result<(), Nonsense> {
        let Named { mut batch, ticket } = named;
        let all = bits_of(batch.bodies().len());
        if (wanted | later) & !all != 0 || wanted & later != 0 {
            return Err(Nonsense);
        }
        let body_bytes = (batch.bodies().len() * page::PAGE_BYTES) as u64;
        let fill_bytes = batch.guest_bytes() - body_bytes;
        let placed = (all & !(wanted | later)).count_ones();
        let unkept = (later != 0).then(|| Unkept::of(&batch, later));
        batch.retain_bodies(|nth, _| is_set(wanted, nth));
        // They are placed already.
        batch.clear_fills();
        // Its buffer goes back to the pool before the lock is taken.
        let left = Some(batch).filter(|batch| !batch.is_empty());
        let mut state = self.state.lock();
        state.asked -= 1;
        state.delivered.fill_bytes += fill_bytes;
        state.has_named(u64::from(placed) * page::PAGE_BYTES as u64);
        state.leaves();
        if let Some(batch) = left {
            state.comes_again(Load::Wanted(batch));
        }
        if let Some(unkept) = unkept {
            state.enters();
            if let Some(resolved) = state.pending.wait(ticket, unkept, later)? {
                state.resolve(resolved);
            }
        }
        self.work.notify_all();
        self.has_less(state);
        Ok(())
    }

    /// The same of pages whose bodies are not kept.
    pub(crate) fn answered_of(
        &self,
        asked: Asked,
        wanted: u128,
        later: u128,
    ) -> Result<(), Nonsense> {
        let Asked { unkept, ticket } = asked;
        let all = bits_of(unkept.pages.len());
        if (wanted | later) & !all != 0 || wanted & later != 0 {
            return Err(Nonsense);
        }
        let placed = unkept.chosen(all & !(wanted | later));
        let mut state = self.state.lock();
        state.has_named(placed.bytes());
        state.leaves();
        if wanted != 0 {
            state.comes_again(Load::Again(unkept.chosen(wanted)));
        }
        if later != 0 {
            state.enters();
            if let Some(resolved) = state.pending.wait(ticket, unkept.chosen(later), later)? {
                state.resolve(resolved);
            }
        }
        self.work.notify_all();
        self.has_less(state);
        Ok(())
    }

    /// A batch that a lane has taken goes in two parts.
    pub(crate) fn divided(&self) {
        self.state.lock().enters();
    }

    /// The destination says what has become of pages that it waited for.
    pub(crate) fn late(&self, ticket: u32, wanted: Vec<u8>, more: bool) -> Result<(), Nonsense> {
        let mut state = self.state.lock();
        if let Some(resolved) = state.pending.late(ticket, wanted, more)? {
            state.resolve(resolved);
        }
        self.work.notify_all();
        self.has_less(state);
        Ok(())
    }
}
