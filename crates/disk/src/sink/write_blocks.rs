//! What the sink writes to.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use nbd::Errno;
use nbd::client::{Client, ClientError, Failure, Outcome, Settings};

use super::shared::{Shared, UnderWay};

/// A disk that accepts writes, many at a time.
///
/// Each `done` is finished once, on any thread, perhaps before the call returns.
/// Operations in flight complete in any order. A call may block until there is room.
/// The caller may reuse `data` when it returns.
pub trait WriteBlocks: Send + Sync {
    /// Writes.
    fn write(&self, offset: u64, data: &[u8], done: Done);

    /// Writes zeroes, as a hole where it can.
    fn write_zeroes(&self, offset: u64, bytes: u64, done: Done);

    /// Makes all completed writes durable.
    fn flush(&self, done: Done);

    /// Ends all operations in flight soon, with an error, and calls that block.
    fn abort(&self);
}

/// A disk that is being received.
pub struct SinkDisk {
    /// Its name, for messages.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// What it is written through.
    pub writer: Arc<dyn WriteBlocks>,
}

/// Why a write failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteFailure {
    /// The storage is full.
    #[error("no space left")]
    NoSpace,
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// Receives the outcome of an operation. If it is dropped instead, the operation
/// has failed.
#[derive(Debug)]
pub struct Done(Option<(Arc<Shared>, UnderWay)>);

impl Done {
    pub(super) fn new(shared: &Arc<Shared>, what: UnderWay) -> Self {
        Self(Some((Arc::clone(shared), what)))
    }

    /// Reports that the operation has ended.
    pub fn finish(mut self, outcome: Result<(), WriteFailure>) {
        if let Some((shared, what)) = self.0.take() {
            shared.ended(what, outcome);
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some((shared, what)) = self.0.take() {
            let why = "the connection to the destination's disk ended".to_owned();
            shared.ended(what, Err(WriteFailure::Other(why)));
        }
    }
}

/// The export of a disk of the destination's QEMU.
#[derive(Debug)]
pub struct NbdWriter {
    client: Client<Done>,
}

impl NbdWriter {
    /// Connects to the export at a unix socket.
    ///
    /// # Errors
    /// If no server listens there, or the export doesn't exist or is read-only.
    pub fn connect(path: &Path, export: &str, settings: &Settings) -> Result<Self, ClientError> {
        let client = Client::connect(path, export, settings, |done: Done, outcome: Outcome| {
            done.finish(outcome.map_err(WriteFailure::from));
        })?;
        Ok(Self { client })
    }

    /// The size of the export.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.client.info().bytes
    }
}

impl NbdWriter {
    /// Submits a request, after the checks that the client makes: the client drops the
    /// `done` of a request that it refuses, and the reason would be lost.
    fn submit(
        &self,
        range: Range<u64>,
        done: Done,
        submit: impl FnOnce(&Client<Done>, Done) -> Result<(), ClientError>,
    ) {
        let minimum = u64::from(self.client.info().sizes.minimum);
        if let Some(failure) = self.client.failure() {
            done.finish(Err(failure.into()));
        } else if (range.start | range.end) & (minimum - 1) != 0 {
            let why = format!(
                "bytes {} to {} are not aligned to the {minimum} that it requires",
                range.start, range.end
            );
            done.finish(Err(WriteFailure::Other(why)));
        } else if let Err(error) = submit(&self.client, done) {
            tracing::debug!(%error, "an NBD request that was not sent");
        }
    }
}

impl WriteBlocks for NbdWriter {
    fn write(&self, offset: u64, data: &[u8], done: Done) {
        let range = offset..offset.saturating_add(data.len() as u64);
        self.submit(range, done, |client, done| client.write(offset, data, done));
    }

    fn write_zeroes(&self, offset: u64, bytes: u64, done: Done) {
        let range = offset..offset.saturating_add(bytes);
        self.submit(range, done, |client, done| client.write_zeroes(offset, bytes, done));
    }

    fn flush(&self, done: Done) {
        self.submit(0..0, done, Client::flush);
    }

    fn abort(&self) {
        self.client.stop();
    }
}

impl From<Failure> for WriteFailure {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Disk { errno: Errno::NO_SPACE, .. } => Self::NoSpace,
            failure => Self::Other(failure.to_string()),
        }
    }
}
