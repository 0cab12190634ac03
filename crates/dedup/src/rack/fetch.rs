//! Fetches content from another host of the rack.

use std::io::{Read, Write};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, unbounded};
use directory::HostName;
use identity::{Closer, Connection, Reader, Security, Writer};
use page::{Buffer, Decoder, Encoding, PAGE_BYTES};
use transport::{Endpoint, connect};
use wire::{ContentRequest, HasHeader, Kind, WireError};

use super::line::{Line, State};
use super::{Mate, Rack};
use crate::destination::{Exchange, Provider};

/// A line that nothing is requested of for this long ends. By then, waiters for its content have
/// given up.
const IDLE: Duration = Duration::from_secs(60);
/// A host that could not be reached, or broke off, is not tried again for this long. After that
/// nothing is requested of it before it is connected: pages would wait until the attempt has timed
/// out, again in each move while the directory says that the host has their content.
const REST: Duration = Duration::from_secs(2);

impl Rack {
    /// The number of a connection that fetches content of that host. None if there can't be one
    /// now.
    pub(crate) fn line(&self, exchange: &Arc<Exchange>, host: &HostName) -> Option<u64> {
        let mate = self.mates.get(host)?;
        let mut lines = self.lines.lock();
        let before = lines.get(host);
        let state = match before.map(|line| (line, line.state())) {
            Some((line, State::Doubtful | State::Usable)) => return line.usable(),
            Some((line, State::Failed)) if line.received_at.lock().elapsed() < REST => return None,
            Some((_, State::Failed)) => State::Doubtful,
            Some((_, State::Idle)) | None => State::Usable,
        };
        let number = self.last_line.fetch_add(1, Relaxed) + 1;
        let (wants, wanted) = unbounded();
        let line = Arc::new(Line::new(number, wants, state));
        let run = {
            let (line, mate) = (Arc::downgrade(&line), mate.clone());
            let (exchange, security) = (Arc::downgrade(exchange), self.security.clone());
            move || run(number, &line, &exchange, &mate, &security, &wanted)
        };
        let thread = thread::Builder::new().name(format!("fetch-{number}"));
        thread.spawn(run).ok()?;
        lines.insert(host.clone(), Arc::clone(&line));
        line.usable()
    }
}

/// Ends a line with either of its threads, even by a panic: closes its connection, so that
/// waiters for its content find out.
struct Ends {
    line: Weak<Line>,
    closer: Option<Closer>,
}

impl Drop for Ends {
    fn drop(&mut self) {
        if let Some(closer) = &self.closer {
            closer.close();
        }
        if let Some(line) = self.line.upgrade() {
            *line.received_at.lock() = Instant::now();
            let mut state = line.state.lock();
            if *state != State::Idle {
                *state = State::Failed;
            }
        }
    }
}

/// Makes the connection, and uses it until it breaks or is idle.
fn run(
    number: u64,
    line: &Weak<Line>,
    exchange: &Weak<Exchange>,
    mate: &Mate,
    security: &Security,
    wanted: &Receiver<ContentRequest>,
) {
    let mut ends = Ends { line: Weak::clone(line), closer: None };
    let way = Endpoint { local: None, remote: mate.address };
    match connect(way, &mate.name, security, Kind::Content) {
        Ok(connection) => {
            ends.closer = Some(connection.closer());
            if let Some(line) = line.upgrade() {
                *line.state.lock() = State::Usable;
            }
            carry(number, line, exchange, connection, wanted);
        }
        Err(error) => tracing::warn!(%error, host = mate.name, "its content is not used"),
    }
}

fn carry(
    number: u64,
    line: &Weak<Line>,
    exchange: &Weak<Exchange>,
    connection: Connection,
    wanted: &Receiver<ContentRequest>,
) {
    let closer = connection.closer();
    let (reader, mut writer) = connection.into_halves();
    let reading = {
        let (line, exchange) = (Weak::clone(line), Weak::clone(exchange));
        let ends = Ends { line: Weak::clone(&line), closer: Some(closer.clone()) };
        thread::Builder::new().name(format!("fetched-{number}")).spawn(move || {
            let _ends = ends;
            let mut taking = Taking { number, line, exchange, ..Taking::default() };
            if let Err(error) = taking.all(reader) {
                tracing::debug!(%error, "content of another host ended");
            }
        })
    };
    if reading.is_ok() {
        ask(&mut writer, line, wanted);
    }
    closer.close();
    if let Ok(reading) = reading {
        // It has logged why it ended.
        let _ = reading.join();
    }
}

