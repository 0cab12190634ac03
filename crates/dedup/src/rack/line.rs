//! Fetches content from another host of the rack.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use content::{Domain, Name};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use directory::HostName;
use identity::{Closer, Connection, Reader, Security, Writer};
use page::{Decoder, Encoding, PAGE_BYTES};
use parking_lot::Mutex;
use transport::{Endpoint, connect};
use wire::{HasHeader, Kind, Wants, WireError};

use super::{Mate, Rack};
use crate::destination::{CLAIM_MAX, Exchange, Provider};

/// A line that nothing is requested of for this long ends. By then, waiters for its content have
/// given up.
const IDLE: Duration = Duration::from_secs(60);
/// A host that could not be reached, or broke off, is not tried again for this long.
const REST: Duration = Duration::from_secs(2);

/// A connection to another host, or one that has failed a moment ago.
#[derive(Debug)]
pub(super) struct Line {
    number: u64,
    wants: Sender<Wants>,
    /// When content last arrived.
    heard: Mutex<Instant>,
    is_over: AtomicBool,
}

impl Rack {
    /// The number of a connection that fetches content of that host. None if there can't be one
    /// now.
    pub(crate) fn line(&self, exchange: &Arc<Exchange>, host: &HostName) -> Option<u64> {
        let mate = self.mates.get(host)?;
        let mut lines = self.lines.lock();
        if let Some(line) = lines.get(host) {
            let rests = line.is_over.load(Relaxed);
            if !rests || line.heard.lock().elapsed() < REST {
                return (!rests).then_some(line.number);
            }
        }
        let number = self.last_line.fetch_add(1, Relaxed) + 1;
        let (wants, wanted) = unbounded();
        let heard = Mutex::new(Instant::now());
        let line = Arc::new(Line { number, wants, heard, is_over: AtomicBool::new(false) });
        let run = {
            let (line, mate) = (Arc::downgrade(&line), mate.clone());
            let (exchange, security) = (Arc::downgrade(exchange), self.security.clone());
            move || run(number, &line, &exchange, &mate, &security, &wanted)
        };
        let thread = thread::Builder::new().name(format!("fetch-{number}"));
        thread.spawn(run).ok()?;
        lines.insert(host.clone(), line);
        Some(number)
    }

    /// Requests content by the line with that number. If it is over, its waiters find out by
    /// themselves.
    pub(crate) fn want(&self, host: &HostName, number: u64, domain: &Domain, names: Vec<Name>) {
        let line = self.lines.lock().get(host).map(Arc::clone);
        if let Some(line) = line.filter(|line| line.number == number) {
            // An error means that it is over.
            let _ = line.wants.send(Wants { domain: domain.clone(), names });
        }
    }

    /// Whether content that was requested of that line at time `since` won't arrive.
    pub(crate) fn is_lost(&self, number: u64, since: Instant, now: Instant) -> bool {
        let lines = self.lines.lock();
        let line = lines.values().find(|line| line.number == number);
        line.is_none_or(|line| {
            let since = since.max(*line.heard.lock());
            line.is_over.load(Relaxed) || now.duration_since(since) > CLAIM_MAX
        })
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
            *line.heard.lock() = Instant::now();
            line.is_over.store(true, Relaxed);
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
    wanted: &Receiver<Wants>,
) {
    let mut ends = Ends { line: Weak::clone(line), closer: None };
    let way = Endpoint { local: None, remote: mate.address };
    match connect(way, &mate.name, security, Kind::Content) {
        Ok(connection) => {
            ends.closer = Some(connection.closer());
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
    wanted: &Receiver<Wants>,
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
fn ask(writer: &mut Writer, line: &Weak<Line>, wanted: &Receiver<Wants>) {
    let mut out = Vec::new();
    loop {
        let first = match wanted.recv_timeout(IDLE) {
            Ok(first) => first,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
        };
        out.clear();
        for wants in std::iter::once(first).chain(wanted.try_iter().take(64)) {
            wants.write(&mut out);
        }
        let is_over = line.upgrade().is_none_or(|line| line.is_over.load(Relaxed));
        if is_over || writer.write_all(&out).and_then(|()| writer.flush()).is_err() {
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
    payload: Vec<u8>,
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
            self.payload.resize(header.payload_bytes as usize, 0);
            reader.read_exact(&mut self.payload)?;
            let bodies = match Encoding::try_from(header.encoding)? {
                Encoding::Raw if self.payload.len() != here.len() * PAGE_BYTES => {
                    return Err(WireError::Contradiction("raw content of another length").into());
                }
                Encoding::Raw => &self.payload[..],
                encoding => self.decoder.decode(encoding, &self.payload, here.len())?,
            };
            let Some(exchange) = self.exchange.upgrade() else { return Ok(()) };
            if let Some(line) = self.line.upgrade() {
                *line.heard.lock() = Instant::now();
            }
            let by = Provider::Peer(self.number);
            let wrong =
                exchange.brought(by, &here, &|nth| &bodies[nth * PAGE_BYTES..][..PAGE_BYTES]);
            if wrong > 0 {
                tracing::warn!(pages = wrong, "another host sent what it was not asked for");
            }
            exchange.not_brought(by, &not_here);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use content::NAME_BYTES;
    use wire::{Preamble, Reply, VERSION};

    use super::*;

    /// Accepts one connection as another host's agent does, and then sends nothing.
    fn mate() -> (Mate, thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let taking = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut preamble = [0; Preamble::BYTES];
            stream.read_exact(&mut preamble).unwrap();
            stream.write_all(&Reply::Welcome.to_bytes(VERSION)).unwrap();
            // Until it is closed.
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        });
        (Mate { name: "b".to_owned(), address }, taking)
    }

    /// A domain this long should never get here. If one does, later content still comes from that
    /// host, by another line.
    #[test]
    fn a_line_whose_thread_has_a_fault_is_over() {
        let (mate, taking) = mate();
        let (wants, wanted) = unbounded();
        let domain = Domain("a".repeat(65));
        wants.send(Wants { domain, names: vec![Name([1; NAME_BYTES])] }).unwrap();
        let line = Line {
            number: 1,
            wants,
            heard: Mutex::new(Instant::now()),
            is_over: AtomicBool::new(false),
        };
        let line = Arc::new(line);
        let exchange = Exchange::start(1 << 10, None).unwrap();
        let (its, of) = (Arc::downgrade(&line), Arc::downgrade(&exchange));
        let run = move || run(1, &its, &of, &mate, &Security::Plaintext, &wanted);
        assert!(thread::spawn(run).join().is_err());
        assert!(line.is_over.load(Relaxed));
        // The connection is closed, too.
        taking.join().unwrap();
    }
}
