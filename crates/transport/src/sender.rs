//! The sending end of one lane at the source.

use std::io::{self, IoSlice, Write};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::time::Duration;

use content::Name;
use host::nic::TcpCounts;
use identity::Writer;
use page::{Batch, BlockBatch, Encoded, Encoder, Encoding, PAGE_BYTES};
use wire::{BatchHeader, BlockHeader, Payload};

use crate::acks::Released;
use crate::deltas::Comparing;
use crate::error::LanesError;
use crate::flight::Flight;
use crate::load::Load;
use crate::meter::{Doing, LaneMeter};
use crate::overflow::Overflow;
use crate::pacer::Paced;
use crate::queue::{Queue, Sent, Work};
use crate::shared::Shared;
use crate::stale_filter::Filtering;
use crate::window::Departure;

/// A connection's sending half, with buffers that are reused for each batch.
pub struct Sender<'c, X> {
    shared: &'c Shared<X>,
    meter: &'c LaneMeter,
    socket: Paced<'c, &'c mut Writer>,
    flight: &'c Flight<X>,
    released: Released<'c, X>,
    encoder: Encoder,
    filtering: Filtering,
    comparing: Comparing,
    overflow: Overflow,
    head: Vec<u8>,
    /// Written bytes that the overflow control has counted.
    counted: u64,
    /// For how long the peer had no room, as the meter knows.
    peer_full: Duration,
    /// The queue's count of stage outcomes that this sender has checked.
    seen: u64,
    /// The departure of the batch taken last.
    departure: Departure,
}

impl<'c, X> Sender<'c, X> {
    pub(crate) fn new(
        shared: &'c Shared<X>,
        number: usize,
        writer: &'c mut Writer,
        flight: &'c Flight<X>,
    ) -> Self {
        let (meter, pacer) = (&shared.meters[number], &shared.pacers[number]);
        meter.begin();
        // Connecting has shown it already.
        let counts = TcpCounts::of(writer.socket());
        meter.set_round_trip(counts.ok().and_then(|counts| counts.round_trip));
        Self {
            shared,
            meter,
            socket: Paced { inner: writer, pacer, written: &meter.wire_bytes },
            flight,
            released: Released::new(shared, number, flight),
            encoder: Encoder::new(),
            filtering: Filtering::default(),
            comparing: Comparing::default(),
            overflow: Overflow::default(),
            head: Vec::new(),
            counted: meter.wire_bytes.load(Relaxed),
            peer_full: Duration::ZERO,
            seen: 0,
            departure: flight.departure(),
        }
    }

    /// The queue that it takes batches from.
    #[must_use]
    pub fn queue(&self) -> &'c Queue<X> {
        &self.shared.queue
    }

    /// Batches that are written and acknowledged.
    #[must_use]
    pub fn released(&self) -> Released<'c, X> {
        self.released
    }

    /// Takes the next batch and removes pages that are stale.
    pub fn take(&mut self) -> Work<X> {
        data_threads::point();
        self.meter.turn_to(Doing::WaitingForRoom);
        self.flight.wait_for_room();
        self.meter.turn_to(Doing::Waiting);
        let mut work = self.shared.queue.take(|| self.flight.is_broken(), &mut self.seen);
        if let Work::Send(load) = &mut work {
            self.departure = self.flight.departure();
            self.meter.turn_to(Doing::Encoding);
            if let Load::Pages(batch) = load {
                if let Some(filter) = &self.shared.plan.stale_filter {
                    self.shared.queue.dropped(self.filtering.drop_stale(filter, batch));
                }
                if let Some(deltas) = &self.shared.plan.deltas {
                    self.shared.queue.dropped(self.comparing.leave(deltas, batch));
                }
            }
        }
        work
    }

    /// Sends a batch of pages or blocks.
    ///
    /// # Errors
    /// If the connection breaks; another one carries the batch then.
    ///
    /// # Panics
    /// If it is a load of a stage, which only the stage can send.
    pub fn send(&mut self, load: Load<X>) -> io::Result<()> {
        let written = match &load {
            Load::Pages(batch) => self.write_deltas(batch, &[]),
            Load::Blocks(batch) => self.write(Content::Blocks(batch)),
            Load::Other(_) => unreachable!("its stage sends it"),
        };
        self.sent(load, written)
    }

    /// Writes deltas of pages, if the destination's versions are known and the deltas are
    /// small enough to be worthwhile; otherwise the pages, and their names or none.
    fn write_deltas(&mut self, batch: &Batch, names: &[Name]) -> io::Result<()> {
        self.meter.turn_to(Doing::Encoding);
        let Self { shared, comparing, encoder, .. } = self;
        let deltas = shared.plan.deltas.as_ref();
        let Some(deltas) = deltas.and_then(|deltas| comparing.compare(deltas, batch)) else {
            return self.write(Content::Pages(batch, names));
        };
        let encoded = encoder.encode_bodies(wanted(&shared.encoding), deltas);
        let is_raw = encoded.encoding == Encoding::Raw;
        let bytes = if is_raw { deltas } else { encoded.bytes };
        let encoding = u8::from(encoded.encoding);
        let payload = Payload { encoding, bytes: bytes.len(), deltas: true };
        self.meter.turn_to(Doing::Writing);
        self.head.clear();
        BatchHeader::write_for(batch, &[], payload, &mut self.head);
        let pieces = &mut [IoSlice::new(&self.head), IoSlice::new(bytes)];
        let written = write_all(&mut self.socket, pieces);
        self.wrote();
        written
    }

    /// Writes pages as bytes. The caller must report the batch with [`Sender::sent`].
    ///
    /// # Errors
    /// If the connection breaks.
    pub fn write_pages(&mut self, batch: &Batch) -> io::Result<()> {
        self.write(Content::Pages(batch, &[]))
    }

    /// Sends a batch of pages, and their names with their bodies.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn send_with_names(&mut self, batch: Batch, names: &[Name]) -> io::Result<()> {
        let written = self.write_deltas(&batch, names);
        self.sent(Load::Pages(batch), written)
    }

    /// Writes a stage's load. The caller must report it with [`Sender::sent`].
    ///
    /// # Errors
    /// If the connection breaks.
    pub fn write_other(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.meter.turn_to(Doing::Writing);
        let written = write_all(&mut self.socket, &mut [IoSlice::new(bytes)]);
        self.wrote();
        written
    }

    fn write(&mut self, content: Content<'_>) -> io::Result<()> {
        self.meter.turn_to(Doing::Encoding);
        let encoded = encode(wanted(&self.shared.encoding), &mut self.encoder, content);
        self.meter.turn_to(Doing::Writing);
        self.head.clear();
        let written = write_batch(&mut self.socket, content, encoded, &mut self.head);
        self.wrote();
        written
    }

    fn wrote(&mut self) {
        self.meter.turn_to(Doing::Waiting);
        let wire_bytes = self.meter.wire_bytes.load(Relaxed);
        self.overflow.wrote(self.socket.inner.socket(), wire_bytes - self.counted);
        self.meter.note_round_trip(self.overflow.round_trip());
        let peer_full = self.overflow.peer_full();
        self.meter.note_peer_full(peer_full.saturating_sub(self.peer_full));
        self.peer_full = peer_full;
        self.counted = wire_bytes;
    }

    /// Reports a batch as written, or as not written, in which case another connection
    /// sends it.
    ///
    /// # Errors
    /// The error of writing it.
    pub fn sent(&self, load: Load<X>, written: io::Result<()>) -> io::Result<()> {
        match &written {
            Ok(()) => self.flight.sent(load, self.departure),
            Err(_) => self.flight.not_sent(load),
        }
        written
    }

    /// Ends all lanes because the source's memory, which is still needed, can't be
    /// read any more.
    #[must_use]
    pub fn source_has_exited(&self) -> io::Error {
        self.shared.queue.fail(LanesError::SourceExited);
        io::Error::other("the source's QEMU has exited")
    }

    pub(crate) fn close(&mut self) {
        self.socket.inner.close();
    }
}

