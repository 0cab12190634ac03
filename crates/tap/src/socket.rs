//! Reading one of QEMU's connections.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, recv};

use crate::error::TapError;

/// What a read found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// This many bytes, at least one.
    Bytes(usize),
    /// Nothing now: reading again would wait.
    Nothing,
    /// The end.
    End,
}

/// Reads what is there, without waiting.
pub(crate) fn read_ready(socket: &UnixStream, buffer: &mut [u8]) -> Result<Found, TapError> {
    match recv(socket, buffer, RecvFlags::DONTWAIT) {
        Ok((0, _)) => Ok(Found::End),
        Ok((count, _)) => Ok(Found::Bytes(count)),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(Found::Nothing),
        // QEMU cut off is the end of what it says; what is missing shows.
        Err(rustix::io::Errno::CONNRESET) => Ok(Found::End),
        Err(error) => Err(reading(error.into())),
    }
}

/// Reads what is there, and waits if there is nothing.
pub(crate) fn read_some(mut socket: &UnixStream, buffer: &mut [u8]) -> Result<Found, TapError> {
    loop {
        return match socket.read(buffer) {
            Ok(0) => Ok(Found::End),
            Ok(count) => Ok(Found::Bytes(count)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(Found::End),
            Err(error) => Err(reading(error)),
        };
    }
}

/// Fills the buffer; an end before that is in the middle of `what`.
pub(crate) fn read_all(
    mut socket: &UnixStream,
    buffer: &mut [u8],
    what: &'static str,
) -> Result<(), TapError> {
    socket.read_exact(buffer).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            TapError::Truncated { what }
        }
        _ => reading(error),
    })
}

fn reading(source: io::Error) -> TapError {
    TapError::Io { what: "reading QEMU's stream", source }
}
