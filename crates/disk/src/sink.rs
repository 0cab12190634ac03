//! The destination's end of all disks of one migration.

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

use shared::Shared;
pub use write_blocks::{Done, NbdWriter, WriteBlocks, WriteFailure};

/// A disk that is being received.
pub struct SinkDisk {
    /// Its name, for messages.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// What it is written through.
    pub writer: Arc<dyn WriteBlocks>,
}

impl std::fmt::Debug for SinkDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SinkDisk")
            .field("name", &self.name)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// Why a sink accepts and writes nothing more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SinkError {
    /// The storage is full.
    #[error("disk {disk}: no space left at the destination")]
    NoSpace {
        /// Its name.
        disk: String,
    },
    /// A write failed.
    #[error("disk {disk} cannot be written at the destination: {why}")]
    Write {
        /// Its name.
        disk: String,
        /// Why.
        why: String,
    },
    /// A flush failed.
    #[error("disk {disk} cannot be flushed at the destination: {why}")]
    Flush {
        /// Its name.
        disk: String,
        /// Why.
        why: String,
    },
    /// There is no such disk.
    #[error("no disk of this migration has the number {number}")]
    Unknown {
        /// The number.
        number: u16,
    },
    /// The sink was closed by its owner.
    #[error("the migration ended")]
    Closed,
}

/// What became of the batches received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SinkCounts {
    /// Bytes of data that are written.
    pub data_bytes: u64,
    /// Bytes of zeroes that are written.
    pub zero_bytes: u64,
    /// Bytes left out because newer ones had arrived before.
    pub superseded_bytes: u64,
    /// Repeats of batches that had arrived before.
    pub repeated: u64,
}

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

impl From<SinkError> for TakeError {
    fn from(error: SinkError) -> Self {
        match error {
            SinkError::Closed => Self::Over,
            SinkError::Unknown { .. } => Self::Peer(error.to_string()),
            error => Self::Disk(error.to_string()),
        }
    }
}
