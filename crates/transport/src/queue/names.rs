//! Batches that go by name, and what their answers make of them.

use std::time::Instant;

use super::{ANNOUNCED_MAX_BYTES, BATCH_BYTES, Queue};
use crate::load::{Announcement, LightQuery, Load, Query};
use crate::namer::{RereadPages, bits_of, is_set};
use crate::pending::Nonsense;

impl Queue {
    /// A batch that will be announced counts as submitted: nothing is drained before it
    /// is delivered. Blocks while the destination waits for too much. None if there
    /// will be no more batches, or once it is `over`.
    pub(crate) fn reserve(&self, over: impl Fn() -> bool) -> Option<()> {
        let mut state = self.state.lock();
        loop {
            if over() || state.failed.is_some() || state.closed {
                return None;
            }
            if state.pending.bytes() + (state.announced.len() * BATCH_BYTES) as u64
                <= ANNOUNCED_MAX_BYTES
            {
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

    /// Queues what was reserved, or gives the reservation up.
    pub(crate) fn announce(&self, announcement: Option<Announcement>) {
        let mut state = self.state.lock();
        match announcement {
            Some(announcement) if state.failed.is_none() => {
                state.delivered.backlog_bytes += announcement.reread.bytes();
                state.announced.push_back(Load::Announce(announcement));
                drop(state);
                self.work.notify_one();
            }
            _ => {
                state.leaves();
                self.has_less(state);
            }
        }
    }

    /// Pages of a batch that a lane has taken were announced.
    pub(crate) fn came_after_announcement(&self, pages: usize) {
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
    pub(crate) fn answered(&self, named: Query, wanted: u128, later: u128) -> Result<(), Nonsense> {
        let Query { mut batch, ticket } = named;
        let all = bits_of(batch.bodies().len());
        if (wanted | later) & !all != 0 || wanted & later != 0 {
            return Err(Nonsense);
        }
        let body_bytes = (batch.bodies().len() * page::PAGE_BYTES) as u64;
        let fill_bytes = batch.guest_bytes() - body_bytes;
        let placed = (all & !(wanted | later)).count_ones();
        let reread = (later != 0).then(|| RereadPages::of(&batch, later));
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
            state.comes_again(Load::Requested(batch));
        }
        if let Some(reread) = reread {
            state.enters();
            if let Some(resolved) = state.pending.wait(ticket, reread, later)? {
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
        asked: LightQuery,
        wanted: u128,
        later: u128,
    ) -> Result<(), Nonsense> {
        let LightQuery { reread, ticket } = asked;
        let all = bits_of(reread.pages.len());
        if (wanted | later) & !all != 0 || wanted & later != 0 {
            return Err(Nonsense);
        }
        let placed = reread.chosen(all & !(wanted | later));
        let mut state = self.state.lock();
        state.has_named(placed.bytes());
        state.leaves();
        if wanted != 0 {
            state.comes_again(Load::Reread(reread.chosen(wanted)));
        }
        if later != 0 {
            state.enters();
            if let Some(resolved) = state.pending.wait(ticket, reread.chosen(later), later)? {
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
