//! Sends content to other hosts of the rack: what they request, as far as it is here or arrives
//! here from a source.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use content::{Domain, Name};
use crossbeam_channel::{Receiver, Sender, bounded, select, unbounded};
use identity::{Connection, Writer};
use page::{BATCH_PAGES, Borrowed, Buffer, Encoder, Encoding, PAGE_BYTES, Reserve};
use transport::Overflow;
use wire::{ContentRequest, HasHeader, WireError};

use super::effort::Alone;
use super::remote_waiter::{Come, RemoteWaiter};
use crate::destination::{Sharing, Waiter};

/// The most requests without an answer. After that, requests are not read.
const ASKED_MAX: usize = 64;
/// The most contents that one peer waits for.
const WAITING_MAX: usize = 1 << 18;
/// What is kept for one of them: a waiter, and then a message to the thread that answers.
const WAITER_BYTES: usize = 128;
/// The most memory for waiters of all connections together, beyond what each has by itself: two
/// hosts that wait for all that they may don't keep the others out.
pub const SERVED_BYTES_MAX: usize = 3 * WAITING_MAX * WAITER_BYTES;
/// What each connection has by itself: as much as in requests that have no answer yet.
const OWN_BYTES: usize = ASKED_MAX * BATCH_PAGES * WAITER_BYTES;

