//! A client that reads, for any number of threads at once.
//!
//! Each thread sends its request, lends its buffer and waits. One of the waiting
//! threads reads the socket for all: each reply goes from the socket into the
//! buffer of the thread that requested it. When its own reply has arrived,
//! another thread takes over. So there is no extra thread and no copy between the
//! socket and the threads that use the data.

mod places;
mod socket;

use std::io::{self, Read, Write};
use std::ops::Range;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::client::{ClientError, ExportInfo, PATIENCE, choose};
use crate::handshake::PAYLOAD_BYTES_MAX;
use crate::transmission::{Command, RequestHeader, SimpleReply};
use crate::{Errno, ProtocolError};

pub(crate) use places::{Answered, Places};
pub use socket::{Endpoint, Socket};

/// Why nothing was read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The server replied with an error; other ranges may be readable.
    #[error("the NBD server did not read {bytes} bytes at {offset}: {errno}")]
    Refused {
        /// Where.
        offset: u64,
        /// How much.
        bytes: usize,
        /// The error.
        errno: Errno,
    },
    /// No request was sent: the range is not in the export, not aligned as the server
    /// requires, longer than it returns at once, or not in the buffer.
    #[error("the NBD export can't read {bytes} bytes at {offset}")]
    Unfit {
        /// Where.
        offset: u64,
        /// How much.
        bytes: usize,
    },
    /// The connection has ended.
    #[error("the connection to the NBD server broke: {0}")]
    Broken(String),
}

/// A connection to one export, to read from. Threads lend it their buffers
/// while they wait.
#[derive(Debug)]
pub struct Reader<B> {
    socket: Socket,
    info: ExportInfo,
    sending: Mutex<()>,
    state: Mutex<State<B>>,
    /// For each place, notified when its reply has arrived, or its thread has to read
    /// the socket.
    answered: Vec<Condvar>,
    /// Notified when a place is free.
    room: Condvar,
}

#[derive(Debug)]
struct State<B> {
    places: Places<B>,
    /// Whether a thread reads the socket.
    led: bool,
    broken: Option<String>,
}

impl<B: AsMut<[u8]> + Default> Reader<B> {
    /// Connects to a server and chooses an export. At most `in_flight_max`
    /// requests are unanswered; the next one waits.
    ///
    /// # Errors
    /// If no server listens, or the export doesn't exist.
    pub fn connect(
        endpoint: &Endpoint,
        export: &str,
        in_flight_max: usize,
    ) -> Result<Self, ClientError> {
        let connected = Socket::connect(endpoint, PATIENCE);
        let socket = connected
            .map_err(|source| ClientError::Connect { path: endpoint.to_string().into(), source })?;
        Self::over(socket, export, in_flight_max, PATIENCE)
    }

    /// As [`Reader::connect`], over a connected socket. The server may take
    /// `patience` for each message of the negotiation.
    ///
    /// # Errors
    /// As [`Reader::connect`].
    pub fn over(
        socket: Socket,
        export: &str,
        in_flight_max: usize,
        patience: Duration,
    ) -> Result<Self, ClientError> {
        socket.set_patience(Some(patience)).map_err(ClientError::Handshake)?;
        let info = choose(&socket, &socket, export)?;
        socket.set_patience(None).map_err(ClientError::Handshake)?;
        let places = in_flight_max.clamp(1, 1024);
        Ok(Self {
            socket,
            info,
            sending: Mutex::new(()),
            state: Mutex::new(State { places: Places::new(places), led: false, broken: None }),
            answered: std::iter::repeat_with(Condvar::new).take(places).collect(),
            room: Condvar::new(),
        })
    }

    /// What the server reports about the export.
    #[must_use]
    pub fn info(&self) -> &ExportInfo {
        &self.info
    }

    /// The most that can be read at once.
    #[must_use]
    pub fn bytes_max(&self) -> usize {
        let sizes = self.info.sizes;
        let max = sizes.maximum.min(PAYLOAD_BYTES_MAX);
        (max - max % sizes.minimum).max(sizes.minimum) as usize
    }

