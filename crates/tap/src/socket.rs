//! Reads one of QEMU's connections.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, connect_unspec, recv};

use crate::error::TapError;

/// How long a thread with a partly filled batch waits for more data. QEMU writes 32 KiB at
/// a time, and more slowly than the tap reads: without this wait a batch would hold eight
/// pages in a buffer for 128. It is short, so that pages aren't late and no other thread
/// starves for the buffer.
const LINGER: Duration = Duration::from_millis(1);

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketRead {
    /// This many bytes, at least one.
    Bytes(usize),
    /// Nothing now: reading again would wait.
    Nothing,
    /// The end.
    End,
}

/// Reads available bytes without waiting.
fn read_ready(socket: &UnixStream, buffer: &mut [u8]) -> Result<SocketRead, TapError> {
    match recv(socket, buffer, RecvFlags::DONTWAIT) {
        // A reset ends QEMU's stream; the parser notices missing bytes.
        Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => Ok(SocketRead::End),
        Ok((count, _)) => Ok(SocketRead::Bytes(count)),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(SocketRead::Nothing),
        Err(error) => Err(reading(error.into())),
    }
}

/// Reads bytes that are available within [`LINGER`].
pub(crate) fn read_soon(socket: &UnixStream, buffer: &mut [u8]) -> Result<SocketRead, TapError> {
    match read_ready(socket, buffer)? {
        SocketRead::Nothing if wait(socket, Some(LINGER))? => read_ready(socket, buffer),
        found => Ok(found),
    }
}

/// Waits until a read would return, with bytes or the end; `false` if `limit` passed
/// first.
pub(crate) fn wait(socket: &UnixStream, limit: Option<Duration>) -> Result<bool, TapError> {
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    loop {
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], limit.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(reading(error.into())),
        }
    }
}

/// Reads available bytes, and waits if there are none.
pub(crate) fn read_some(
    mut socket: &UnixStream,
    buffer: &mut [u8],
) -> Result<SocketRead, TapError> {
    loop {
        return match socket.read(buffer) {
            Ok(0) => Ok(SocketRead::End),
            Ok(count) => Ok(SocketRead::Bytes(count)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(SocketRead::End),
            Err(error) => Err(reading(error)),
        };
    }
}

/// Reads to the end and discards the bytes.
pub(crate) fn discard(socket: &UnixStream) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(SocketRead::Bytes(_)) = read_some(socket, &mut buffer) {}
}

/// Closes a connection in both directions at once, even if other processes hold it open.
///
/// Over TCP, a peer that waits until more is read would learn of a `shutdown` only at its
/// next probe, which may take minutes; so it is sent a reset.
pub fn abort(socket: &UnixStream) {
    // Sockets other than TCP refuse this.
    let _ = connect_unspec(socket);
    // It may be closed already.
    let _ = socket.shutdown(std::net::Shutdown::Both);
}

/// Whether the same call may succeed a moment later: the system, or the agent, had no descriptor or
/// no memory left, or the peer has disconnected already.
#[must_use]
pub fn is_passing(error: &io::Error) -> bool {
    const PASSING: [Errno; 5] =
        [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::CONNABORTED];
    Errno::from_io_error(error).is_some_and(|errno| PASSING.contains(&errno))
}

/// Fills the buffer; the connection's end before that is an error in the middle of `what`.
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
