//! QEMU's connections: which is which, a thread for each, and their end.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crew::Crew;
use page::{Epoch, Pool};
use parking_lot::{Condvar, Mutex};
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use stream::Blocks;

use crate::answer::Answer;
use crate::channel::{self, Announced};
use crate::counters::Counters;
use crate::error::TapError;
use crate::main_channel;
use crate::output::Output;
use crate::socket::discard;

/// Which connections QEMU will make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channels {
    /// The main channel only, with the pages in it.
    Classic,
    /// The main channel and this many multifd channels.
    Multifd(u8),
}

/// How a stream that came to its end went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Whether its pages were taken out, or it was passed on whole.
    pub split: bool,
}

/// The threads that read one migration of QEMU.
///
/// A tap that fails or is stopped reads on and throws away, until QEMU closes
/// its connections or they are cut. QEMU 10.0 whose multifd channels break
/// while it sets its migration up waits for them for ever, and can't be
/// cancelled any more: cancel it first, and cut last.
#[derive(Debug)]
pub struct Tap {
    shared: Arc<Shared>,
}

/// Ends a tap from elsewhere, or lets QEMU end it.
#[derive(Clone, Debug)]
pub struct Stopper {
    shared: Arc<Shared>,
}

/// What a tap's threads share.
pub(crate) struct Shared {
    pub(crate) pool: Arc<Pool>,
    pub(crate) output: Arc<dyn Output>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) channels: Channels,
    /// To wake the accept with. It closes when the tap ends, and with it what
    /// waits there: a QEMU whose connection nobody takes would wait for ever.
    listener: Mutex<Option<UnixListener>>,
    /// The thread that accepts, and joins the others.
    accepting: Mutex<Option<JoinHandle<()>>>,
    stopping: AtomicBool,
    /// Nothing if QEMU doesn't listen.
    pub(crate) answer: Option<Answer>,
    state: Mutex<State>,
    changed: Condvar,
}

/// How many epochs a multifd channel ended, and which its last page was of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    pub(crate) channel: u8,
    pub(crate) ended: Epoch,
    pub(crate) last_page: Epoch,
}

#[derive(Debug, Default)]
struct State {
    blocks: Announced,
    main_begun: bool,
    main_over: bool,
    /// Epochs that the main channel ended, if it was split to its end.
    main_rounds: Option<Epoch>,
    rounds: Vec<Rounds>,
    sockets: Vec<UnixStream>,
    error: Option<TapError>,
    split: bool,
    /// All connections have come to their end.
    over: bool,
    /// No connection is to be kept any more.
    cut: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("channels", &self.channels).finish_non_exhaustive()
    }
}

impl Tap {
    /// Waits for QEMU's connections on `listener` and reads them.
    ///
    /// The pool is this migration's own: a tap that fails or is stopped closes
    /// it, so that no thread waits for a buffer.
    ///
    /// With `held`, QEMU has the capabilities `return-path` and
    /// `switchover-ack` on: it does not stop a running VM before
    /// [`Stopper::let_finish`].
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(
        listener: UnixListener,
        channels: Channels,
        held: bool,
        pool: Arc<Pool>,
        output: Arc<dyn Output>,
    ) -> Result<Self, TapError> {
        let waker = listener
            .try_clone()
            .map_err(|source| TapError::Io { what: "keeping QEMU's socket", source })?;
        let shared = Arc::new(Shared {
            pool,
            output,
            counters: Arc::default(),
            channels,
            listener: Mutex::new(Some(waker)),
            accepting: Mutex::default(),
            stopping: AtomicBool::new(false),
            answer: held.then(Answer::default),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let accepting = thread::Builder::new()
            .name("tap-accept".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || accept(&shared, listener)
            })
            .map_err(|source| TapError::Io { what: "starting a thread", source })?;
        *shared.accepting.lock() = Some(accepting);
        Ok(Self { shared })
    }

    /// What it has taken so far.
    #[must_use]
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.shared.counters)
    }

    /// A handle to end it with.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper { shared: Arc::clone(&self.shared) }
    }

    /// Waits until all of QEMU's connections have come to their end, or
    /// something went wrong.
    ///
    /// # Errors
    /// The first thing that went wrong. QEMU is still being read then, until
    /// [`Stopper::cut`].
    pub fn join(self) -> Result<Summary, TapError> {
        let mut state = self.shared.state.lock();
        loop {
            if let Some(error) = state.error.take() {
                return Err(error);
            }
            if state.over {
                return Ok(Summary { split: state.split });
            }
            self.shared.changed.wait(&mut state);
        }
    }
}

