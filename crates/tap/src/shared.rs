//! What a tap's threads share, and how they end together.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;

use page::{Epoch, Pool};
use parking_lot::{Condvar, Mutex};
use rustix::net::{Shutdown, shutdown};
use stream::{Blocks, Splitter, StreamKind};

use crate::answer::Answer;
use crate::counters::Counters;
use crate::epochs::Epochs;
use crate::error::TapError;
use crate::output::Output;

/// Which connections QEMU will make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channels {
    /// The main channel only, with the pages in it.
    Classic,
    /// The main channel and this many multifd channels.
    Multifd(u8),
}

impl Channels {
    /// How many connections QEMU makes.
    pub(crate) fn connections(self) -> usize {
        match self {
            Self::Classic => 1,
            Self::Multifd(count) => 1 + usize::from(count),
        }
    }
}

/// Blocks of the VM, once the main channel has announced them.
pub(crate) type Announced = Option<Arc<Blocks>>;

/// What a tap's threads share.
pub(crate) struct Shared {
    pub(crate) pool: Arc<Pool>,
    pub(crate) output: Arc<dyn Output>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) channels: Channels,
    pub(crate) epochs: Epochs,
    /// To wake the accept with. It closes when the tap ends, and with it what
    /// waits there: a QEMU whose connection nobody takes would wait for ever.
    pub(crate) listener: Mutex<Option<UnixListener>>,
    /// The thread that accepts, and joins the others.
    pub(crate) accepting: Mutex<Option<JoinHandle<()>>>,
    pub(crate) stopping: AtomicBool,
    /// Nothing if QEMU doesn't listen, or somebody else answers.
    pub(crate) answer: Option<Answer>,
    /// What it asks goes on with the stream.
    pub(crate) answered: bool,
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
    pub(crate) main_over: bool,
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
    /// Of a QEMU that makes these connections, and listens to nothing.
    pub(crate) fn new(channels: Channels, pool: Arc<Pool>, output: Arc<dyn Output>) -> Self {
        Self {
            pool,
            output,
            counters: Arc::default(),
            channels,
            epochs: Epochs::new(channels.connections()),
            listener: Mutex::default(),
            accepting: Mutex::default(),
            stopping: AtomicBool::new(false),
            answer: None,
            answered: false,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

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

    pub(crate) fn splitter(&self, stream: StreamKind) -> Splitter {
        if self.answered { Splitter::answered(stream) } else { Splitter::new(stream) }
    }

    /// The main channel has come to the block list.
    pub(crate) fn announce(&self, blocks: Arc<Blocks>) {
        let mut state = self.state.lock();
        state.blocks = Some(blocks);
        state.split = true;
        drop(state);
        self.changed.notify_all();
    }

    /// See [`Stopper::let_stop`].
    pub(crate) fn let_stop(&self) {
        if let Some(answer) = &self.answer {
            answer.allow();
        }
    }

    /// See [`Stopper::let_finish`].
    pub(crate) fn let_finish(&self) {
        if let Some(answer) = &self.answer {
            answer.let_finish();
        }
    }

    /// QEMU has ended the RAM section of a stream that is split.
    pub(crate) fn ram_ended(&self) {
        if let Some(answer) = &self.answer {
            answer.ram_ended();
        }
    }

    /// See [`Stopper::ended_early`].
    pub(crate) fn ended_early(&self) -> bool {
        self.answer.as_ref().is_some_and(Answer::was_early)
    }

    /// Effects nothing on from now on; the first error stays.
    pub(crate) fn end(&self, error: TapError) {
        // First of all, so that a tap that has failed lets nothing finish. And a
        // QEMU that fails by itself waits, with its big lock held, until the
        // answers have ended.
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

    /// Wakes the accept, once those are taken that QEMU made already.
    pub(crate) fn refuse_connections(&self) {
        if let Some(listener) = self.listener.lock().take() {
            let _ = shutdown(&listener, Shutdown::Both);
        }
    }

    /// The main channel has come, of which there is one.
    pub(crate) fn begin_main(&self, socket: &UnixStream) -> Result<(), TapError> {
        if std::mem::replace(&mut self.state.lock().main_begun, true) {
            return Err(TapError::Connection("a second main channel"));
        }
        if let Some(answer) = &self.answer {
            answer.open(keep(socket)?);
        }
        Ok(())
    }

    /// It has ended, and counted epochs if it was split to its end.
    pub(crate) fn end_main(&self, rounds: Option<Epoch>) {
        let mut state = self.state.lock();
        state.main_over = true;
        state.main_rounds = rounds;
        drop(state);
        self.changed.notify_all();
    }

    /// A multifd channel has come to its end.
    pub(crate) fn note_rounds(&self, rounds: Rounds) {
        self.state.lock().rounds.push(rounds);
    }

    /// All channels must have ended the epochs that the main channel counted. One
    /// SYNC more does no harm if no page came after it: some versions of QEMU
    /// send it at the end of RAM without telling the main channel.
    pub(crate) fn compare_rounds(&self) -> Result<(), TapError> {
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
    pub(crate) fn note(&self, socket: &UnixStream) -> Result<(), TapError> {
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
