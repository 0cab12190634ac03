//! Asks the helper in a guest which of its memory is a copy of data on a disk.
//!
//! The helper runs in the guest, so it may be missing, silent, old, broken or
//! malicious. Each is an error here, within the given time, and does no harm to the VM
//! and its migration.

mod find;
mod open;

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use cachemap::{
    AnswerKind, Budget, CacheMap, Fault, Greeting, Limits, Listener, Query, State, Summary, VERSION,
};
use serde_json::json;

use crate::qmp::{Qmp, QmpError};
use crate::socket;

pub use cachemap::PORT_NAME;
pub use find::{NoPort, Port, find};
pub use open::{HasGuest, OpenPort};

/// How long to wait for a connection: hardly, since too many clients wait at the port then.
const AT_ONCE: Duration = Duration::from_millis(1);
/// Most bytes per read.
const READ_BYTES: usize = 64 << 10;
/// A part that is passed on has at least this many pages, and at least one page for this
/// many before it: so there are few parts, however large the map is.
const PART_PAGES_LEAST: u64 = 1024;
const PART_SHARE: u64 = 2;
const PAGE_BYTES: u64 = cachemap::PAGE_BYTES;
/// Below this, memory has no gap on any machine type that QEMU has: q35's starts
/// at 2 GiB at the lowest. Above it, the gap goes up to 4 GiB.
const GAP_BEGINS_MIN: u64 = 2 << 30;
const GAP_ENDS: u64 = 4 << 30;
/// A VM with about a TiB or more may have everything above the gap from 1 TiB on: some
/// hosts have a gap of their own below 1 TiB.
const FAR_RAM_MIN: u64 = 900 << 30;
const FAR_GAP_ENDS: u64 = 1 << 40;
/// More runs than that are not worth their memory: 24 bytes each.
const RUNS_MAX: u32 = 4 << 20;

/// Why there is no map. The VM is not affected.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The port's socket can't be connected to.
    #[error("the guest's port can't be reached: {source}")]
    Socket {
        /// The system's error.
        source: io::Error,
    },
    /// QEMU closed the port, or another client has it.
    #[error("the guest's port was closed during the query of its helper")]
    Closed,
    /// The VM has no port, or none that can be used.
    #[error(transparent)]
    NoPort(#[from] NoPort),
    /// No program in the guest has opened the port.
    #[error("no program in the guest has the port open: its helper doesn't run")]
    NobodyThere,
    /// Another client has the port: QEMU serves one at a time.
    #[error("another program is connected to the guest's port, and QEMU serves one at a time")]
    Taken,
    /// The helper doesn't greet.
    #[error(
        "nothing answered at the guest's port within {waited:?}: its helper doesn't run, or hangs"
    )]
    Absent {
        /// How long that was.
        waited: Duration,
    },
    /// The helper doesn't greet, though a program has opened the port.
    #[error("the guest's helper did not answer within {waited:?}: its guest is busy, or it hangs")]
    Busy {
        /// How long that was.
        waited: Duration,
    },
    /// The helper greeted, and did not finish.
    #[error("the guest's helper did not end within {waited:?}: its guest is busy, or it hangs")]
    Late {
        /// How long that was.
        waited: Duration,
    },
    /// The helper violates the protocol.
    #[error(transparent)]
    Answer(#[from] Fault),
}

/// The bounds of the pages that a helper can name, in a VM with that much RAM.
#[must_use]
pub fn limits(ram_bytes: u64) -> Limits {
    let ram_pages = ram_bytes.div_ceil(PAGE_BYTES);
    let beyond = ram_bytes.saturating_sub(GAP_BEGINS_MIN);
    let gap_ends = if ram_bytes < FAR_RAM_MIN { GAP_ENDS } else { FAR_GAP_ENDS };
    let end = if beyond == 0 { ram_bytes } else { gap_ends.saturating_add(beyond) };
    Limits { ram_pages, end_page: end.div_ceil(PAGE_BYTES) }
}

/// The same for QEMU's VM as it is now, with plugged memory.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn limits_of(qmp: &Qmp) -> Result<Limits, QmpError> {
    let summary = qmp.execute("query-memory-size-summary", json!({}))?;
    let bytes = |name: &str| summary[name].as_u64().unwrap_or(0);
    let (base, plugged) = (bytes("base-memory"), bytes("plugged-memory"));
    let mut limits = limits(base);
    if plugged == 0 {
        return Ok(limits);
    }
    limits.ram_pages = base.saturating_add(plugged).div_ceil(PAGE_BYTES);
    let devices = qmp.execute("query-memory-devices", json!({}))?;
    for device in devices.as_array().into_iter().flatten() {
        let data = &device["data"];
        let address = data["addr"].as_u64().or(data["memaddr"].as_u64()).unwrap_or(0);
        // Of a virtio-mem device, `size` is what is plugged, which may lie anywhere within it.
        let bytes = data["max-size"].as_u64().or(data["size"].as_u64()).unwrap_or(0);
        let end = address.saturating_add(bytes);
        limits.end_page = limits.end_page.max(end.div_ceil(PAGE_BYTES));
    }
    Ok(limits)
}

/// How long to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// For the greeting: the helper answers at once, unless the guest has no CPU
    /// for it.
    pub greeting: Duration,
    /// For the whole answer: more than the budget's time, or its end is missed.
    pub all: Duration,
}

impl Patience {
    /// The times that suit a budget.
    #[must_use]
    pub fn of(budget: Budget) -> Self {
        let time = Duration::from_millis(budget.bounded().time_ms.into());
        Self { greeting: Duration::from_secs(3), all: time + Duration::from_secs(3) }
    }
}

