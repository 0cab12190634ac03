//! The receiving half of a connection.

use std::io::{self, ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Reads with a deadline, if there is one, for all reads together and not for each.
pub(super) struct Receiving {
    stream: UnixStream,
    deadline: Option<Instant>,
}

impl Receiving {
    pub(super) fn until(stream: UnixStream, deadline: Instant) -> Self {
        Self { stream, deadline: Some(deadline) }
    }

    /// Removes the deadline: from now on reads wait without limit.
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
