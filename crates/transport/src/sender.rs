//! One lane at the source: its sender thread and its acknowledgement thread.

use std::io::{IoSlice, Read, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use data_threads::DataThreads;
use identity::{Connection, Reader, Writer};
use page::{Batch, BlockBatch, Encoded, Encoder, Encoding, PAGE_BYTES, Pool, SLOT_BYTES};
use wire::{Ack, Answer, BatchHeader, BlockHeader, Kind, Names, Reply};

use crate::connect::connect;
use crate::error::{LaneError, LanesError};
use crate::flight::Flight;
use crate::lanes::{LanesPlan, Shared};
use crate::load::{Announcement, LightQuery, Load, Query};
use crate::meter::{Doing, thread_cpu};
use crate::namer::{Asking, Labels, RereadPages, is_set};
use crate::outage::Outage;
use crate::overflow::Overflow;
use crate::pacer::Paced;
use crate::queue::Work;
use crate::stale_filter::Filtering;

/// The life of a lane: connect, carry, and again, until all is delivered.
pub(crate) fn run(shared: &Shared, number: usize) {
    let _fault = EndsOnFault(shared);
    let _member = shared.threads.as_ref().map(DataThreads::join);
    let endpoint = shared.plan.endpoints[number];
    let kind =
        Kind::Lane { number: u16::try_from(number).unwrap_or(u16::MAX), token: shared.plan.token };
    let meter = &shared.meters[number];
    let mut outage = Outage::default();
    loop {
        let LanesPlan { peer, security, .. } = &shared.plan;
        let error = match connect(endpoint, peer, security, kind) {
            Ok(mut connection) => {
                if outage.ends() {
                    tracing::info!(lane = number, %endpoint, "lane up again");
                }
                match carry(shared, number, &mut connection) {
                    Ok(()) => break,
                    Err(source) => LaneError::Broken { remote: endpoint.remote, source },
                }
            }
            Err(LaneError::Turned { reply: Reply::UnknownToken, .. }) => {
                // The destination has ended the migration; control says why.
                break;
            }
            Err(error) => error,
        };
        let (begins, pause) = outage.fails();
        if begins {
            tracing::warn!(lane = number, %endpoint, %error, "lane down; others carry its batches");
            meter.deaths.fetch_add(1, Relaxed);
        } else {
            tracing::debug!(lane = number, %endpoint, %error, "lane still down");
        }
        if !shared.queue.could_not_connect(&error.to_string(), pause) {
            break;
        }
    }
    add_cpu(shared);
}

/// Ends all lanes if the thread that holds it panics: a lane that has lost one of
/// its threads looks like one that is only slow.
struct EndsOnFault<'s>(&'s Shared);

impl Drop for EndsOnFault<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let thread = thread::current().name().unwrap_or("of a lane").to_owned();
            self.0.end(LanesError::Fault { thread });
        }
    }
}

/// Called by each thread of a lane as it ends.
fn add_cpu(shared: &Shared) {
    let used = u64::try_from(thread_cpu().as_nanos()).unwrap_or(u64::MAX);
    shared.cpu_ns.fetch_add(used, Relaxed);
}

/// Carries batches over one connection, until the queue ends (`Ok`) or the
/// connection does (`Err`; what it had not delivered is handed back).
fn carry(shared: &Shared, number: usize, connection: &mut Connection) -> std::io::Result<()> {
    shared.connected(number, connection.closer());
    let (reader, writer) = connection.halves();
    let flight = Flight::default();
    shared.queue.lane_up();
    let outcome = thread::scope(|scope| {
        // Without it a fault here would wait for the other thread, which waits for
        // the destination.
        let _fault = EndsOnFault(shared);
        let acks = thread::Builder::new().name(format!("lane-{number}-ack")).spawn_scoped(
            scope,
            || {
                let _fault = EndsOnFault(shared);
                let _member = shared.threads.as_ref().map(DataThreads::join);
                let outcome = read_acks(shared, number, reader, &flight);
                flight.break_off();
                shared.queue.wake_lanes();
                add_cpu(shared);
                outcome
            },
        )?;
        let sent = send(shared, number, writer, &flight);
        // Wakes the acknowledgement thread, whichever way sending ended.
        writer.close();
        let heard = acks.join();
        let heard = heard.unwrap_or_else(|_| Err(std::io::Error::other("a fault in the agent")));
        match sent {
            Ok(Sent::All) => Ok(()),
            Ok(Sent::UntilBroken) => Err(heard.err().unwrap_or_else(|| {
                std::io::Error::new(
                    std::io::ErrorKind::ConnectionReset,
                    "closed by the destination",
                )
            })),
            Err(error) => Err(error),
        }
    });
    flight.hand_back(&shared.queue);
    shared.disconnected(number);
    shared.queue.lane_down();
    outcome
}

enum Sent {
    All,
    UntilBroken,
}

