//! The state that lanes, writers and flushers of one sink share.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use page::{BlockBatch, Pool};
use parking_lot::{Condvar, Mutex};
use transport::TakeError;

use super::error::SinkError;
use super::finished::{Counted, FinishedBatches};
use super::newest::{Newest, Taken};
use super::write_blocks::{SinkDisk, WriteFailure};

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

type OnFailure = Box<dyn Fn(&SinkError) + Send + Sync>;

pub(super) struct Shared {
    pub(super) disks: Vec<SinkDisk>,
    pub(super) pool: Arc<Pool>,
    on_failure: OnFailure,
    pub(super) state: Mutex<State>,
    /// Notified when there is something to write, an operation ends, or the sink does.
    pub(super) changed: Condvar,
    /// Batches that the sink has finished with.
    pub(super) finished: Arc<FinishedBatches>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// One for each disk.
    pub(super) lines: Vec<Line>,
    pub(super) end: Option<SinkError>,
}

/// The queue of one disk, and its writes in flight.
#[derive(Debug, Default)]
pub(super) struct Line {
    newest: Newest,
    pub(super) jobs: VecDeque<Job>,
    /// Ranges that are being written. They don't overlap.
    pub(super) under_way: Vec<Range<u64>>,
    flushes_asked: u64,
    flushed: u64,
    pub(super) counts: SinkCounts,
}

/// What a disk's writer does next.
#[derive(Debug)]
pub(super) enum Job {
    Write {
        batch: Counted,
        /// Which parts of it, in ascending order; `None` for all of it.
        parts: Option<Vec<Range<u64>>>,
    },
    Flush {
        ticket: u64,
    },
}

/// An operation in flight.
#[derive(Debug)]
pub(super) struct UnderWay {
    pub(super) disk: usize,
    pub(super) what: Operation,
    /// The batch whose buffer holds the data. The buffer returns to the pool after
    /// the last of its writes.
    pub(super) batch: Option<Arc<Counted>>,
}

#[derive(Debug)]
pub(super) enum Operation {
    Write { range: Range<u64>, is_zero: bool },
    Flush { ticket: u64 },
}

impl Line {
    fn ended(&mut self, what: &Operation, well: bool) {
        match what {
            Operation::Write { range, is_zero } => {
                self.under_way.retain(|other| other != range);
                let written_bytes = if well { range.end - range.start } else { 0 };
                if *is_zero {
                    self.counts.zero_bytes += written_bytes;
                } else {
                    self.counts.data_bytes += written_bytes;
                }
            }
            Operation::Flush { ticket } if well => self.flushed = self.flushed.max(*ticket),
            Operation::Flush { .. } => {}
        }
    }
}

impl Shared {
    pub(super) fn new(disks: Vec<SinkDisk>, pool: Arc<Pool>, on_failure: OnFailure) -> Self {
        let lines = disks.iter().map(|_| Line::default()).collect();
        let state = Mutex::new(State { lines, end: None });
        let finished = Arc::default();
        Self { disks, pool, on_failure, state, changed: Condvar::new(), finished }
    }

    /// Accepts a batch. Deciding what is left to write of it and queueing that are
    /// one step, so the queue has the order in which batches were accepted.
    pub(super) fn take(&self, batch: BlockBatch) -> Result<(), TakeError> {
        let number = usize::from(batch.disk.0);
        let Some(disk) = self.disks.get(number) else {
            return Err(SinkError::Unknown { number: batch.disk.0 }.into());
        };
        let range = batch.range();
        if range.is_empty() || range.end > disk.bytes {
            let SinkDisk { name, bytes, .. } = disk;
            return Err(TakeError::Peer(format!(
                "bytes {} to {} of disk {name}, which has {bytes}",
                range.start, range.end
            )));
        }
        let mut state = self.state.lock();
        if let Some(end) = &state.end {
            return Err(end.clone().into());
        }
        let Some(line) = state.lines.get_mut(number) else { return Ok(()) };
        let parts = match line.newest.take(batch.sequence, &range) {
            Taken::Whole => None,
            Taken::Parts(parts) => {
                let left: u64 = parts.iter().map(|part| part.end - part.start).sum();
                line.counts.superseded_bytes += batch.bytes() - left;
                Some(parts)
            }
            Taken::Again => {
                line.counts.repeated += 1;
                return Ok(());
            }
            Taken::TooFar => {
                let SinkDisk { name, .. } = disk;
                return Err(TakeError::Peer(format!(
                    "batch {} of disk {name} is too far ahead",
                    batch.sequence
                )));
            }
        };
        // Only here: a repeated batch has been counted before.
        let batch = Counted::new(batch, &self.finished);
        if parts.as_ref().is_none_or(|parts| !parts.is_empty()) {
            line.jobs.push_back(Job::Write { batch, parts });
            drop(state);
            self.changed.notify_all();
        }
        Ok(())
    }