/// Sends pages and blocks until the queue ends.
pub(crate) fn send_all<X>(sender: &mut Sender<'_, X>) -> io::Result<Sent> {
    loop {
        match sender.take() {
            Work::Send(load) => sender.send(load)?,
            Work::Settled => {}
            Work::Over(sent) => return Ok(sent),
        }
        sender.released.all_placed()?;
    }
}

/// The encoding to use for bodies.
fn wanted(encoding: &AtomicU8) -> Encoding {
    Encoding::try_from(encoding.load(Relaxed)).unwrap_or(Encoding::Raw)
}

/// Content that is sent as bytes.
#[derive(Clone, Copy)]
enum Content<'l> {
    /// Pages, and the name of each, or none.
    Pages(&'l Batch, &'l [Name]),
    Blocks(&'l BlockBatch),
}

impl Content<'_> {
    fn bytes(self) -> usize {
        match self {
            Self::Pages(batch, _) => batch.bodies().len() * PAGE_BYTES,
            Self::Blocks(batch) => batch.data().len(),
        }
    }
}

fn encode<'e>(wanted: Encoding, encoder: &'e mut Encoder, content: Content<'_>) -> Encoded<'e> {
    match content {
        Content::Pages(batch, _) => encoder.encode(wanted, batch),
        Content::Blocks(batch) => encoder.encode_blocks(wanted, batch),
    }
}

/// Writes header, tables and payload.
fn write_batch(
    socket: &mut impl Write,
    content: Content<'_>,
    encoded: Encoded<'_>,
    head: &mut Vec<u8>,
) -> io::Result<()> {
    let is_raw = encoded.encoding == Encoding::Raw;
    let payload_bytes = if is_raw { content.bytes() } else { encoded.bytes.len() };
    let code = u8::from(encoded.encoding);
    let contiguous = match content {
        Content::Pages(batch, names) => {
            let payload = Payload { encoding: code, bytes: payload_bytes, deltas: false };
            BatchHeader::write_for(batch, names, payload, head);
            batch.contiguous()
        }
        Content::Blocks(batch) => {
            BlockHeader::write_for(batch, code, payload_bytes, head);
            Some(batch.data())
        }
    };
    match (is_raw, contiguous, content) {
        (false, ..) => write_all(socket, &mut [IoSlice::new(head), IoSlice::new(encoded.bytes)]),
        (true, None, Content::Pages(batch, _)) => {
            let bodies = batch.bodies().iter().map(|body| IoSlice::new(batch.bytes_of(*body)));
            let mut pieces: Vec<_> = std::iter::once(IoSlice::new(head)).chain(bodies).collect();
            write_all(socket, &mut pieces)
        }
        (true, bytes, _) => {
            let bytes = bytes.unwrap_or_default();
            write_all(socket, &mut [IoSlice::new(head), IoSlice::new(bytes)])
        }
    }
}

fn write_all(socket: &mut impl Write, mut pieces: &mut [IoSlice<'_>]) -> io::Result<()> {
    while !pieces.is_empty() {
        match socket.write_vectored(pieces) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut pieces, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