fn send(
    shared: &Shared,
    number: usize,
    writer: &mut Writer,
    flight: &Flight,
) -> std::io::Result<Sent> {
    let meter = &shared.meters[number];
    let mut encoder = Encoder::new();
    let mut filtering = Filtering::default();
    let mut naming = Naming::new();
    let mut overflow = Overflow::default();
    let mut head = Vec::new();
    let mut rest = None;
    let pacer = &shared.pacers[number];
    let mut socket = Paced { inner: writer, pacer, written: &meter.wire_bytes };
    let mut counted = meter.wire_bytes.load(Relaxed);
    meter.begin();
    loop {
        data_threads::point();
        head.clear();
        let (load, asked) = if let Some(batch) = rest.take() {
            meter.turn_to(Doing::Encoding);
            (Load::Pages(batch), false)
        } else {
            let mut load =
                match shared.queue.take(|| flight.is_broken(), shared.plan.namer.as_deref()) {
                    Work::Send(load) => load,
                    Work::Broken => return Ok(Sent::UntilBroken),
                    Work::End => return Ok(Sent::All),
                };
            meter.turn_to(Doing::Encoding);
            // What is wanted by its name others may wait for as well, as it was then.
            if let (Some(stale_filter), Load::Pages(batch)) = (&shared.plan.stale_filter, &mut load)
            {
                shared.queue.dropped(filtering.drop_stale(stale_filter, batch));
            }
            if let (Some(namer), Load::Pages(batch)) = (&shared.plan.namer, &mut load) {
                shared.queue.came_after_announcement(namer.take_out_announced(batch));
            }
            naming.ask(shared, load, &mut head, &mut rest)
        };
        let read = match naming.read_again(shared, &load) {
            Ok(read) => read,
            Err(error) => {
                shared.queue.fail(LanesError::SourceGone);
                return Err(error);
            }
        };
        let written = if asked {
            meter.turn_to(Doing::Writing);
            write_all(&mut socket, &mut [IoSlice::new(&head)])
        } else {
            let content = match (&load, &read) {
                (Load::Blocks(blocks), _) => Content::Blocks(blocks),
                (_, Some(batch)) | (Load::Pages(batch) | Load::Requested(batch), None) => {
                    Content::Pages(batch)
                }
                (
                    Load::Query(_) | Load::LightQuery(_) | Load::Announce(_) | Load::Reread(_),
                    None,
                ) => {
                    unreachable!("asked, or read again")
                }
            };
            let encoded = encode(shared, &mut encoder, content);
            meter.turn_to(Doing::Writing);
            write_batch(&mut socket, content, encoded, &mut head)
        };
        meter.turn_to(Doing::Waiting);
        let wire_bytes = meter.wire_bytes.load(Relaxed);
        overflow.wrote(socket.inner.socket(), wire_bytes - counted);
        counted = wire_bytes;
        match written {
            Ok(()) => match flight.sent(load, &shared.queue) {
                Some(released) => drop(meter.batches.fetch_add(released, Relaxed)),
                None => return Err(nonsense(shared)),
            },
            Err(error) => {
                let rest = rest.map(Load::Pages);
                shared.queue.hand_back(std::iter::once(load).chain(rest));
                return Err(error);
            }
        }
    }
}

/// What a lane's sender needs to ask by name, and to send what was asked for.
struct Naming {
    labels: Labels,
    /// Room for pages that are read once more. Apart from the migration's pool:
    /// whoever drains that must not wait for it.
    spare: Arc<Pool>,
}

impl Naming {
    fn new() -> Self {
        Self { labels: Labels::default(), spare: Pool::new(SLOT_BYTES) }
    }

    /// Turns a batch that should go by name into one that does, and puts what is
    /// sent of it into `head`; says whether it did. What goes as bytes all the same
    /// is left in `rest`.
    fn ask(
        &mut self,
        shared: &Shared,
        load: Load,
        head: &mut Vec<u8>,
        rest: &mut Option<Batch>,
    ) -> (Load, bool) {
        let mut batch = match load {
            Load::Pages(batch) | Load::Query(Query { batch, .. }) => batch,
            Load::Announce(announcement) => {
                return (Load::LightQuery(announce(shared, announcement, head)), true);
            }
            other => return (other, false),
        };
        let asking = match &shared.plan.namer {
            Some(namer) if !batch.bodies().is_empty() => {
                self.labels.clear();
                namer.name(&batch, &mut self.labels)
            }
            _ => Asking::No,
        };
        let bits = match asking {
            Asking::No | Asking::Only(0) => return (Load::Pages(batch), false),
            Asking::Now | Asking::MayWait => u128::MAX,
            Asking::Only(bits) => bits,
        };
        let ticket = shared.queue.ticket();
        let mut names = Names {
            block: batch.block,
            epoch: batch.epoch,
            ticket,
            may_wait: asking != Asking::Now,
            names: &self.labels.names,
            places: &self.labels.places,
            fills: &[],
        };
        if matches!(asking, Asking::Only(_)) {
            let reread = RereadPages::of(&batch, bits);
            names.write(reread.pages.iter().copied(), head);
            batch.retain_bodies(|nth, _| !is_set(bits, nth));
            if !batch.is_empty() {
                shared.queue.divided();
                *rest = Some(batch);
            }
            return (Load::LightQuery(LightQuery { reread, ticket }), true);
        }
        shared.queue.asks();
        names.fills = batch.fills();
        names.write(batch.bodies().iter().map(|body| body.page), head);
        (Load::Query(Query { batch, ticket }), true)
    }

