//! The batch that a thread is filling.

use std::sync::atomic::Ordering::Relaxed;

use page::{Batch, BlockId, Epoch, PAGE_BYTES, PageIndex};

use crate::error::TapError;
use crate::output::Output;
use crate::shared::Shared;

/// Limits of a batch's fill runs and of their pages: zero pages take no room in the
/// buffer, but they must not be late either.
const FILLS_MAX: usize = 1024;
const FILL_PAGES_MAX: u64 = (64 << 20) / PAGE_BYTES as u64;

/// Collects pages of one block and epoch, across packets. Hands the batch on when
/// it is full, when block or epoch change, or before the thread waits: a waiting
/// thread must not hold a buffer that other threads may need.
pub(crate) struct Filling<'t> {
    shared: &'t Shared,
    reader: usize,
    batch: Option<Batch>,
    fill_pages: u64,
}

impl<'t> Filling<'t> {
    pub(crate) fn new(shared: &'t Shared, reader: usize) -> Self {
        Self { shared, reader, batch: None, fill_pages: 0 }
    }

    /// A batch of `block` and `epoch` with room for `bodies` more, and the output
    /// that it will go to.
    pub(crate) fn batch(
        &mut self,
        block: BlockId,
        epoch: Epoch,
        bodies: usize,
    ) -> Result<(&mut Batch, &dyn Output), TapError> {
        let fits = self.batch.as_ref().is_some_and(|batch| {
            batch.block == block && batch.epoch == epoch && batch.room() >= bodies
        });
        if !fits {
            self.hand_on()?;
            let mut batch = self.shared.pool.take()?;
            batch.block = block;
            batch.epoch = epoch;
            self.batch = Some(batch);
        }
        let batch = self.batch.as_mut().ok_or(TapError::Stopped)?;
        Ok((batch, &*self.shared.output))
    }

    /// Adds one page of a repeated byte.
    pub(crate) fn fill(
        &mut self,
        block: BlockId,
        epoch: Epoch,
        page: PageIndex,
        byte: u8,
    ) -> Result<(), TapError> {
        let (batch, _) = self.batch(block, epoch, 0)?;
        batch.push_fill(page, byte);
        let full = batch.fills().len() >= FILLS_MAX;
        self.fill_pages += 1;
        if full || self.fill_pages >= FILL_PAGES_MAX { self.hand_on() } else { Ok(()) }
    }

    /// Whether there is anything to hand on.
    pub(crate) fn is_empty(&self) -> bool {
        self.batch.as_ref().is_none_or(Batch::is_empty)
    }

    /// Hands on the current batch, if it has pages.
    pub(crate) fn hand_on(&mut self) -> Result<(), TapError> {
        self.fill_pages = 0;
        match self.batch.take() {
            Some(batch) if !batch.is_empty() => {
                let Shared { counters, output, .. } = self.shared;
                counters.batches.fetch_add(1, Relaxed);
                Ok(output.batch(batch)?)
            }
            _ => Ok(()),
        }
    }

    /// Starts an epoch: hands on the batch and reports the epochs before as
    /// finished.
    pub(crate) fn begin(&mut self, epoch: Epoch) -> Result<(), TapError> {
        self.hand_on()?;
        self.shared.epochs.begin(self.reader, epoch, &*self.shared.output);
        Ok(())
    }
}