/// Answers requests until the peer ends the connection, and nothing here waits for it any more. What
/// the peer waits for is kept in this memory, of [`SERVED_BYTES_MAX`], which all connections share.
///
/// # Errors
/// If the peer breaks the protocol, or the connection breaks.
pub fn serve(
    sharing: &Arc<Sharing>,
    connection: Connection,
    memory: &Arc<Reserve>,
) -> Result<(), WireError> {
    let closer = connection.closer();
    let (mut reader, writer) = connection.into_halves();
    let (ask, asked) = bounded(ASKED_MAX);
    let (come, in_flight) = unbounded();
    let mut answering = Answering {
        sharing: Arc::clone(sharing),
        writer,
        come,
        is_over: Arc::default(),
        waiting: 0,
        memory: Borrowed::new(memory, OWN_BYTES),
        work: Work::default(),
    };
    let ended = closer.clone();
    let answering = thread::Builder::new().name("content".to_owned()).spawn(move || {
        // The reading thread sees that the connection is closed.
        let _ = answering.all(&asked, &in_flight);
        ended.close();
        drop(asked);
        answering.end(&in_flight);
    })?;
    let mut head = [0; ContentRequest::HEAD_BYTES];
    let mut rest = Vec::new();
    let outcome = loop {
        match read_one(&mut reader, &mut head, &mut rest) {
            // An error means that answers can't be written any more.
            Ok(Some(wants)) => match ask.send(wants) {
                Ok(()) => {}
                Err(_) => break Ok(()),
            },
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    drop(ask);
    closer.close();
    // It ends when everything is answered, and what waits here is dropped.
    let _ = answering.join();
    outcome
}

/// The next request. None at the end.
fn read_one(
    reader: &mut impl Read,
    head: &mut [u8; ContentRequest::HEAD_BYTES],
    rest: &mut Vec<u8>,
) -> Result<Option<ContentRequest>, WireError> {
    match reader.read(&mut head[..1])? {
        0 => return Ok(None),
        _ => reader.read_exact(&mut head[1..])?,
    }
    rest.resize(ContentRequest::rest_bytes(head)?, 0);
    reader.read_exact(rest)?;
    ContentRequest::parse(head, rest).map(Some)
}

/// Answers one peer.
struct Answering {
    sharing: Arc<Sharing>,
    writer: Writer,
    come: Sender<Come>,
    is_over: Arc<AtomicBool>,
    /// Those that wait, and messages about them that are not read yet.
    waiting: usize,
    /// For these.
    memory: Borrowed,
    work: Work,
}

/// Buffers that are reused.
#[derive(Default)]
struct Work {
    bytes: Buffer,
    found: Vec<bool>,
    here: Vec<Name>,
    not_here: Vec<Name>,
    out: Vec<u8>,
    encoder: Encoder,
    effort: Alone,
    overflow: Overflow,
}

impl Answering {
    fn all(
        &mut self,
        asked: &Receiver<ContentRequest>,
        in_flight: &Receiver<Come>,
    ) -> io::Result<()> {
        loop {
            select! {
                recv(asked) -> wants => {
                    let Ok(wants) = wants else { return Ok(()) };
                    self.answer(&wants.domain, &wants.names, true)?;
                }
                recv(in_flight) -> come => {
                    let Ok(first) = come else { return Ok(()) };
                    self.settle(first, in_flight)?;
                }
            }
        }
    }

    /// Waits until no waiter is left here, now that the connection has ended: they are dropped soon.
    /// Until then their memory is in use, and the connection counts as one of its peer's.
    fn end(self, in_flight: &Receiver<Come>) {
        let Self { come, is_over, .. } = self;
        is_over.store(true, Relaxed);
        drop(come);
        in_flight.iter().for_each(drop);
    }

    /// Reports on contents that were waited for, several at once.
    fn settle(&mut self, first: Come, in_flight: &Receiver<Come>) -> io::Result<()> {
        let mut here: Vec<(Domain, Name)> = Vec::new();
        let mut not_here = Vec::new();
        for come in std::iter::once(first).chain(in_flight.try_iter().take(BATCH_PAGES - 1)) {
            self.waiting -= 1;
            match come {
                Come::Here(domain, name) => here.push((domain, name)),
                Come::NotHere(name) => not_here.push(name),
            }
        }
        here.sort_unstable();
        for group in here.chunk_by(|(one, _), (other, _)| one == other) {
            let names: Vec<Name> = group.iter().map(|(_, name)| *name).collect();
            // It was expected here, so it is not waited for again.
            self.answer(&group[0].0, &names, false)?;
        }
        if !not_here.is_empty() {
            self.work.here.clear();
            self.work.not_here = not_here;
            self.send(0)?;
        }
        self.memory.shrink_to(self.waiting * WAITER_BYTES);
        Ok(())
    }

    /// Sends what is here. Content that a source sends is waited for, if the peer may wait.
    fn answer(&mut self, domain: &Domain, names: &[Name], may_wait: bool) -> io::Result<()> {
        let mut bodies = self.find(domain, names);
        if may_wait && !self.work.not_here.is_empty() {
            let absent = self.wait(domain);
            // Content that arrived between the two look-ups.
            if absent.iter().any(|name| self.sharing.exchange.index.has(name)) {
                if bodies > 0 {
                    self.send(bodies)?;
                }
                bodies = self.find(domain, &absent);
            } else {
                self.work.not_here = absent;
            }
        }
        let Work { here, not_here, .. } = &self.work;
        if let Some(rack) = self.sharing.rack().filter(|_| !not_here.is_empty()) {
            rack.lacks(not_here.clone());
        }
        if here.is_empty() && not_here.is_empty() {
            return Ok(());
        }
        self.send(bodies)
    }

    /// Copies what is here. Returns how many pages that is.
    fn find(&mut self, domain: &Domain, names: &[Name]) -> usize {
        let key = self.sharing.key(domain);
        let Work { bytes, found, here, not_here, .. } = &mut self.work;
        let bytes = bytes.room(names.len() * PAGE_BYTES);
        self.sharing.exchange.index.find(names, &key, bytes, found);
        here.clear();
        not_here.clear();
        for (nth, (name, found)) in names.iter().zip(&*found).enumerate() {
            if !found {
                not_here.push(*name);
                continue;
            }
            let from = nth * PAGE_BYTES;
            bytes.copy_within(from..from + PAGE_BYTES, here.len() * PAGE_BYTES);
            here.push(*name);
        }
        here.len()
    }

    /// Waits for missing contents that sources will send. Returns the others.
    fn wait(&mut self, domain: &Domain) -> Vec<Name> {
        let mut names = std::mem::take(&mut self.work.not_here);
        let wanted = (self.waiting + names.len()).min(WAITING_MAX);
        // Where nothing is left, fewer wait, and the peer gets the content from their sources.
        self.memory.grow_to(wanted * WAITER_BYTES);
        let room = wanted.min(self.memory.bytes() / WAITER_BYTES).saturating_sub(self.waiting);
        let remote = Arc::new(RemoteWaiter {
            domain: domain.clone(),
            come: self.come.clone(),
            is_over: Arc::clone(&self.is_over),
        });
        let now = Instant::now();
        let mut joined = 0;
        let mut in_flight = self.sharing.exchange.in_flight.lock();
        let mut joins = |name: &Name| {
            let joins =
                joined < room && in_flight.join(name, now, || Waiter::Remote(Arc::clone(&remote)));
            joined += usize::from(joins);
            joins
        };
        names.retain(|name| !joins(name));
        drop(in_flight);
        // Counted before this thread reads that any of them has arrived.
        self.waiting += joined;
        names
    }

    fn send(&mut self, bodies: usize) -> io::Result<()> {
        let Work { bytes, here, not_here, out, encoder, effort, overflow, .. } = &mut self.work;
        let raw = &bytes[..bodies * PAGE_BYTES];
        let began = Instant::now();
        let encoded = encoder.encode_bodies(effort.encoding(), raw);
        let payload = if encoded.encoding == Encoding::Raw { raw } else { encoded.bytes };
        out.clear();
        HasHeader::write_for(here, not_here, encoded.encoding.into(), payload.len(), out);
        let encoding = began.elapsed();
        self.writer.write_all(out)?;
        self.writer.write_all(payload)?;
        self.writer.flush()?;
        overflow.wrote(self.writer.socket(), (out.len() + payload.len()) as u64);
        effort.sent(raw.len() as u64, encoding, began.elapsed() - encoding);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use content::NAME_BYTES;

    use super::*;
    use crate::destination::Provider;

    fn name(number: usize) -> Name {
        let mut bytes = [0; NAME_BYTES];
        bytes[..8].copy_from_slice(&(number as u64).to_le_bytes());
        Name(bytes)
    }

    /// A host on which all of these arrive.
    fn where_they_arrive(names: &[Name]) -> Arc<Sharing> {
        let sharing = Sharing::start(b"secret".to_vec(), None).unwrap();
        // A slow machine doesn't make it lost or late.
        let since = Instant::now() + Duration::from_secs(3600);
        sharing.exchange.arriving.lock().insert(1);
        for name in names {
            let mut in_flight = sharing.exchange.in_flight.lock();
            in_flight.claim(*name, Provider::Vm(1), since, || None);
        }
        sharing
    }

    /// A peer that can wait for them.
    fn answering(
        sharing: &Arc<Sharing>,
        memory: &Arc<Reserve>,
    ) -> (Answering, Receiver<Come>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        let (_reader, writer) = Connection::plain(stream).into_halves();
        let (come, in_flight) = unbounded();
        let answering = Answering {
            sharing: Arc::clone(sharing),
            writer,
            come,
            is_over: Arc::default(),
            waiting: 0,
            memory: Borrowed::new(memory, OWN_BYTES),
            work: Work::default(),
        };
        (answering, in_flight, peer)
    }

    /// How many of these it does not wait for.
    fn absent(answering: &mut Answering, names: &[Name]) -> usize {
        let mut wait = |names: &[Name]| {
            answering.work.not_here = names.to_vec();
            answering.wait(&Domain::default()).len()
        };
        names.chunks(BATCH_PAGES).map(&mut wait).sum()
    }

    #[test]
    fn all_peers_together_wait_for_so_many_contents_and_no_more() {
        const OWN: usize = OWN_BYTES / WAITER_BYTES;
        let names: Vec<Name> = (0..4 * OWN).map(name).collect();
        let (sharing, memory) = (where_they_arrive(&names), Reserve::new(2 * OWN_BYTES));
        let [(mut one, told_one, _), (mut other, told, _peer)] =
            [(); 2].map(|()| answering(&sharing, &memory));
        assert_eq!(absent(&mut one, &names), OWN);
        assert_eq!(absent(&mut other, &names), 3 * OWN, "each has its own part");
        // What one of them does not wait for any more, the other may.
        one.end(&told_one);
        assert_eq!(memory.borrowed_bytes(), 0);
        assert_eq!(absent(&mut other, &names[OWN..2 * OWN]), 0);
        for name in &names {
            let waiters = sharing.exchange.in_flight.lock().came(name);
            for waiter in waiters {
                let Waiter::Remote(peer) = waiter else { panic!("nobody else waits") };
                peer.not_here(*name);
            }
        }
        // What is not read yet counts.
        other.settle(told.recv().unwrap(), &told).unwrap();
        assert_eq!(memory.borrowed_bytes(), OWN_BYTES - BATCH_PAGES * WAITER_BYTES);
    }

    #[test]
    fn a_peer_waits_for_so_many_contents_and_no_more() {
        const BEYOND: usize = BATCH_PAGES / 2;
        let names: Vec<Name> = (0..WAITING_MAX + BEYOND).map(name).collect();
        let (sharing, memory) = (where_they_arrive(&names), Reserve::new(SERVED_BYTES_MAX));
        let (mut answering, in_flight, _peer) = answering(&sharing, &memory);
        assert_eq!(absent(&mut answering, &names), BEYOND);
        // One that arrives makes room for another.
        let waiters = sharing.exchange.in_flight.lock().came(&names[0]);
        for waiter in waiters {
            let Waiter::Remote(peer) = waiter else { panic!("nobody else waits") };
            peer.here(names[0]);
        }
        let come = in_flight.try_recv().unwrap();
        assert!(matches!(&come, Come::Here(_, name) if *name == names[0]));
        answering.settle(come, &in_flight).unwrap();
        assert_eq!(absent(&mut answering, &names[WAITING_MAX..]), BEYOND - 1);
    }
}
