//! QEMU's connections: which is which, a thread for each, and their end.

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

/// Takes as many connections as QEMU makes, and waits for all to end.
pub(crate) fn accept(shared: &Arc<Shared>, listener: UnixListener) {
    let expected = shared.channels.connections();
    let mut threads = Vec::with_capacity(expected);
    for number in 0..expected {
        let served = accept_one(shared, &listener, number);
        match served {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                shared.end(error);
                break;
            }
        }
    }
    drop(listener);
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

fn accept_one(
    shared: &Arc<Shared>,
    listener: &UnixListener,
    number: usize,
) -> Result<JoinHandle<()>, TapError> {
    let io = |what| move |source| TapError::Io { what, source };
    let (socket, _) = listener.accept().map_err(|source| {
        if shared.stopping.load(SeqCst) {
            return TapError::Stopped;
        }
        if shared.state.lock().main_over {
            return TapError::ChannelsMissing { connected: number };
        }
        TapError::Io { what: "waiting for QEMU to connect", source }
    })?;
    shared.note(&socket)?;
    let shared = Arc::clone(shared);
    thread::Builder::new()
        .name(format!("tap-{number}"))
        .spawn(move || {
            // Before the thread is a member: what it panics with is known by then.
            let _reading_on = ReadingOn { shared: &shared, socket: &socket };
            let _member = shared.output.threads().as_ref().map(DataThreads::join);
            if let Err(error) = serve(&shared, &socket, number) {
                shared.end(error);
                discard(&socket);
            }
            shared.counters.add_thread_cpu();
        })
        .map_err(io("starting a thread"))
}

/// Reads on and throws away if its thread panics: a QEMU that writes to a
/// connection that nobody reads can't cancel.
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
fn serve(shared: &Shared, socket: &UnixStream, number: usize) -> Result<(), TapError> {
    if shared.stopping.load(SeqCst) {
        return Err(TapError::Stopped);
    }
    let mut magic = [0; 4];
    let mut seen = 0;
    // Four bytes come in one piece from QEMU; anybody else may dribble.
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
        stream::multifd::MAGIC => multifd(shared, socket, number),
        _ => main(shared, socket, number),
    }
}

/// Reads the main channel, of which there is one.
fn main(shared: &Shared, socket: &UnixStream, number: usize) -> Result<(), TapError> {
    shared.begin_main(socket)?;
    let outcome = main_channel::run(shared, socket, number);
    shared.end_main(outcome.as_ref().ok().copied().flatten());
    // QEMU makes all its connections before it writes; whichever is still
    // missing won't come.
    shared.refuse_connections();
    outcome.map(drop)
}

/// Reads a multifd channel.
fn multifd(shared: &Shared, socket: &UnixStream, number: usize) -> Result<(), TapError> {
    if let Some(rounds) = channel::run(shared, socket, number)? {
        shared.note_rounds(rounds);
    }
    Ok(())
}
