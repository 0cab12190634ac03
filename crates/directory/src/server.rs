//! Serves a directory on one connection.

use std::io::{self, BufReader, Read, Write};
use std::time::Instant;

use content::Name;

use crate::directory::{Answer, Directory};
use crate::host::HostName;
use crate::protocol::{HEADER_BYTES, ProtocolError, RequestHeader, write_answers, write_refusal};

/// Room for several of the longest requests.
const BUFFER_BYTES: usize = 1 << 17;

/// Why a connection ended early.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The client breaks the protocol.
    #[error("a client of the directory sent {0}")]
    Protocol(#[from] ProtocolError),
    /// The connection broke, or ended within a request.
    #[error("the connection of a client of the directory broke: {0}")]
    Io(#[from] io::Error),
}

/// Answers requests until the client ends the connection. Requests may be pipelined; replies have
/// their order. `may_speak_for` decides for which hosts the client may claim, hold, release and
/// forget.
///
/// # Errors
/// If the client breaks the protocol, or the connection breaks.
pub fn serve(
    reader: impl Read,
    mut writer: impl Write,
    directory: &dyn Directory,
    may_speak_for: &dyn Fn(&HostName) -> bool,
) -> Result<(), ServeError> {
    let mut reader = BufReader::with_capacity(BUFFER_BYTES, reader);
    let mut session = Session::new(directory, may_speak_for);
    while let Some(header) = read_header(&mut reader)? {
        session.body.resize(header.body_bytes(), 0);
        reader.read_exact(&mut session.body)?;
        session.answer(&header)?;
        // A client that sends many requests at once gets many replies at once.
        if !has_request(reader.buffer()) || session.replies.len() >= BUFFER_BYTES {
            writer.write_all(&session.replies)?;
            writer.flush()?;
            session.replies.clear();
        }
    }
    Ok(())
}

/// Buffers that are reused for each request.
struct Session<'a> {
    directory: &'a dyn Directory,
    may_speak_for: &'a dyn Fn(&HostName) -> bool,
    body: Vec<u8>,
    names: Vec<Name>,
    answers: Vec<Answer>,
    replies: Vec<u8>,
}

impl<'a> Session<'a> {
    fn new(directory: &'a dyn Directory, may_speak_for: &'a dyn Fn(&HostName) -> bool) -> Self {
        let (body, names, answers, replies) = Default::default();
        Self { directory, may_speak_for, body, names, answers, replies }
    }

    fn answer(&mut self, header: &RequestHeader) -> Result<(), ProtocolError> {
        let host = header.read_body(&self.body, &mut self.names)?;
        if !(self.may_speak_for)(&host) {
            let why = format!("this connection is not from the host {host}");
            write_refusal(header.id, &why, &mut self.replies);
            return Ok(());
        }
        let until = Instant::now() + header.wait;
        self.answers.clear();
        match self.directory.request(header.kind, &host, &self.names, &mut self.answers, until) {
            Ok(()) => write_answers(header.id, &self.answers, &mut self.replies),
            Err(error) => write_refusal(header.id, &error.to_string(), &mut self.replies),
        }
        Ok(())
    }
}

/// None at the end of the connection.
fn read_header(reader: &mut impl Read) -> Result<Option<RequestHeader>, ServeError> {
    let mut header = [0; HEADER_BYTES];
    let mut come = 0;
    while come < HEADER_BYTES {
        match reader.read(&mut header[come..]) {
            Ok(0) if come == 0 => return Ok(None),
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(more) => come += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Some(RequestHeader::parse(&header)?))
}

/// Whether a whole request has arrived. The rest of a partial one may come at any time.
fn has_request(came: &[u8]) -> bool {
    let header = came.first_chunk().and_then(|header| RequestHeader::parse(header).ok());
    header.is_some_and(|header| came.len() - HEADER_BYTES >= header.body_bytes())
}