/// Writes requests until there have been none for a while.
fn ask(writer: &mut Writer, line: &Weak<Line>, wanted: &Receiver<ContentRequest>) {
    let mut out = Vec::new();
    loop {
        let first = match wanted.recv_timeout(IDLE) {
            Ok(first) => first,
            Err(RecvTimeoutError::Timeout) => {
                if let Some(line) = line.upgrade() {
                    *line.state.lock() = State::Idle;
                }
                return;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        };
        out.clear();
        for wants in std::iter::once(first).chain(wanted.try_iter().take(64)) {
            wants.write(&mut out);
        }
        let has_ended = line.upgrade().is_none_or(|line| line.has_ended());
        if has_ended || writer.write_all(&out).and_then(|()| writer.flush()).is_err() {
            return;
        }
    }
}

/// Why a line ends.
#[derive(Debug, thiserror::Error)]
enum LineError {
    #[error("it broke: {0}")]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Decode(#[from] page::DecodeError),
}

/// Reads answers, with buffers that are reused.
#[derive(Default)]
struct Taking {
    number: u64,
    line: Weak<Line>,
    exchange: Weak<Exchange>,
    names: Vec<u8>,
    payload: Buffer,
    decoder: Decoder,
}

impl Taking {
    /// Takes answers until the end of the connection.
    fn all(&mut self, mut reader: Reader) -> Result<(), LineError> {
        let mut head = [0; HasHeader::BYTES];
        loop {
            reader.read_exact(&mut head)?;
            let header = HasHeader::parse(&head)?;
            self.names.resize(header.names_bytes(), 0);
            reader.read_exact(&mut self.names)?;
            let (here, not_here) = header.names(&self.names)?;
            let payload = self.payload.room(header.payload_bytes as usize);
            reader.read_exact(payload)?;
            let bodies = match Encoding::try_from(header.encoding)? {
                Encoding::Raw if payload.len() != here.len() * PAGE_BYTES => {
                    return Err(WireError::Contradiction("raw content of another length").into());
                }
                Encoding::Raw => payload,
                encoding => self.decoder.decode(encoding, payload, here.len())?,
            };
            let Some(exchange) = self.exchange.upgrade() else { return Ok(()) };
            if let Some(line) = self.line.upgrade() {
                *line.received_at.lock() = Instant::now();
            }
            let by = Provider::Peer(self.number);
            let wrong =
                exchange.brought(by, &here, &|nth| &bodies[nth * PAGE_BYTES..][..PAGE_BYTES]);
            if wrong > 0 {
                tracing::warn!(pages = wrong, "another host sent content that was not requested");
            }
            exchange.not_brought(by, &not_here);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use content::{Domain, NAME_BYTES, Name};
    use directory::{Embedded, Limits};
    use wire::{Preamble, Reply, VERSION};

    use super::*;
    use crate::rack::DirectoryAt;

    /// Accepts one connection as another host's agent does.
    fn welcome(listener: &TcpListener) -> TcpStream {
        let (mut stream, _) = listener.accept().unwrap();
        let mut preamble = [0; Preamble::BYTES];
        stream.read_exact(&mut preamble).unwrap();
        stream.write_all(&Reply::Welcome.to_bytes(VERSION)).unwrap();
        stream
    }

    /// A host that can be reached, and sends nothing.
    fn mate() -> (Mate, thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let taking = thread::spawn(move || {
            // Until it is closed.
            let _ = std::io::copy(&mut welcome(&listener), &mut std::io::sink());
        });
        (Mate { name: "b".to_owned(), address }, taking)
    }

    #[test]
    fn a_host_that_failed_costs_no_wait_and_is_used_again_once_it_is_connected() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mate = Mate { name: "b".to_owned(), address: listener.local_addr().unwrap() };
        let directory = DirectoryAt::Here(Arc::new(Embedded::new(Limits::default())));
        let rack = Rack::new("a", vec![mate], Security::Plaintext, directory).unwrap();
        let exchange = Exchange::start(1 << 10, None).unwrap();
        let host = HostName::new("b").unwrap();
        let line = || rack.line(&exchange, &host);
        // It can be reached, but breaks off.
        let fails = || drop(listener.accept().unwrap());
        let rests = || {
            let line = Arc::clone(&rack.lines.lock()[&host]);
            while !line.has_ended() {
                thread::yield_now();
            }
            assert_eq!(line.state(), State::Failed);
            *line.received_at.lock() -= REST;
        };
        assert_eq!(line(), Some(1), "there is no reason to doubt it");
        fails();
        rests();
        for _ in 0..2 {
            assert_eq!((line(), line()), (None, None), "it is only tried");
            fails();
            rests();
        }
        assert_eq!(line(), None);
        let _stream = welcome(&listener);
        while line().is_none() {
            thread::yield_now();
        }
        assert_eq!(line(), Some(4));
    }

    /// A domain this long should never get here. If one does, later content still comes from that
    /// host, by another line.
    #[test]
    fn a_line_whose_thread_has_a_fault_is_over() {
        let (mate, taking) = mate();
        let (wants, wanted) = unbounded();
        let domain = Domain("a".repeat(65));
        wants.send(ContentRequest { domain, names: vec![Name([1; NAME_BYTES])] }).unwrap();
        let line = Arc::new(Line::new(1, wants, State::Usable));
        let exchange = Exchange::start(1 << 10, None).unwrap();
        let (its, of) = (Arc::downgrade(&line), Arc::downgrade(&exchange));
        let run = move || run(1, &its, &of, &mate, &Security::Plaintext, &wanted);
        assert!(thread::spawn(run).join().is_err());
        assert!(line.has_ended());
        // The connection is closed, too.
        taking.join().unwrap();
    }
}
