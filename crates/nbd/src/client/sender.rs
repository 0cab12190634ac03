//! Submits requests to the server.

use std::io::{self, IoSlice, Write};
use std::os::unix::net::UnixStream;

use super::Client;
use super::error::{ClientError, Failure};
use super::flight::{Operation, Part};
use super::split::{Piece, pieces};
use crate::ExportFlags;
use crate::handshake::PAYLOAD_BYTES_MAX;
use crate::transmission::{Command, RequestHeader};

/// Most zeroes in one request. A server may have to write them out, and should
/// not be busy with one request for too long.
const ZEROES_BYTES_MAX: u32 = 128 << 20;

/// For servers without WRITE_ZEROES.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// What follows a request's header.
#[derive(Clone, Copy)]
enum Payload<'a> {
    Nothing,
    /// The bytes of the whole range, of which each piece sends its part.
    Data(&'a [u8]),
    Zeroes,
}

impl<T: Send + 'static> Client<T> {
    /// Writes `data`. Waits while too much is in flight or in the socket; the
    /// caller may reuse `data` when it returns. After `Ok` the tag is returned with
    /// the outcome; after an error it is dropped.
    ///
    /// # Errors
    /// If the range is empty, not in the export, or not aligned as the server
    /// requires; or if the connection ended before.
    pub fn write(&self, offset: u64, data: &[u8], tag: T) -> Result<(), ClientError> {
        let bytes = data.len() as u64;
        self.check(offset, bytes)?;
        let range = pieces(offset, bytes, self.payload_bytes_max());
        self.submit(tag, Command::WRITE, range, Payload::Data(data))
    }

    /// Writes zeroes, which may become a hole. Sends them as bytes to a server
    /// without WRITE_ZEROES. Otherwise as [`Client::write`].
    ///
    /// # Errors
    /// As [`Client::write`].
    pub fn write_zeroes(&self, offset: u64, bytes: u64, tag: T) -> Result<(), ClientError> {
        self.check(offset, bytes)?;
        let known = self.info.flags.contains(ExportFlags::WRITE_ZEROES);
        let (command, bytes_max, payload) = if known {
            let aligned = ZEROES_BYTES_MAX.next_multiple_of(self.info.sizes.minimum);
            (Command::WRITE_ZEROES, aligned, Payload::Nothing)
        } else {
            (Command::WRITE, self.payload_bytes_max(), Payload::Zeroes)
        };
        self.submit(tag, command, pieces(offset, bytes, bytes_max), payload)
    }

    /// Makes requests durable that were answered before. Otherwise as [`Client::write`].
    ///
    /// # Errors
    /// If the connection ended before.
    pub fn flush(&self, tag: T) -> Result<(), ClientError> {
        let whole = [Piece { offset: 0, bytes: 0, last: true }];
        self.submit(tag, Command::FLUSH, whole.into_iter(), Payload::Nothing)
    }

    /// The longest payload: a multiple of the server's minimum.
    fn payload_bytes_max(&self) -> u32 {
        let sizes = self.info.sizes;
        let max = sizes.maximum.min(PAYLOAD_BYTES_MAX);
        (max - max % sizes.minimum).max(sizes.minimum)
    }

    fn check(&self, offset: u64, bytes: u64) -> Result<(), ClientError> {
        let export_bytes = self.info.bytes;
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= export_bytes);
        if bytes == 0 || !inside {
            return Err(ClientError::Outside { offset, bytes, export_bytes });
        }
        let minimum = self.info.sizes.minimum;
        if (offset | bytes) & (u64::from(minimum) - 1) != 0 {
            return Err(ClientError::Unaligned { offset, bytes, minimum });
        }
        Ok(())
    }

    fn submit(
        &self,
        tag: T,
        command: Command,
        range: impl Iterator<Item = Piece>,
        payload: Payload<'_>,
    ) -> Result<(), ClientError> {
        let _turn = self.turn.lock();
        let operation = self.begin(tag)?;
        let mut sent = 0;
        for Piece { offset, bytes, last } in range {
            let part = Part { command, offset, bytes };
            let Some(cookie) = self.launch(operation, part, last) else { break };
            let header = RequestHeader { flags: 0, command, cookie, offset, bytes }.to_bytes();
            let socket = &self.shared.socket;
            let written = match payload {
                Payload::Nothing => write_all(socket, &header, &[]),
                Payload::Data(data) => {
                    let data = &data[sent..sent + bytes as usize];
                    sent += data.len();
                    write_all(socket, &header, data)
                }
                Payload::Zeroes => write_zeroes(socket, &header, bytes as usize),
            };
            if let Err(error) = written {
                // Half a request may have been sent: nothing can follow it.
                self.shared.end(Failure::Broken(error.to_string()));
                break;
            }
        }
        // Also after a failure: the thread that reads replies returns the tag.
        Ok(())
    }

    fn begin(&self, tag: T) -> Result<Operation, ClientError> {
        let mut state = self.shared.state.lock();
        if let Some(ended) = &state.ended {
            return Err(ended.clone().into());
        }
        Ok(state.flight.begin(tag))
    }

    /// Waits for a place. `None` if the connection ended: then the operation
    /// has ended, too.
    fn launch(&self, operation: Operation, part: Part, last: bool) -> Option<u64> {
        let mut state = self.shared.state.lock();
        while state.ended.is_none() {
            if state.flight.has_room() {
                return Some(state.flight.launch(operation, part, last));
            }
            self.shared.changed.wait(&mut state);
        }
        None
    }
}

fn write_all(mut socket: &UnixStream, header: &[u8], data: &[u8]) -> io::Result<()> {
    let mut pieces = &mut [IoSlice::new(header), IoSlice::new(data)][..];
    while !pieces.is_empty() {
        match socket.write_vectored(pieces) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut pieces, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn write_zeroes(socket: &UnixStream, header: &[u8], bytes: usize) -> io::Result<()> {
    let first = bytes.min(ZEROES.len());
    write_all(socket, header, &ZEROES[..first])?;
    let mut left = bytes - first;
    while left > 0 {
        let piece = left.min(ZEROES.len());
        write_all(socket, &[], &ZEROES[..piece])?;
        left -= piece;
    }
    Ok(())
}