/// Connects to the socket of a port. A connection doesn't mean that QEMU serves it: QEMU
/// serves one client at a time, and lets some more wait.
///
/// # Errors
/// If it can't connect now.
pub fn connect(path: &Path) -> Result<UnixStream, GuestError> {
    socket::connect(path, AT_ONCE).map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut => GuestError::Taken,
        _ => GuestError::Socket { source: error },
    })
}

/// Asks for the map of a VM with memory within `limits`. Another thread may shut
/// `stream` down meanwhile, which ends the call.
///
/// # Errors
/// As [`GuestError`] says; always within `patience`.
pub fn query(
    stream: &UnixStream,
    limits: Limits,
    budget: Budget,
    patience: Patience,
) -> Result<CacheMap, GuestError> {
    let mut listener = Listener::new(&map_query(limits, budget), limits);
    converse(stream, &mut listener, patience, &mut |_| ())?;
    listener.into_map().ok_or(GuestError::Closed)
}

/// As [`query`], but passes the map on in parts, while the helper still searches. A page
/// occurs once in a part, but may occur in several parts.
///
/// # Errors
/// As [`query`]. If the helper did not end, what arrived was passed on.
pub fn query_in_parts(
    stream: &UnixStream,
    limits: Limits,
    budget: Budget,
    patience: Patience,
    part: &mut dyn FnMut(CacheMap),
) -> Result<Summary, GuestError> {
    let mut listener = Listener::new(&map_query(limits, budget), limits);
    let (mut runs, mut pages) = (0, 0);
    let mut hand_on = |listener: &Listener, is_all: bool| {
        let (received, received_pages) = listener.received();
        let worth = (pages / PART_SHARE).max(PART_PAGES_LEAST);
        if received > runs && (is_all || received_pages - pages >= worth) {
            part(listener.after(runs));
            (runs, pages) = (received, received_pages);
        }
    };
    let ended = converse(stream, &mut listener, patience, &mut |listener| hand_on(listener, false));
    // Of a helper that breaks rules, no more is taken than was passed on before.
    if !matches!(ended, Err(GuestError::Answer(_))) {
        hand_on(&listener, true);
    }
    ended?;
    listener.summary().cloned().ok_or(GuestError::Closed)
}

fn map_query(limits: Limits, budget: Budget) -> Query {
    Query {
        version: VERSION,
        nonce: nonce(),
        answer: AnswerKind::Map,
        budget: budget.bounded(),
        runs_max: u32::try_from(limits.ram_pages).unwrap_or(RUNS_MAX).min(RUNS_MAX),
    }
}

/// Asks only whether there is a helper.
///
/// # Errors
/// As [`GuestError`] says; always within `greeting`.
pub fn greet(stream: &UnixStream, greeting: Duration) -> Result<Greeting, GuestError> {
    let query = Query {
        version: VERSION,
        nonce: nonce(),
        answer: AnswerKind::Greeting,
        budget: Budget::default(),
        runs_max: 0,
    };
    let mut listener = Listener::new(&query, Limits { ram_pages: 0, end_page: 0 });
    converse(stream, &mut listener, Patience { greeting, all: greeting }, &mut |_| ())?;
    listener.greeting().cloned().ok_or(GuestError::Closed)
}

/// Sends the request of `listener`, and reads the answer to its end.
fn converse(
    stream: &UnixStream,
    listener: &mut Listener,
    patience: Patience,
    hears: &mut dyn FnMut(&Listener),
) -> Result<(), GuestError> {
    let began = Instant::now();
    let socket = |source| GuestError::Socket { source };
    stream.set_nonblocking(false).map_err(socket)?;
    let too_late = |listener: &Listener| match listener.greeting() {
        None => GuestError::Absent { waited: began.elapsed() },
        Some(_) => GuestError::Late { waited: began.elapsed() },
    };
    let left = |listener: &Listener| {
        let waits = if listener.greeting().is_none() { patience.greeting } else { patience.all };
        // A timeout of zero would mean no timeout.
        let left = waits.min(patience.all).checked_sub(began.elapsed());
        left.filter(|left| !left.is_zero()).ok_or_else(|| too_late(listener))
    };
    stream.set_write_timeout(Some(left(listener)?)).map_err(socket)?;
    let mut stream = stream;
    if let Err(error) = stream.write_all(&listener.query().to_bytes()) {
        return Err(if is_timeout(&error) { too_late(listener) } else { ended(error) });
    }
    let mut room = vec![0; READ_BYTES];
    loop {
        stream.set_read_timeout(Some(left(listener)?)).map_err(socket)?;
        let length = match stream.read(&mut room) {
            Ok(0) => return Err(GuestError::Closed),
            Ok(length) => length,
            Err(error) if is_timeout(&error) => return Err(too_late(listener)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(ended(error)),
        };
        if listener.take(room.get(..length).unwrap_or_default())? == State::Done {
            return Ok(());
        }
        hears(listener);
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn ended(error: io::Error) -> GuestError {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => GuestError::Closed,
        _ => GuestError::Socket { source: error },
    }
}

/// A number that no earlier request had: the rest of an answer to that may still arrive
/// through the port.
fn nonce() -> u64 {
    let mut bytes = [0; 8];
    // Without random bytes, the time is unique enough.
    if rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::NONBLOCK).is_err() {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let nanos = now.map_or(0, |time| time.as_nanos());
        bytes.copy_from_slice(nanos.to_le_bytes().first_chunk::<8>().unwrap_or(&[0; 8]));
    }
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests;
