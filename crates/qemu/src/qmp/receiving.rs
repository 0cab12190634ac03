//! The receiving half of a connection.

use std::io::{self, ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Reads up to a deadline, while there is one: not each read has so long, but all of
/// them together.
pub(super) struct Receiving {
    stream: UnixStream,
    deadline: Option<Instant>,
}

impl Receiving {
    pub(super) fn until(stream: UnixStream, deadline: Instant) -> Self {
        Self { stream, deadline: Some(deadline) }
    }

    /// From now on a read waits for as long as it takes.
    pub(super) fn without_end(&mut self) -> io::Result<()> {
        self.deadline = None;
        self.stream.set_read_timeout(None)
    }
}

impl Read for Receiving {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if let Some(deadline) = self.deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left))?;
        }
        self.stream.read(into)
    }
}
