//! One lane at the source: its sender thread and its acknowledgement thread.

use std::io::{IoSlice, Read, Write};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use crew::Crew;
use identity::{Connection, Reader, Writer};
use page::{Encoded, Encoder, Encoding};
use wire::{Ack, BatchHeader, BlockHeader, Kind, Reply};

use crate::connect::connect;
use crate::error::{LaneError, LanesError};
use crate::flight::Flight;
use crate::lanes::{LanesPlan, Shared};
use crate::load::Load;
use crate::meter::{Doing, thread_cpu};
use crate::outage::Outage;
use crate::pacer::Paced;
use crate::queue::Work;
use crate::reluctance::Reluctance;
use crate::sieve::Sifting;

/// The life of a lane: connect, carry, and again, until all is delivered.
pub(crate) fn run(shared: &Shared, number: usize) {
    let _member = shared.crew.as_ref().map(Crew::join);
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

/// Called by each thread of a lane as it ends.
fn add_cpu(shared: &Shared) {
    let used = u64::try_from(thread_cpu().as_nanos()).unwrap_or(u64::MAX);
    shared.cpu_ns.fetch_add(used, Relaxed);
}

/// Carries batches over one connection, until the queue ends (`Ok`) or the
/// connection does (`Err`; what it had not delivered is handed back).
fn carry(shared: &Shared, number: usize, connection: &mut Connection) -> std::io::Result<()> {
    let (reader, writer) = connection.halves();
    let flight = Flight::default();
    shared.queue.lane_up();
    let outcome = thread::scope(|scope| {
        let acks = thread::Builder::new().name(format!("lane-{number}-ack")).spawn_scoped(
            scope,
            || {
                let _member = shared.crew.as_ref().map(Crew::join);
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
        let heard = acks.join().unwrap_or(Ok(()));
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
    let mut packing = Packing::default();
    let mut sifting = Sifting::default();
    let mut head = Vec::new();
    let pacer = &shared.pacers[number];
    let mut socket = Paced { inner: writer, pacer, written: &meter.wire_bytes };
    meter.begin();
    loop {
        let work = shared.queue.take(|| flight.is_broken());
        let mut load = match work {
            Work::Send(load) => load,
            Work::Broken => return Ok(Sent::UntilBroken),
            Work::End => return Ok(Sent::All),
        };
        meter.turn_to(Doing::Encoding);
        if let (Some(sieve), Load::Pages(batch)) = (&shared.plan.sieve, &mut load) {
            shared.queue.dropped(sifting.sift(&**sieve, batch));
        }
        let encoded = encode(shared, &mut packing, &load);
        meter.turn_to(Doing::Writing);
        head.clear();
        let written = write_batch(&mut socket, &load, encoded, &mut head);
        meter.turn_to(Doing::Waiting);
        match written {
            Ok(()) => {
                meter.batches.fetch_add(flight.sent(load, &shared.queue), Relaxed);
            }
            Err(error) => {
                shared.queue.hand_back(std::iter::once(load));
                return Err(error);
            }
        }
    }
}

/// What a lane's sender needs to encode. RAM and disk differ in how they
/// shrink, so it gets reluctant towards each by itself.
#[derive(Default)]
struct Packing {
    encoder: Encoder,
    pages: Reluctance,
    blocks: Reluctance,
}

fn encode<'p>(shared: &Shared, packing: &'p mut Packing, load: &Load) -> Encoded<'p> {
    let wanted = Encoding::try_from(shared.encoding.load(Relaxed)).unwrap_or(Encoding::Raw);
    let Packing { encoder, pages, blocks } = packing;
    let reluctance = match load {
        Load::Pages(_) => pages,
        Load::Blocks(_) => blocks,
    };
    if wanted == Encoding::Raw || load.payload_bytes() == 0 || !reluctance.try_next() {
        return Encoded { encoding: Encoding::Raw, bytes: &[] };
    }
    let encoded = match load {
        Load::Pages(batch) => encoder.encode(wanted, batch),
        Load::Blocks(batch) => encoder.encode_blocks(wanted, batch),
    };
    reluctance.tried(encoded.encoding != Encoding::Raw);
    encoded
}

/// Writes header, tables and payload.
fn write_batch(
    socket: &mut impl Write,
    load: &Load,
    encoded: Encoded<'_>,
    head: &mut Vec<u8>,
) -> std::io::Result<()> {
    let is_raw = encoded.encoding == Encoding::Raw;
    let payload_bytes = if is_raw { load.payload_bytes() } else { encoded.bytes.len() };
    let code = u8::from(encoded.encoding);
    let contiguous = match load {
        Load::Pages(batch) => {
            BatchHeader::write_for(batch, code, payload_bytes, head);
            batch.contiguous()
        }
        Load::Blocks(batch) => {
            BlockHeader::write_for(batch, code, payload_bytes, head);
            Some(batch.data())
        }
    };
    match (is_raw, contiguous, load) {
        (false, ..) => write_all(socket, &mut [IoSlice::new(head), IoSlice::new(encoded.bytes)]),
        (true, None, Load::Pages(batch)) => {
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
    let mut bytes = [0; Ack::BYTES];
    loop {
        reader.read_exact(&mut bytes)?;
        let released =
            Ack::parse(&bytes).ok().and_then(|ack| flight.acknowledged(ack.placed, &shared.queue));
        let Some(released) = released else {
            // Not a matter of this connection: the peer is broken or hostile.
            shared.queue.fail(LanesError::Nonsense);
            let kind = std::io::ErrorKind::InvalidData;
            return Err(std::io::Error::new(kind, LanesError::Nonsense));
        };
        shared.meters[number].batches.fetch_add(released, Relaxed);
    }
}
