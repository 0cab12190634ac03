//! Reads a client's requests, blocking; those that can't be served are answered
//! here.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;

use super::error::ServerError;
use super::replier::Replier;
use crate::Errno;
use crate::handshake::PAYLOAD_BYTES_MAX;
use crate::transmission::{Command, NO_HOLE, RequestHeader};

/// A client's request, whose range lies in the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Identifies the request in its reply.
    pub cookie: u64,
    /// What to do.
    pub kind: RequestKind,
    /// Where; 0 for a flush.
    pub offset: u64,
    /// How much, at least 1; 0 for a flush.
    pub bytes: u32,
}

/// What a client can request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// To write the payload that follows, of [`Request::bytes`] bytes, at
    /// most 32 MiB.
    Write,
    /// To write zeroes. A flag that they must take space is not passed on: QEMU
    /// sets it for every hole, because a mirror's target is opened without
    /// `discard=unmap`.
    WriteZeroes,
    /// To discard the content. It may then read as anything, so as zeroes.
    Trim,
    /// To make requests durable that were answered before.
    Flush,
}

/// The requests of one client, in order.
#[derive(Debug)]
pub struct Requests {
    reader: RequestReader<UnixStream>,
    replier: Replier,
}

impl Requests {
    pub(super) fn new(socket: UnixStream, export_bytes: u64, replier: Replier) -> Self {
        Self { reader: RequestReader::new(socket, export_bytes), replier }
    }

    /// Waits for the next request; `None` if the client disconnects. Requests that
    /// can't be served are answered, and the unread rest of a payload is skipped.
    ///
    /// # Errors
    /// If the client hangs up, or sends something other than requests.
    pub fn next_request(&mut self) -> Result<Option<Request>, ServerError> {
        loop {
            match self.reader.next()? {
                Step::Serve(request) => return Ok(Some(request)),
                Step::Answer { cookie, outcome } => {
                    if let Err(errno) = outcome {
                        tracing::debug!(cookie, %errno, "an NBD request that can't be served");
                    }
                    self.replier.answer(cookie, outcome)?;
                }
                Step::Goodbye => return Ok(None),
            }
        }
    }

    /// Reads the next bytes of the last request's payload: all of `into`.
    ///
    /// # Errors
    /// If the client hangs up.
    ///
    /// # Panics
    /// If `into` is longer than [`Requests::payload_left`].
    pub fn read_payload(&mut self, into: &mut [u8]) -> Result<(), ServerError> {
        self.reader.read_payload(into)
    }

    /// How much of the last request's payload is not read yet.
    #[must_use]
    pub fn payload_left(&self) -> u32 {
        self.reader.payload_left
    }
}

/// [`Requests`] without a socket.
#[derive(Debug)]
pub(crate) struct RequestReader<R> {
    from: R,
    export_bytes: u64,
    pub(crate) payload_left: u32,
}

/// What to do with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Return it to the caller.
    Serve(Request),
    /// Answer it at once.
    Answer { cookie: u64, outcome: Result<(), Errno> },
    /// The client disconnects.
    Goodbye,
}

impl<R: Read> RequestReader<R> {
    pub(crate) fn new(from: R, export_bytes: u64) -> Self {
        Self { from, export_bytes, payload_left: 0 }
    }

    pub(crate) fn next(&mut self) -> Result<Step, ServerError> {
        self.skip_payload()?;
        let mut header = [0; RequestHeader::BYTES];
        self.from.read_exact(&mut header).map_err(ServerError::reading)?;
        let header = RequestHeader::parse(&header)?;
        let step = judge(header, self.export_bytes);
        if header.command == Command::WRITE {
            self.payload_left = header.bytes;
            if !matches!(step, Step::Serve(_)) {
                // The client may send all of it before it reads the reply.
                self.skip_payload()?;
            }
        }
        Ok(step)
    }

    pub(crate) fn read_payload(&mut self, into: &mut [u8]) -> Result<(), ServerError> {
        let bytes = u32::try_from(into.len()).ok().filter(|bytes| *bytes <= self.payload_left);
        let bytes = bytes.expect("requested more than the payload that is left");
        self.from.read_exact(into).map_err(ServerError::reading)?;
        self.payload_left -= bytes;
        Ok(())
    }

    fn skip_payload(&mut self) -> Result<(), ServerError> {
        if self.payload_left == 0 {
            return Ok(());
        }
        let bytes = u64::from(self.payload_left);
        let skipped = io::copy(&mut self.from.by_ref().take(bytes), &mut io::sink());
        if skipped.map_err(ServerError::reading)? < bytes {
            return Err(ServerError::HungUp);
        }
        self.payload_left = 0;
        Ok(())
    }
}

