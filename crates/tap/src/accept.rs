//! Accepts and sorts QEMU's connections, and runs a thread for each.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::{self, JoinHandle};

use data_threads::DataThreads;
use rustix::net::{RecvFlags, recv};

use crate::channel;
use crate::error::TapError;
use crate::main_channel;
use crate::shared::{Channels, Shared};
use crate::socket::discard;

/// What is known of a connection before it is read.
pub(crate) enum AlreadyRead {
    /// Nothing.
    Unknown,
    /// It is the main channel, and these bytes were read from it.
    Main(Vec<u8>),
    /// It is this multifd channel, and its first message and these bytes were read from it.
    Channel(u8, Vec<u8>),
}

/// Accepts as many connections as QEMU makes, and waits for all to end. `after_first` runs before
/// the second is accepted.
pub(crate) fn accept(shared: &Arc<Shared>, listener: UnixListener, after_first: impl FnOnce()) {
    let expected = shared.channels.connections();
    let mut after_first = Some(after_first);
    let threads = (0..expected).map(|number| {
        if number == 1
            && let Some(wait) = after_first.take()
        {
            wait();
        }
        accept_one(shared, &listener, number)
    });
    let threads = begin_all(shared, threads);
    drop(listener);
    join_all(shared, threads);
}

/// Reads connections that were accepted and noted already, and waits for all to end.
pub(crate) fn read(shared: &Arc<Shared>, connections: Vec<(UnixStream, AlreadyRead)>) {
    let read_one = |(number, (socket, already_read))| begin(shared, socket, number, already_read);
    let threads = begin_all(shared, (0..).zip(connections).map(read_one));
    join_all(shared, threads);
}

type Begin = Result<JoinHandle<()>, TapError>;

/// Starts all connections, or those before the first that fails.
fn begin_all(shared: &Shared, connections: impl Iterator<Item = Begin>) -> Vec<JoinHandle<()>> {
    let started = |one: Begin| one.map_err(|error| shared.end(error)).ok();
    connections.map_while(started).collect()
}

fn join_all(shared: &Shared, threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        if thread.join().is_err() {
            shared.end(TapError::Stopped);
        }
    }
    if let Err(error) = shared.compare_rounds() {
        shared.end(error);
    }
    shared.state.lock().over = true;
    shared.changed.notify_all();
}

fn accept_one(shared: &Arc<Shared>, listener: &UnixListener, number: usize) -> Begin {
    let accepted = shared.try_again(|| listener.accept());
    let (socket, _) = accepted.map_err(|source| {
        if shared.stopping.load(SeqCst) {
            return TapError::Stopped;
        }
        if shared.state.lock().main_has_ended() {
            return TapError::ChannelsMissing { connected: number };
        }
        TapError::Io { what: "waiting for QEMU to connect", source }
    })?;
    shared.note(&socket)?;
    begin(shared, socket, number, AlreadyRead::Unknown)
}

/// Reads a connection on its own thread.
fn begin(
    shared: &Arc<Shared>,
    socket: UnixStream,
    number: usize,
    already_read: AlreadyRead,
) -> Begin {
    let shared = Arc::clone(shared);
    data_threads::spawn(format!("tap-{number}"), move || {
        // Created before the membership, so it is dropped after it: by then the
        // panic's message is recorded.
        let _reading_on = ReadingOn { shared: &shared, socket: &socket };
        let _member = shared.output.threads().as_ref().map(DataThreads::join);
        if let Err(error) = serve(&shared, &socket, number, already_read) {
            shared.end(error);
            discard(&socket);
        }
        shared.counters.add_thread_cpu();
    })
    .map_err(|source| TapError::Io { what: "starting a thread", source })
}

/// Keeps reading and discards if its thread panics: a QEMU that writes to a
/// connection without a reader can't be cancelled.
struct ReadingOn<'s> {
    shared: &'s Shared,
    socket: &'s UnixStream,
}

impl Drop for ReadingOn<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.shared.end(TapError::Stopped);
            discard(self.socket);
        }
    }
}

/// Finds out which channel it is, and reads it to its end.
fn serve(
    shared: &Shared,
    socket: &UnixStream,
    number: usize,
    already_read: AlreadyRead,
) -> Result<(), TapError> {
    if shared.stopping.load(SeqCst) {
        return Err(TapError::Stopped);
    }
    match already_read {
        AlreadyRead::Unknown => serve_unknown(shared, socket, number),
        AlreadyRead::Main(before) => main(shared, socket, number, &before),
        AlreadyRead::Channel(id, before) => multifd(shared, socket, number, (id, &before)),
    }
}

fn serve_unknown(shared: &Shared, socket: &UnixStream, number: usize) -> Result<(), TapError> {
    let mut magic = [0; 4];
    let mut seen = 0;
    // QEMU sends these four bytes in one piece. A peer that dribbles is
    // refused, unless more has arrived by the next peek.
    while seen < magic.len() {
        let (count, _) =
            recv(socket, &mut magic[..], RecvFlags::PEEK | RecvFlags::WAITALL).map_err(
                |error| TapError::Io { what: "reading QEMU's stream", source: error.into() },
            )?;
        if count == seen {
            return Err(TapError::Truncated { what: "its first bytes" });
        }
        seen = count;
    }
    match u32::from_be_bytes(magic) {
        stream::multifd::MAGIC if shared.channels == Channels::Classic => {
            Err(TapError::Connection("a multifd channel, though multifd is off"))
        }
        stream::multifd::MAGIC => multifd(shared, socket, number, (channel::number(socket)?, &[])),
        _ => main(shared, socket, number, &[]),
    }
}

/// Reads the main channel, the only one.
fn main(
    shared: &Shared,
    socket: &UnixStream,
    number: usize,
    before: &[u8],
) -> Result<(), TapError> {
    shared.begin_main(socket)?;
    let outcome = main_channel::run(shared, socket, number, before);
    shared.end_main(outcome.as_ref().ok().copied().flatten());
    // QEMU makes all its connections before it writes, so missing ones won't
    // come.
    shared.refuse_connections();
    outcome.map(drop)
}

/// Reads a multifd channel, from which `before` was read after its first message.
fn multifd(
    shared: &Shared,
    socket: &UnixStream,
    number: usize,
    (id, before): (u8, &[u8]),
) -> Result<(), TapError> {
    match channel::run(shared, socket, number, (id, before))? {
        Some(rounds) => shared.note_rounds(rounds),
        // The main channel ended, or failed a moment ago, without a block list. A QEMU that still
        // writes here can't be cancelled unless it is read.
        None => discard(socket),
    }
    Ok(())
}