    /// What pages that were not kept contain by now.
    fn read_again(&self, shared: &Shared, load: &Load) -> std::io::Result<Option<Batch>> {
        let Load::Reread(reread) = load else { return Ok(None) };
        let gone = || std::io::Error::other("the source's QEMU is gone");
        let namer = shared.plan.namer.as_ref().ok_or_else(gone)?;
        let mut batch = self.spare.take().map_err(std::io::Error::other)?;
        if !reread.fill(&**namer, &mut batch) {
            return Err(gone());
        }
        Ok(Some(batch))
    }
}

/// Puts what is said of pages ahead into `head`.
fn announce(shared: &Shared, announcement: Announcement, head: &mut Vec<u8>) -> LightQuery {
    let Announcement { reread, labels } = announcement;
    let ticket = shared.queue.ticket();
    let names = Names {
        block: reread.block,
        epoch: reread.epoch,
        ticket,
        may_wait: true,
        names: &labels.names,
        places: &labels.places,
        fills: &[],
    };
    names.write(reread.pages.iter().copied(), head);
    LightQuery { reread, ticket }
}

/// What is sent as bytes.
#[derive(Clone, Copy)]
enum Content<'l> {
    Pages(&'l Batch),
    Blocks(&'l BlockBatch),
}

impl Content<'_> {
    fn bytes(self) -> usize {
        match self {
            Self::Pages(batch) => batch.bodies().len() * PAGE_BYTES,
            Self::Blocks(batch) => batch.data().len(),
        }
    }
}

fn encode<'e>(shared: &Shared, encoder: &'e mut Encoder, content: Content<'_>) -> Encoded<'e> {
    let wanted = Encoding::try_from(shared.encoding.load(Relaxed)).unwrap_or(Encoding::Raw);
    match content {
        Content::Pages(batch) => encoder.encode(wanted, batch),
        Content::Blocks(batch) => encoder.encode_blocks(wanted, batch),
    }
}

/// Writes header, tables and payload.
fn write_batch(
    socket: &mut impl Write,
    content: Content<'_>,
    encoded: Encoded<'_>,
    head: &mut Vec<u8>,
) -> std::io::Result<()> {
    let is_raw = encoded.encoding == Encoding::Raw;
    let payload_bytes = if is_raw { content.bytes() } else { encoded.bytes.len() };
    let code = u8::from(encoded.encoding);
    let contiguous = match content {
        Content::Pages(batch) => {
            BatchHeader::write_for(batch, code, payload_bytes, head);
            batch.contiguous()
        }
        Content::Blocks(batch) => {
            BlockHeader::write_for(batch, code, payload_bytes, head);
            Some(batch.data())
        }
    };
    match (is_raw, contiguous, content) {
        (false, ..) => write_all(socket, &mut [IoSlice::new(head), IoSlice::new(encoded.bytes)]),
        (true, None, Content::Pages(batch)) => {
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

fn write_all(socket: &mut impl Write, mut pieces: &mut [IoSlice<'_>]) -> std::io::Result<()> {
    while !pieces.is_empty() {
        match socket.write_vectored(pieces) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut pieces, written),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn read_acks(
    shared: &Shared,
    number: usize,
    reader: &mut Reader,
    flight: &Flight,
) -> std::io::Result<()> {
    let mut bytes = [0; Answer::BYTES];
    loop {
        let reply = read_reply(reader, &mut bytes)?;
        data_threads::point();
        let released = match reply {
            Some(Said::Ack(ack)) => flight.acknowledged(ack.placed, &shared.queue),
            Some(Said::Answer(answer)) => flight.answered(answer, &shared.queue),
            None => None,
        };
        let Some(released) = released else { return Err(nonsense(shared)) };
        shared.meters[number].batches.fetch_add(released, Relaxed);
    }
}

/// Not a matter of this connection: the peer is broken or hostile.
fn nonsense(shared: &Shared) -> std::io::Error {
    shared.queue.fail(LanesError::Nonsense);
    std::io::Error::new(std::io::ErrorKind::InvalidData, LanesError::Nonsense)
}

/// What the destination says on a lane.
enum Said {
    Ack(Ack),
    Answer(Answer),
}

/// None if it is neither.
fn read_reply(
    reader: &mut Reader,
    bytes: &mut [u8; Answer::BYTES],
) -> std::io::Result<Option<Said>> {
    let (ack, rest) = bytes.split_first_chunk_mut::<{ Ack::BYTES }>().expect("an answer is longer");
    reader.read_exact(ack)?;
    if !ack.first_chunk().is_some_and(Answer::begins) {
        return Ok(Ack::parse(ack).ok().map(Said::Ack));
    }
    reader.read_exact(rest)?;
    Ok(Answer::parse(bytes).ok().map(Said::Answer))
}
