//! The destination's end of all disks of one migration.

mod dealt;
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

/// A disk that arrives.
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

/// Why a sink takes and writes nothing more.
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

/// What was done with what came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SinkCounts {
    /// Bytes of data that are written.
    pub data_bytes: u64,
    /// Bytes of zeroes that are written.
    pub zero_bytes: u64,
    /// Bytes that came after newer ones, and were left out.
    pub superseded_bytes: u64,
    /// Batches that came more than once.
    pub repeated: u64,
}

/// Writes the disk blocks that lanes bring, behind the lanes: one thread for
/// each disk. Dropping it ends it; what is not written by then is not.
#[derive(Debug)]
pub struct DiskSink {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl DiskSink {
    /// Starts the sink for `disks`, in the order of the source's list. `pool`
    /// is the sink's own, and is closed with it: it bounds what is taken over
    /// and not written. `on_failure` is told the first thing that goes wrong,
    /// on whatever thread finds it, and must not block.
    ///
    /// # Errors
    /// If the system gives no threads.
    pub fn start(
        disks: Vec<SinkDisk>,
        pool: Arc<Pool>,
        on_failure: impl Fn(&SinkError) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        Self::start_in(disks, pool, None, on_failure)
    }

    /// As [`DiskSink::start`]; its threads join `threads`.
    ///
    /// # Errors
    /// As there.
    pub fn start_in(
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

    /// Makes durable what was taken over for a disk so far: blocks until it is
    /// written and flushed.
    ///
    /// # Errors
    /// If anything went wrong with any disk, now or before.
    pub fn flush(&self, disk: DiskId) -> Result<(), SinkError> {
        let number = usize::from(disk.0);
        let ticket = self.shared.ask_flush(number)?;
        self.shared.wait_flushed(number, ticket)
    }

    /// As [`DiskSink::flush`], for all disks at once.
    ///
    /// # Errors
    /// As there.
    pub fn flush_all(&self) -> Result<(), SinkError> {
        let numbers = 0..self.shared.disks.len();
        let tickets: Result<Vec<_>, _> =
            numbers.map(|number| Ok((number, self.shared.ask_flush(number)?))).collect();
        tickets?
            .into_iter()
            .try_for_each(|(number, ticket)| self.shared.wait_flushed(number, ticket))
    }

    /// Blocks until the sink is through with so many batches, each counted once
    /// however often it came, and says how many there are. Their buffers are
    /// free. None once nothing is taken any more.
    #[must_use]
    pub fn wait_dealt(&self, batches: u64) -> Option<u64> {
        self.shared.dealt.wait(batches)
    }

    /// What went wrong, if anything did.
    #[must_use]
    pub fn failure(&self) -> Option<SinkError> {
        self.shared.state.lock().end.clone().filter(|end| *end != SinkError::Closed)
    }

    /// What was done so far, for each disk.
    #[must_use]
    pub fn counts(&self) -> Vec<SinkCounts> {
        self.shared.state.lock().lines.iter().map(|line| line.counts).collect()
    }

    /// Takes and writes nothing more: lanes that wait in it wake. What is under
    /// way may still be done.
    pub fn close(&self) {
        self.shared.end(&SinkError::Closed);
    }

    /// Closes it, and ends what is under way. Does not wait: whoever does comes back,
    /// even if what writes the disks doesn't answer.
    pub fn abort(&self) {
        self.close();
        for disk in &self.shared.disks {
            disk.writer.abort();
        }
    }

    /// As [`DiskSink::abort`], and waits until nothing is written any more. Not to be
    /// called by what a failure is told to.
    pub fn stop(&self) {
        self.abort();
        for thread in self.threads.lock().drain(..) {
            // One that panicked has printed why.
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
