//! An NBD export: of the storage's own server, or of a `qemu-nbd` that was
//! started for a format other than raw.

use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nbd::client::ClientError;
use nbd::reader::{Endpoint, ReadError, Reader, Socket};

use crate::{Buffer, Exporter, Failure, OpenError, Source};

/// A connection to an export, from which pages are read.
#[derive(Debug)]
pub struct NbdSource {
    /// Closed before the exporter ends.
    reader: Reader<Buffer>,
    _exporter: Option<Exporter>,
}

impl NbdSource {
    /// Connects to a server, for at most `in_flight` requests at a time.
    ///
    /// # Errors
    /// If there is no such server or export.
    pub fn connect(endpoint: &Endpoint, export: &str, in_flight: usize) -> Result<Self, OpenError> {
        let connected = Reader::connect(endpoint, export, in_flight);
        let reader = connected.map_err(|error| OpenError::Image {
            what: format!("'{export}' at {endpoint}"),
            reason: error.to_string(),
        })?;
        Ok(Self { reader, _exporter: None })
    }

    /// Reads from the exporter at the other end of `socket`, and keeps it running.
    pub(crate) fn of(
        exporter: Exporter,
        socket: UnixStream,
        in_flight: usize,
        patience: Duration,
    ) -> Result<Self, (Exporter, ClientError)> {
        match Reader::over(Socket::Unix(socket), "", in_flight, patience) {
            Ok(reader) => Ok(Self { reader, _exporter: Some(exporter) }),
            Err(error) => Err((exporter, error)),
        }
    }

    /// The range that is requested for this one, aligned as the server requires.
    fn span(&self, offset: u64, bytes: usize) -> Range<u64> {
        let minimum = u64::from(self.reader.info().sizes.minimum);
        let end = offset.saturating_add(bytes as u64).checked_next_multiple_of(minimum);
        offset - offset % minimum..end.unwrap_or(u64::MAX).min(self.reader.info().bytes)
    }
}

impl Source for NbdSource {
    fn bytes(&self) -> u64 {
        self.reader.info().bytes
    }

    fn read(
        &self,
        offset: u64,
        bytes: usize,
        buffer: &mut Buffer,
    ) -> Result<Range<usize>, Failure> {
        let span = self.span(offset, bytes);
        let head = usize::try_from(offset - span.start).unwrap_or(usize::MAX);
        let end = usize::try_from(span.end.saturating_sub(span.start)).unwrap_or(usize::MAX);
        let mut from = 0;
        while from < end {
            let to = end.min(from + self.reader.bytes_max());
            self.reader.read(span.start + from as u64, from..to, buffer).map_err(|error| {
                match error {
                    ReadError::Broken(_) => Failure::Broken(error.to_string()),
                    _ => Failure::Refused { offset, bytes, reason: error.to_string() },
                }
            })?;
            from = to;
        }
        Ok(head.min(end)..end.min(head + bytes))
    }

    fn span_bytes(&self, offset: u64, bytes: usize) -> usize {
        let span = self.span(offset, bytes);
        usize::try_from(span.end.saturating_sub(span.start)).unwrap_or(usize::MAX)
    }

    fn interrupt(&self) {
        self.reader.stop();
    }
}
