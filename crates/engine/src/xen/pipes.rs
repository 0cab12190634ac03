//! The pipes of an xl that migrates a domain.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use api::DomainEvent;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use xen::handshake::Answer;

/// The pipes, and the connection of the process that xl has started as its transport. That process
/// has the same pipes open: they are closed for xl once it has exited too.
#[derive(Debug)]
pub struct XlPipes {
    /// What xl writes.
    stream: File,
    /// What xl reads.
    answers: File,
    transport: UnixStream,
}

/// What was read from xl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FromXl {
    /// So many bytes.
    Bytes(usize),
    /// Nothing in time.
    Nothing,
    /// The other descriptor is readable.
    Woken,
    /// xl has closed its end.
    Closed,
}

impl XlPipes {
    /// The files that xl's transport has handed over, and its connection.
    #[must_use]
    pub fn new(stream: OwnedFd, answers: OwnedFd, transport: UnixStream) -> Self {
        Self { stream: stream.into(), answers: answers.into(), transport }
    }

    /// A handle of the transport's connection, which ends when the transport exits.
    ///
    /// # Errors
    /// If the system has no descriptor for it.
    pub fn transport(&self) -> io::Result<UnixStream> {
        self.transport.try_clone()
    }

    /// Notifies the transport that the migration has ended: it exits.
    pub fn ended(&self, moved: bool, text: &str) {
        self.tell(&DomainEvent::Ended { moved, text: text.to_owned() });
    }

    /// Notifies the transport of what happens.
    pub fn tell(&self, event: &DomainEvent) {
        let Ok(mut line) = serde_json::to_vec(event) else { return };
        line.push(b'\n');
        // It may have exited.
        let _ = (&self.transport).write_all(&line);
    }

    /// Writes an answer for xl: few bytes, for which a pipe has room.
    pub(crate) fn write(&self, answer: Answer) -> io::Result<()> {
        let mut text = Vec::new();
        answer.write(&mut text);
        (&self.answers).write_all(&text)
    }

    /// Reads what xl has written, if it comes within `limit`, and before `wake` is readable.
    pub(crate) fn read(
        &self,
        buffer: &mut [u8],
        wake: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> io::Result<FromXl> {
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // It is rounded up, so that this does not spin.
            let left = Timespec::try_from(left + Duration::from_micros(1)).ok();
            let other = wake.unwrap_or_else(|| self.stream.as_fd());
            let mut fds =
                [PollFd::new(&self.stream, PollFlags::IN), PollFd::new(&other, PollFlags::IN)];
            match poll(&mut fds, left.as_ref()) {
                Ok(0) => return Ok(FromXl::Nothing),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if wake.is_some() && !fds[1].revents().is_empty() {
                return Ok(FromXl::Woken);
            }
            return match (&self.stream).read(buffer) {
                Ok(0) => Ok(FromXl::Closed),
                Ok(count) => Ok(FromXl::Bytes(count)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
        }
    }

    /// Fills the buffer, for which xl has time until `until`.
    pub(crate) fn read_exact(&self, buffer: &mut [u8], until: Instant) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            let left = until.saturating_duration_since(Instant::now());
            match self.read(&mut buffer[filled..], None, left)? {
                FromXl::Bytes(count) => filled += count,
                FromXl::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
                FromXl::Nothing | FromXl::Woken => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
        Ok(())
    }

    /// Reads what xl still writes until it closes its end, for `limit` at most, however much comes.
    pub(crate) fn drain(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut buffer = [0; 4096];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            if !matches!(self.read(&mut buffer, None, left), Ok(FromXl::Bytes(_))) {
                return;
            }
        }
    }
}

impl Drop for XlPipes {
    fn drop(&mut self) {
        // Ends the thread that waits for its exit; it may have exited.
        let _ = self.transport.shutdown(Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn an_xl_that_never_stops_writing_is_not_read_for_ever() {
        let (stream, xl) = UnixStream::pair().unwrap();
        let (answers, transport) = UnixStream::pair().unwrap();
        let pipes = XlPipes::new(stream.into(), answers.into(), transport);
        thread::scope(|scope| {
            scope.spawn(|| while (&xl).write_all(&[0; 4096]).is_ok() {});
            pipes.drain(Duration::from_millis(100));
            // Ends the thread.
            drop(pipes);
        });
    }
}
