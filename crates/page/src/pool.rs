//! The bounded pool that batches come from.
//!
//! An empty pool blocks its caller: the tap stops reading, QEMU stops writing,
//! and memory doesn't grow. The limit can change while batches are in use;
//! lowering it holds QEMU near the end of a pass. Many pools can share one
//! [`Budget`], which bounds them all.

use std::sync::Arc;

use crate::batch::Batch;
use crate::block_batch::BlockBatch;
use crate::budget::{Budget, BudgetFull, PoolClosed, Seat};
use crate::slot::Slot;

/// A bounded pool of batches, counted in bytes, in whole slots.
#[derive(Debug)]
pub struct Pool {
    budget: Arc<Budget>,
    seat: Seat,
}

impl Pool {
    /// A pool of at most `limit_bytes`, and at least one slot, with a budget of
    /// its own.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Arc<Self> {
        let alone = Budget::new(usize::MAX);
        Self::within(&alone, limit_bytes).expect("there is room for one")
    }

    /// A pool of at most `limit_bytes`, and at least one slot, within a shared
    /// budget.
    ///
    /// It always has a minimum of four slots (or its limit, if that is less),
    /// and more while the budget has some left.
    ///
    /// # Errors
    /// If the budget can't promise the minimum next to the minimums of the other
    /// pools.
    pub fn within(budget: &Arc<Budget>, limit_bytes: usize) -> Result<Arc<Self>, BudgetFull> {
        let seat = budget.join(limit_bytes)?;
        Ok(Arc::new(Self { budget: Arc::clone(budget), seat }))
    }

    /// An empty batch. Blocks while the pool, or the budget, is used up.
    ///
    /// # Errors
    /// [`PoolClosed`] once [`Pool::close`] was called.
    pub fn take(self: &Arc<Self>) -> Result<Batch, PoolClosed> {
        Ok(Batch::new(self.take_slot()?, Arc::clone(self)))
    }

    /// An empty batch of blocks. Blocks while the pool, or the budget, is used
    /// up.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub fn take_blocks(self: &Arc<Self>) -> Result<BlockBatch, PoolClosed> {
        Ok(BlockBatch::new(self.take_slot()?, Arc::clone(self)))
    }

    /// Reserves the bytes of one batch for a buffer of the caller's own. Blocks
    /// while the pool, or the budget, is used up.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub fn take_room(self: &Arc<Self>) -> Result<Room, PoolClosed> {
        // A free buffer is dropped: the caller has one.
        drop(self.budget.take(&self.seat)?);
        Ok(Room { pool: Arc::clone(self) })
    }

    fn take_slot(&self) -> Result<Slot, PoolClosed> {
        Ok(self.budget.take(&self.seat)?.unwrap_or_else(Slot::new))
    }

    /// Changes the limit. Batches in use stay in use; a lower limit is reached
    /// as they come back.
    pub fn set_limit_bytes(&self, limit_bytes: usize) {
        self.budget.set_limit_bytes(&self.seat, limit_bytes);
    }

    /// Bytes of the batches in use.
    #[must_use]
    pub fn out_bytes(&self) -> usize {
        self.budget.used_bytes(&self.seat).0
    }

    /// Whether a thread is waiting for a batch.
    #[must_use]
    pub fn is_used_up(&self) -> bool {
        self.budget.is_used_up(&self.seat)
    }

    /// The most bytes that were ever in use.
    #[must_use]
    pub fn high_water_bytes(&self) -> usize {
        self.budget.used_bytes(&self.seat).1
    }

    /// Wakes all waiting threads and fails every later call.
    pub fn close(&self) {
        self.budget.close(&self.seat);
    }

    pub(crate) fn give_back(&self, mut slot: Slot) {
        slot.clear();
        self.budget.give_back(&self.seat, Some(slot));
    }
}

/// The bytes of one batch, reserved in a pool until dropped.
#[derive(Debug)]
pub struct Room {
    pool: Arc<Pool>,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.pool.budget.give_back(&self.pool.seat, None);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.budget.leave(&self.seat);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::{PageIndex, SLOT_BYTES};

    #[test]
    fn room_counts_as_a_batch_does() {
        let pool = Pool::new(2 * SLOT_BYTES);
        let (batch, room) = (pool.take().unwrap(), pool.take_room().unwrap());
        assert_eq!(pool.out_bytes(), 2 * SLOT_BYTES);
        let waiter = thread::spawn({
            let pool = Arc::clone(&pool);
            move || pool.take().map(|batch| batch.guest_bytes())
        });
        drop(room);
        assert_eq!(waiter.join().unwrap(), Ok(0));
        drop(batch);
        assert_eq!((pool.out_bytes(), pool.high_water_bytes()), (0, 2 * SLOT_BYTES));
    }

    #[test]
    fn an_empty_pool_blocks_until_a_batch_comes_back() {
        let pool = Pool::new(SLOT_BYTES);
        let held = pool.take().unwrap();
        let waiter = thread::spawn({
            let pool = Arc::clone(&pool);
            move || pool.take().map(drop)
        });
        assert_eq!(pool.out_bytes(), SLOT_BYTES);
        while !pool.is_used_up() {
            thread::yield_now();
        }
        drop(held);
        assert_eq!(waiter.join().unwrap(), Ok(()));
        assert_eq!(pool.high_water_bytes(), SLOT_BYTES);
        assert_eq!(pool.out_bytes(), 0);
        assert!(!pool.is_used_up());
    }

    #[test]
    fn closing_wakes_waiting_threads() {
        let pool = Pool::new(1);
        let _held = pool.take().unwrap();
        let waiter = thread::spawn({
            let pool = Arc::clone(&pool);
            move || pool.take().map(drop)
        });
        pool.close();
        assert_eq!(waiter.join().unwrap(), Err(PoolClosed));
    }

    #[test]
    fn a_batch_comes_back_empty_and_runs_of_fills_merge() {
        let pool = Pool::new(SLOT_BYTES);
        let mut batch = pool.take().unwrap();
        batch.push_fill(PageIndex(7), 0);
        batch.push_fill(PageIndex(8), 0);
        batch.push_fill(PageIndex(10), 0);
        batch.push_body(PageIndex(9), 0);
        assert_eq!(batch.fills().len(), 2);
        assert_eq!(batch.guest_bytes(), 4 * 4096);
        drop(batch);
        assert!(pool.take().unwrap().is_empty());
    }

    #[test]
    fn a_lower_limit_is_reached_as_batches_come_back() {
        let pool = Pool::new(3 * SLOT_BYTES);
        let first = pool.take().unwrap();
        let second = pool.take().unwrap();
        pool.set_limit_bytes(SLOT_BYTES);
        let waiter = thread::spawn({
            let pool = Arc::clone(&pool);
            move || pool.take().map(drop)
        });
        drop(first);
        assert_eq!(pool.out_bytes(), SLOT_BYTES);
        drop(second);
        assert_eq!(waiter.join().unwrap(), Ok(()));
    }
}