    pub(super) fn ask_flush(&self, number: usize) -> Result<u64, SinkError> {
        let mut state = self.state.lock();
        if let Some(end) = &state.end {
            return Err(end.clone());
        }
        let Some(line) = state.lines.get_mut(number) else {
            let number = u16::try_from(number).unwrap_or(u16::MAX);
            return Err(SinkError::Unknown { number });
        };
        line.flushes_asked += 1;
        let ticket = line.flushes_asked;
        line.jobs.push_back(Job::Flush { ticket });
        drop(state);
        self.changed.notify_all();
        Ok(ticket)
    }

    pub(super) fn wait_flushed(&self, number: usize, ticket: u64) -> Result<(), SinkError> {
        let mut state = self.state.lock();
        loop {
            if let Some(end) = &state.end {
                return Err(end.clone());
            }
            if state.lines.get(number).is_none_or(|line| line.flushed >= ticket) {
                return Ok(());
            }
            self.changed.wait(&mut state);
        }
    }

    /// Records that an operation has ended.
    pub(super) fn ended(&self, ended: UnderWay, outcome: Result<(), WriteFailure>) {
        let UnderWay { disk, what, batch } = ended;
        // The buffer first: when nothing is in flight, all buffers are back.
        drop(batch);
        if let Some(line) = self.state.lock().lines.get_mut(disk) {
            line.ended(&what, outcome.is_ok());
        }
        if let Err(failure) = outcome {
            let is_flush = matches!(what, Operation::Flush { .. });
            self.end(&self.failed(disk, failure, is_flush));
        }
        self.changed.notify_all();
    }

    fn failed(&self, disk: usize, failure: WriteFailure, is_flush: bool) -> SinkError {
        let disk = self.disks.get(disk).map(|disk| disk.name.clone()).unwrap_or_default();
        match failure {
            WriteFailure::NoSpace => SinkError::NoSpace { disk },
            WriteFailure::Other(why) if is_flush => SinkError::Flush { disk, why },
            WriteFailure::Other(why) => SinkError::Write { disk, why },
        }
    }

    /// Ends everything; only the first reason counts.
    pub(super) fn end(&self, why: &SinkError) {
        let mut state = self.state.lock();
        if state.end.is_some() {
            return;
        }
        state.end = Some(why.clone());
        let left: Vec<_> =
            state.lines.iter_mut().map(|line| std::mem::take(&mut line.jobs)).collect();
        drop(state);
        drop(left);
        self.finished.end();
        self.pool.close();
        self.changed.notify_all();
        if *why != SinkError::Closed {
            (self.on_failure)(why);
        }
    }

    /// Waits for writes in flight; to be called once the writer threads have ended and
    /// the writes were aborted.
    pub(super) fn wait_nothing_under_way(&self) {
        let mut state = self.state.lock();
        while state.lines.iter().any(|line| !line.under_way.is_empty()) {
            self.changed.wait(&mut state);
        }
    }

    pub(super) fn why_ended(&self) -> SinkError {
        self.state.lock().end.clone().unwrap_or(SinkError::Closed)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}
