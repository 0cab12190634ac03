//! The destination's end of all disks of one migration.

mod error;
mod finished;
mod newest;
mod shared;
mod write_blocks;
mod writer;

use std::sync::Arc;
use std::thread::JoinHandle;

use data_threads::DataThreads;
use page::{BlockBatch, DiskId, Pool};
use parking_lot::Mutex;
use transport::{BlockSink, TakeError};

pub use error::SinkError;
use shared::Shared;
pub use shared::SinkCounts;
pub use write_blocks::{Done, NbdWriter, SinkDisk, WriteBlocks, WriteFailure};

/// Writes the disk blocks that lanes deliver, with one thread per disk, so that lanes don't wait
/// for a write. Dropping it ends it, and discards what is not written yet.
#[derive(Debug)]
pub struct DiskSink {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl DiskSink {
    /// Starts the sink for `disks`, in the order of the source's list. `pool`
    /// belongs to the sink alone, and is closed with it: it bounds what is accepted
    /// and not yet written. Its threads join `threads`. `on_failure` is called with the
    /// first failure, on the thread that finds it, and must not block.
    ///
    /// # Errors
    /// If a thread can't be started.
    pub fn start(
        disks: Vec<SinkDisk>,
        pool: Arc<Pool>,
        threads: Option<&Arc<DataThreads>>,
        on_failure: impl Fn(&SinkError) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::new(disks, pool, Box::new(on_failure)));
        let sink = Self { shared, threads: Mutex::new(Vec::new()) };
        for number in 0..sink.shared.disks.len() {
            let shared = Arc::clone(&sink.shared);
            let thread = data_threads::spawn(format!("disk-sink-{number}"), {
                let threads = threads.cloned();
                move || {
                    let _member = threads.as_ref().map(DataThreads::join);
                    writer::run(&shared, number);
                }
            })?;
            sink.threads.lock().push(thread);
        }
        Ok(sink)
    }

    /// Makes everything durable that was accepted for a disk so far: blocks until it is
    /// written and flushed.
    ///
    /// # Errors
    /// If any disk fails, or failed before.
    pub fn flush(&self, disk: DiskId) -> Result<(), SinkError> {
        let number = usize::from(disk.0);
        let ticket = self.shared.ask_flush(number)?;
        self.shared.wait_flushed(number, ticket)
    }

    /// As [`DiskSink::flush`], for all disks at once.
    ///
    /// # Errors
    /// As for [`DiskSink::flush`].
    pub fn flush_all(&self) -> Result<(), SinkError> {
        let numbers = 0..self.shared.disks.len();
        let tickets: Result<Vec<_>, _> =
            numbers.map(|number| Ok((number, self.shared.ask_flush(number)?))).collect();
        tickets?
            .into_iter()
            .try_for_each(|(number, ticket)| self.shared.wait_flushed(number, ticket))
    }

    /// Blocks until the sink has finished with `batches` batches, and returns how many it
    /// has. A batch counts once, however often it arrived, and its buffer is free. `None`
    /// once the sink has ended.
    #[must_use]
    pub fn wait_finished(&self, batches: u64) -> Option<u64> {
        self.shared.finished.wait(batches)
    }

    /// The first failure, if there was one.
    #[must_use]
    pub fn failure(&self) -> Option<SinkError> {
        self.shared.state.lock().end.clone().filter(|end| *end != SinkError::Closed)
    }

    /// What was done so far, for each disk.
    #[must_use]
    pub fn counts(&self) -> Vec<SinkCounts> {
        self.shared.state.lock().lines.iter().map(|line| line.counts).collect()
    }

    /// Accepts and writes nothing more, and wakes lanes that wait for room. Writes in flight
    /// may still complete.
    pub fn close(&self) {
        self.shared.end(&SinkError::Closed);
    }

    /// Closes the sink and aborts writes in flight. Doesn't wait; callers that do return,
    /// even if a disk's writer doesn't answer.
    pub fn abort(&self) {
        self.close();
        for disk in &self.shared.disks {
            disk.writer.abort();
        }
    }

    /// As [`DiskSink::abort`], and waits until no write is in flight. `on_failure` must not
    /// call it.
    pub fn stop(&self) {
        self.abort();
        for thread in self.threads.lock().drain(..) {
            // A thread that panicked has printed why.
            let _ = thread.join();
        }
        self.shared.wait_nothing_under_way();
    }
}

impl Drop for DiskSink {
    fn drop(&mut self) {
        self.stop();
    }
}

impl BlockSink for DiskSink {
    fn room(&self) -> Result<BlockBatch, TakeError> {
        self.shared.pool.take_blocks().map_err(|_| self.shared.why_ended().into())
    }

    fn take(&self, batch: BlockBatch) -> Result<(), TakeError> {
        self.shared.take(batch)
    }
}