impl Stopper {
    /// Lets QEMU stop the VM as soon as what is left is below its threshold. A
    /// tap that is not held, and a second call, do nothing.
    ///
    /// A VM that does not run is not held, and a stream that can't be split is
    /// let go at once: no pages of it wait here.
    pub fn let_finish(&self) {
        self.shared.let_finish();
    }

    /// Hands nothing on any more. What QEMU still writes is thrown away, so
    /// that it can be cancelled whatever it is doing.
    pub fn stop(&self) {
        self.shared.end(TapError::Stopped);
    }

    /// Closes QEMU's connections and waits for the threads. Call it once QEMU's
    /// migration has ended, or will not.
    pub fn cut(&self) {
        self.shared.end(TapError::Stopped);
        let mut state = self.shared.state.lock();
        state.cut = true;
        for socket in &state.sockets {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        drop(state);
        self.shared.refuse_connections();
        if let Some(accepting) = self.shared.accepting.lock().take() {
            let _ = accepting.join();
        }
    }

    /// CPU time of the tap's threads that have ended.
    #[must_use]
    pub fn cpu(&self) -> Duration {
        self.shared.counters.cpu()
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
    fn end(&self, error: TapError) {
        let mut state = self.state.lock();
        if !self.stopping.swap(true, SeqCst) {
            state.error = Some(error);
        }
        drop(state);
        self.pool.close();
        self.changed.notify_all();
        // A QEMU that fails by itself waits, with its big lock held, until the
        // answers have ended.
        if let Some(answer) = &self.answer {
            answer.end();
        }
    }

    /// Wakes the accept, once those are taken that QEMU made already.
    fn refuse_connections(&self) {
        if let Some(listener) = self.listener.lock().take() {
            let _ = shutdown(&listener, Shutdown::Both);
        }
    }

    /// Reads the main channel, of which there is one.
    fn main(&self, socket: &UnixStream) -> Result<(), TapError> {
        if std::mem::replace(&mut self.state.lock().main_begun, true) {
            return Err(TapError::Connection("a second main channel"));
        }
        if let Some(answer) = &self.answer {
            answer.open(keep(socket)?);
        }
        let outcome = main_channel::run(self, socket);
        let mut state = self.state.lock();
        state.main_over = true;
        if let Ok(rounds) = outcome {
            state.main_rounds = rounds;
        }
        drop(state);
        self.changed.notify_all();
        // QEMU makes all its connections before it writes; whichever is still
        // missing won't come.
        self.refuse_connections();
        outcome.map(drop)
    }

    /// Reads a multifd channel.
    fn channel(&self, socket: &UnixStream) -> Result<(), TapError> {
        if let Some(rounds) = channel::run(self, socket)? {
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
fn accept(shared: &Arc<Shared>, listener: UnixListener) {
    let expected = match shared.channels {
        Channels::Classic => 1,
        Channels::Multifd(count) => 1 + usize::from(count),
    };
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
            let _member = shared.output.crew().as_ref().map(Crew::join);
            if let Err(error) = serve(&shared, &socket) {
                shared.end(error);
                discard(&socket);
            }
            shared.counters.add_thread_cpu();
        })
        .map_err(io("starting a thread"))
}

/// Finds out which channel it is, and reads it to its end.
fn serve(shared: &Shared, socket: &UnixStream) -> Result<(), TapError> {
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
        stream::multifd::MAGIC => shared.channel(socket),
        _ => shared.main(socket),
    }
}