/// Decides whether an export of that size can serve a request.
fn judge(header: RequestHeader, export_bytes: u64) -> Step {
    let RequestHeader { flags, command, cookie, offset, bytes } = header;
    let refuse = |errno| Step::Answer { cookie, outcome: Err(errno) };
    let (kind, flags_known) = match command {
        Command::DISCONNECT => return Step::Goodbye,
        Command::FLUSH if flags == 0 => {
            let kind = RequestKind::Flush;
            return Step::Serve(Request { cookie, kind, offset: 0, bytes: 0 });
        }
        Command::READ => return refuse(Errno::NOT_PERMITTED),
        Command::WRITE => (RequestKind::Write, 0),
        Command::WRITE_ZEROES => (RequestKind::WriteZeroes, NO_HOLE),
        Command::TRIM => (RequestKind::Trim, 0),
        _ => return refuse(Errno::INVALID),
    };
    let too_long = kind == RequestKind::Write && bytes > PAYLOAD_BYTES_MAX;
    if flags & !flags_known != 0 || too_long {
        return refuse(Errno::INVALID);
    }
    if offset.checked_add(bytes.into()).is_none_or(|end| end > export_bytes) {
        return refuse(Errno::NO_SPACE);
    }
    if bytes == 0 {
        return Step::Answer { cookie, outcome: Ok(()) };
    }
    Step::Serve(Request { cookie, kind, offset, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPORT: u64 = 64 << 20;

    fn judged(command: u16, flags: u16, offset: u64, bytes: u32) -> Step {
        let command = Command(command);
        judge(RequestHeader { flags, command, cookie: 9, offset, bytes }, EXPORT)
    }

    #[test]
    fn valid_requests_are_served() {
        let table = [
            (1, 0, 0, 1, RequestKind::Write),
            (1, 0, 32 << 20, 32 << 20, RequestKind::Write),
            (1, 0, EXPORT - 512, 512, RequestKind::Write),
            (4, 0, 0, 64 << 20, RequestKind::Trim),
            (6, 0, 0, 64 << 20, RequestKind::WriteZeroes),
            (6, NO_HOLE, 512, 4096, RequestKind::WriteZeroes),
        ];
        for (command, flags, offset, bytes, kind) in table {
            let served = Step::Serve(Request { cookie: 9, kind, offset, bytes });
            assert_eq!(judged(command, flags, offset, bytes), served);
        }
        let flush = Request { cookie: 9, kind: RequestKind::Flush, offset: 0, bytes: 0 };
        assert_eq!(judged(3, 0, 7, 7), Step::Serve(flush));
        assert_eq!(judged(2, 0xffff, u64::MAX, u32::MAX), Step::Goodbye);
    }

    #[test]
    fn other_requests_get_the_right_error() {
        let table = [
            (0, 0, 0, 512, Errno::NOT_PERMITTED),
            (1, 0, 0, (32 << 20) + 1, Errno::INVALID),
            (1, 0, EXPORT - 511, 512, Errno::NO_SPACE),
            (1, 0, u64::MAX, 512, Errno::NO_SPACE),
            (1, 1, 0, 512, Errno::INVALID),
            (3, 1, 0, 0, Errno::INVALID),
            (4, 1, 0, 512, Errno::INVALID),
            (6, 1 << 4, 0, 512, Errno::INVALID),
            (6, 0, EXPORT, 1, Errno::NO_SPACE),
            (5, 0, 0, 512, Errno::INVALID),
            (7, 0, 0, 512, Errno::INVALID),
            (0xffff, 0, 0, 0, Errno::INVALID),
        ];
        for (command, flags, offset, bytes, errno) in table {
            let refused = Step::Answer { cookie: 9, outcome: Err(errno) };
            assert_eq!(judged(command, flags, offset, bytes), refused, "{command} {flags}");
        }
        let nothing = Step::Answer { cookie: 9, outcome: Ok(()) };
        assert_eq!(judged(1, 0, EXPORT, 0), nothing);
    }

    #[test]
    fn payloads_are_read_in_pieces_or_skipped() {
        let header = |command, cookie, offset, bytes| {
            RequestHeader { flags: 0, command, cookie, offset, bytes }.to_bytes().to_vec()
        };
        let mut sent = header(Command::WRITE, 1, 0, 6);
        sent.extend_from_slice(b"abcdef");
        // Refused, with its payload.
        sent.extend(header(Command::WRITE, 2, EXPORT, 3));
        sent.extend_from_slice(b"xyz");
        sent.extend(header(Command::FLUSH, 3, 0, 0));
        sent.extend(header(Command::WRITE, 4, 0, 9));
        sent.extend_from_slice(b"cut");

        let mut reader = RequestReader::new(&sent[..], EXPORT);
        assert!(matches!(reader.next(), Ok(Step::Serve(Request { cookie: 1, .. }))));
        let mut piece = [0; 4];
        reader.read_payload(&mut piece).unwrap();
        assert_eq!((&piece, reader.payload_left), (b"abcd", 2));
        assert!(matches!(reader.next(), Ok(Step::Answer { cookie: 2, outcome: Err(_) })));
        assert!(matches!(reader.next(), Ok(Step::Serve(Request { cookie: 3, .. }))));
        assert!(matches!(reader.next(), Ok(Step::Serve(Request { cookie: 4, .. }))));
        assert!(matches!(reader.next(), Err(ServerError::HungUp)));
    }
}