    /// Reads as many bytes as `into` has, into that range of the buffer.
    ///
    /// # Errors
    /// If the server fails, or the range can't be requested.
    pub fn read(&self, offset: u64, into: Range<usize>, buffer: &mut B) -> Result<(), ReadError> {
        let bytes = self.check(offset, &into, buffer)?;
        let (place, cookie) = self.enter(into, std::mem::take(buffer));
        let header = RequestHeader { flags: 0, command: Command::READ, cookie, offset, bytes };
        let sent = {
            let _turn = self.sending.lock();
            (&self.socket).write_all(&header.to_bytes())
        };
        if let Err(error) = sent {
            self.break_off(error.to_string());
        }
        let (lent, outcome) = self.wait(place);
        *buffer = lent;
        match outcome {
            Ok(Ok(())) => Ok(()),
            Ok(Err(errno)) => Err(ReadError::Refused { offset, bytes: bytes as usize, errno }),
            Err(why) => Err(ReadError::Broken(why)),
        }
    }

    /// Ends the connection. Waiting reads fail.
    pub fn stop(&self) {
        self.break_off("it was stopped".to_owned());
    }

    fn check(&self, offset: u64, into: &Range<usize>, buffer: &mut B) -> Result<u32, ReadError> {
        let bytes = into.len();
        let end = offset.checked_add(bytes as u64);
        let inside = bytes > 0 && end.is_some_and(|end| end <= self.info.bytes);
        let minimum = u64::from(self.info.sizes.minimum);
        let aligned = (offset | bytes as u64) & (minimum - 1) == 0;
        let fits = bytes <= self.bytes_max() && buffer.as_mut().get(into.clone()).is_some();
        match u32::try_from(bytes) {
            Ok(bytes) if inside && aligned && fits => Ok(bytes),
            _ => Err(ReadError::Unfit { offset, bytes }),
        }
    }

    fn enter(&self, into: Range<usize>, buffer: B) -> (usize, u64) {
        let mut state = self.state.lock();
        while !state.places.has_room() {
            self.room.wait(&mut state);
        }
        // Also when the connection broke: the place gives the buffer back.
        state.places.enter(into, buffer)
    }

    /// Waits for the reply, and reads the socket if no other thread does.
    fn wait(&self, place: usize) -> (B, Result<Result<(), Errno>, String>) {
        let mut state = self.state.lock();
        loop {
            if let Some((buffer, outcome)) = state.places.take(place) {
                self.room.notify_one();
                return (buffer, Ok(outcome));
            }
            if let Some(why) = state.broken.clone()
                && let Some(buffer) = state.places.give_up(place)
            {
                self.room.notify_one();
                return (buffer, Err(why));
            }
            if state.led || state.broken.is_some() {
                self.answered[place].wait(&mut state);
                continue;
            }
            state.led = true;
            drop(state);
            let led = self.lead(place);
            state = self.state.lock();
            state.led = false;
            let Err(why) = led else {
                if let Some(next) = state.places.waiting(place) {
                    self.answered[next].notify_one();
                }
                continue;
            };
            // Before another thread could continue reading in the middle of a reply.
            state.broken.get_or_insert(why.clone());
            drop(state);
            self.break_off(why);
            state = self.state.lock();
        }
    }

    /// Reads replies until this place's has arrived.
    fn lead(&self, place: usize) -> Result<(), String> {
        let mut header = [0; SimpleReply::BYTES];
        loop {
            (&self.socket).read_exact(&mut header).map_err(|error| why(&error))?;
            let reply = SimpleReply::parse(&header);
            let answered = reply.and_then(|reply| self.state.lock().places.answered(reply));
            let Answered { place: whose, payload } =
                answered.map_err(|error: ProtocolError| error.to_string())?;
            if let Some((range, mut buffer)) = payload {
                let room = buffer.as_mut().get_mut(range.clone()).unwrap_or_default();
                let read = (&self.socket).read_exact(room);
                let mut state = self.state.lock();
                state.places.filled(whose, range, buffer, read.is_ok());
                drop(state);
                read.map_err(|error| why(&error))?;
            }
            if whose == place {
                return Ok(());
            }
            self.answered[whose].notify_one();
        }
    }

    fn break_off(&self, why: String) {
        self.state.lock().broken.get_or_insert(why);
        self.socket.shut_down();
        for waiting in &self.answered {
            waiting.notify_all();
        }
    }
}

impl<B> Drop for Reader<B> {
    fn drop(&mut self) {
        let header = RequestHeader {
            flags: 0,
            command: Command::DISCONNECT,
            cookie: 0,
            offset: 0,
            bytes: 0,
        };
        // A server that has disconnected, or doesn't read, needs no DISCONNECT.
        if self.socket.set_patience(Some(Duration::from_millis(10))).is_ok() {
            let _ = (&self.socket).write_all(&header.to_bytes());
        }
    }
}

fn why(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the other end closed it".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests;
