//! QEMU's connections: which is which, a thread for each, and their end.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};

use data_threads::DataThreads;
use page::{Epoch, Pool};
use parking_lot::{Condvar, Mutex};
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use stream::Blocks;

use crate::answer::Answer;
use crate::channel::{self, Announced};
use crate::counters::Counters;
use crate::epochs::Epochs;
use crate::error::TapError;
use crate::handle::Channels;
use crate::main_channel;
use crate::output::Output;
use crate::socket::discard;

/// What a tap's threads share.
pub(crate) struct Shared {
    pub(crate) pool: Arc<Pool>,
    pub(crate) output: Arc<dyn Output>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) channels: Channels,
    pub(crate) epochs: Epochs,
    /// Wakes the thread that accepts. It is closed when the tap ends, together
    /// with the connections in its backlog: a QEMU whose connection is never
    /// accepted would wait for ever.
    pub(crate) listener: Mutex<Option<UnixListener>>,
    /// The thread that accepts, and joins the others.
    pub(crate) accepting: Mutex<Option<JoinHandle<()>>>,
    pub(crate) stopping: AtomicBool,
    /// Nothing if QEMU doesn't listen.
    pub(crate) answer: Option<Answer>,
    pub(crate) state: Mutex<State>,
    pub(crate) changed: Condvar,
}

/// How many epochs a multifd channel ended, and which its last page was of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    pub(crate) channel: u8,
    pub(crate) ended: Epoch,
    pub(crate) last_page: Epoch,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    blocks: Announced,
    main_begun: bool,
    main_over: bool,
    /// Epochs that the main channel ended, if it was split to its end.
    main_rounds: Option<Epoch>,
    rounds: Vec<Rounds>,
    pub(crate) sockets: Vec<UnixStream>,
    pub(crate) error: Option<TapError>,
    pub(crate) split: bool,
    /// All connections have come to their end.
    pub(crate) over: bool,
    /// No connection is to be kept any more.
    pub(crate) cut: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("channels", &self.channels).finish_non_exhaustive()
    }
}

impl Shared {
    /// The block list, once it is known; none if the main channel ends without
    /// one.
    pub(crate) fn wait_blocks(&self) -> Result<Announced, TapError> {
        let mut state = self.state.lock();
        loop {
            if self.stopping.load(SeqCst) {
                return Err(TapError::Stopped);
            }
            if state.blocks.is_some() || state.main_over {
                return Ok(state.blocks.clone());
            }
            self.changed.wait(&mut state);
        }
    }

    /// The main channel has come to the block list.
    pub(crate) fn announce(&self, blocks: Arc<Blocks>) {
        let mut state = self.state.lock();
        state.blocks = Some(blocks);
        state.split = true;
        drop(state);
        self.changed.notify_all();
    }

    /// See [`Stopper::let_finish`].
    pub(crate) fn let_finish(&self) {
        if let Some(answer) = &self.answer {
            answer.allow();
        }
    }

    /// Hands nothing on from now on; the first error stays.
    pub(crate) fn end(&self, error: TapError) {
        // First, so that a failed tap lets nothing finish. And a QEMU that
        // fails by itself waits, with its big lock held, until the answers have
        // ended.
        if let Some(answer) = &self.answer {
            answer.end();
        }
        let mut state = self.state.lock();
        if !self.stopping.swap(true, SeqCst) {
            state.error = Some(error);
        }
        drop(state);
        self.pool.close();
        self.changed.notify_all();
    }

    /// Wakes the accepting thread once the connections that QEMU has made are
    /// accepted.
    pub(crate) fn refuse_connections(&self) {
        if let Some(listener) = self.listener.lock().take() {
            let _ = shutdown(&listener, Shutdown::Both);
        }
    }

    /// Reads the main channel, of which there is one.
    fn main(&self, socket: &UnixStream, number: usize) -> Result<(), TapError> {
        if std::mem::replace(&mut self.state.lock().main_begun, true) {
            return Err(TapError::Connection("a second main channel"));
        }
        if let Some(answer) = &self.answer {
            answer.open(keep(socket)?);
        }
        let outcome = main_channel::run(self, socket, number);
        let mut state = self.state.lock();
        state.main_over = true;
        if let Ok(rounds) = outcome {
            state.main_rounds = rounds;
        }
        drop(state);
        self.changed.notify_all();
        // QEMU makes all its connections before it writes; one that is still
        // missing won't come.
        self.refuse_connections();
        outcome.map(drop)
    }

    /// Reads a multifd channel.
    fn channel(&self, socket: &UnixStream, number: usize) -> Result<(), TapError> {
        if let Some(rounds) = channel::run(self, socket, number)? {
            self.state.lock().rounds.push(rounds);
        }
        Ok(())
    }

    /// All channels must have ended the epochs that the main channel counted. One
    /// SYNC more does no harm if no page came after it: some versions of QEMU
    /// send it at the end of RAM without telling the main channel.
    fn compare_rounds(&self) -> Result<(), TapError> {
        let state = self.state.lock();
        let Some(main) = state.main_rounds else { return Ok(()) };
        let agrees = |rounds: &&Rounds| {
            rounds.ended == main
                || (rounds.ended.0 == main.0.saturating_add(1) && rounds.last_page <= main)
        };
        match state.rounds.iter().find(|rounds| !agrees(rounds)) {
            None => Ok(()),
            Some(rounds) => Err(TapError::Rounds {
                channel: rounds.channel,
                ended: rounds.ended.0,
                last_page: rounds.last_page.0,
                main: main.0,
            }),
        }
    }

    /// Notes a connection, to be closed when the tap is cut.
    fn note(&self, socket: &UnixStream) -> Result<(), TapError> {
        let clone = keep(socket)?;
        let mut state = self.state.lock();
        if state.cut {
            return Err(TapError::Stopped);
        }
        state.sockets.push(clone);
        Ok(())
    }
}

fn keep(socket: &UnixStream) -> Result<UnixStream, TapError> {
    let clone = socket.try_clone();
    clone.map_err(|source| TapError::Io { what: "keeping a connection of QEMU", source })
}

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
            let _member = shared.output.threads().as_ref().map(DataThreads::join);
            if let Err(error) = serve(&shared, &socket, number) {
                shared.end(error);
                discard(&socket);
            }
            shared.counters.add_thread_cpu();
        })
        .map_err(io("starting a thread"))
}

/// Finds out which channel it is, and reads it to its end.
fn serve(shared: &Shared, socket: &UnixStream, number: usize) -> Result<(), TapError> {
    if shared.stopping.load(SeqCst) {
        return Err(TapError::Stopped);
    }
    let mut magic = [0; 4];
    let mut seen = 0;
    // Four bytes come in one piece from QEMU; from anything else they may
    // trickle.
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
        stream::multifd::MAGIC => shared.channel(socket, number),
        _ => shared.main(socket, number),
    }
}
