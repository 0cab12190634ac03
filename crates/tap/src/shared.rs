//! State shared by a tap's threads, and how they end together.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use page::{Epoch, Pool};
use parking_lot::{Condvar, Mutex};
use rustix::net::{Shutdown, shutdown};
use stream::{Blocks, Splitter, StreamKind};

use crate::answer::Answer;
use crate::counters::Counters;
use crate::epochs::Epochs;
use crate::error::TapError;
use crate::output::Output;
use crate::socket::is_passing;

/// For how long, and how often, the tap tries again where the system has no descriptor for it.
/// Other migrations of the agent give some back as they end.
const AGAIN_MAX: Duration = Duration::from_secs(5);
const AGAIN_EVERY: Duration = Duration::from_millis(50);

/// The connections that QEMU will make.
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

/// The VM's RAM blocks, once the main channel has announced them.
pub(crate) type Announced = Option<Arc<Blocks>>;

/// State shared by a tap's threads.
pub(crate) struct Shared {
    pub(crate) pool: Arc<Pool>,
    pub(crate) output: Arc<dyn Output>,
    pub(crate) counters: Counters,
    pub(crate) channels: Channels,
    pub(crate) epochs: Epochs,
    /// Wakes the accepting thread. It is closed when the tap ends, together with
    /// the connections in its backlog, unless QEMU has it open too: a QEMU whose
    /// connection is never accepted would wait for ever.
    pub(crate) listener: Mutex<Option<UnixListener>>,
    /// The thread that accepts, and joins the others.
    pub(crate) accepting: Mutex<Option<JoinHandle<()>>>,
    pub(crate) stopping: AtomicBool,
    /// None if QEMU doesn't listen, or its destination answers.
    pub(crate) answer: Option<Answer>,
    /// QEMU's requests on the return path are passed on with the stream.
    pub(crate) answered: bool,
    pub(crate) state: Mutex<State>,
    pub(crate) changed: Condvar,
}

/// The number of epochs that a multifd channel ended, and the epoch of its last
/// page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    pub(crate) channel: u8,
    pub(crate) ended: Epoch,
    pub(crate) last_page: Epoch,
}

/// The main channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Main {
    #[default]
    Awaited,
    Read,
    Ended,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    blocks: Announced,
    main: Main,
    /// Epochs that the main channel ended, if it was split to its end.
    main_rounds: Option<Epoch>,
    rounds: Vec<Rounds>,
    pub(crate) sockets: Vec<UnixStream>,
    pub(crate) error: Option<TapError>,
    /// All connections have ended.
    pub(crate) over: bool,
    /// No further connection may be kept.
    pub(crate) cut: bool,
}

impl State {
    /// Whether the main channel has ended.
    pub(crate) fn main_has_ended(&self) -> bool {
        self.main == Main::Ended
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("channels", &self.channels).finish_non_exhaustive()
    }
}

impl Shared {
    /// State for a QEMU that makes these connections and doesn't listen to
    /// answers.
    pub(crate) fn new(channels: Channels, pool: Arc<Pool>, output: Arc<dyn Output>) -> Self {
        Self {
            pool,
            output,
            counters: Counters::default(),
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

    /// Waits for the block list; none if the main channel ends without one.
    pub(crate) fn wait_blocks(&self) -> Result<Announced, TapError> {
        let mut state = self.state.lock();
        loop {
            if self.stopping.load(SeqCst) {
                return Err(TapError::Stopped);
            }
            if state.blocks.is_some() || state.main_has_ended() {
                return Ok(state.blocks.clone());
            }
            self.changed.wait(&mut state);
        }
    }

    pub(crate) fn splitter(&self, stream: StreamKind) -> Splitter {
        if self.answered { Splitter::answered(stream) } else { Splitter::new(stream) }
    }

    /// The main channel has read the block list.
    pub(crate) fn announce(&self, blocks: Arc<Blocks>) {
        self.state.lock().blocks = Some(blocks);
        self.changed.notify_all();
    }

    /// See [`Stopper::let_stop`].
    pub(crate) fn let_stop(&self) {
        if let Some(answer) = &self.answer {
            answer.allow();
        }
    }

    /// Lets QEMU stop the VM, and end its migration once it has sent everything.
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

    /// Stops handing anything on; the first error stays.
    pub(crate) fn end(&self, error: TapError) {
        // First of all, so that a failed tap lets no migration finish. Also, a
        // QEMU that fails by itself waits for the end of the answers, with its
        // big lock held.
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

    /// Wakes the accepting thread, after it has accepted the connections already
    /// made.
    pub(crate) fn refuse_connections(&self) {
        if let Some(listener) = self.listener.lock().take() {
            let _ = shutdown(&listener, Shutdown::Both);
        }
    }

    /// Notes the main channel; a second one is an error.
    pub(crate) fn begin_main(&self, socket: &UnixStream) -> Result<(), TapError> {
        let mut state = self.state.lock();
        if state.main != Main::Awaited {
            return Err(TapError::Connection("a second main channel"));
        }
        state.main = Main::Read;
        drop(state);
        if let Some(answer) = &self.answer {
            answer.open(self.keep(socket)?);
        }
        Ok(())
    }

    /// Notes the end of the main channel, with its number of epochs if it was
    /// split to its end.
    pub(crate) fn end_main(&self, rounds: Option<Epoch>) {
        let mut state = self.state.lock();
        state.main = Main::Ended;
        state.main_rounds = rounds;
        drop(state);
        self.changed.notify_all();
    }

    /// Notes the end of a multifd channel.
    pub(crate) fn note_rounds(&self, rounds: Rounds) {
        self.state.lock().rounds.push(rounds);
    }

    /// Checks that all channels ended as many epochs as the main channel counted.
    ///
    /// One extra SYNC is harmless if no page follows it: some versions of QEMU
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

    /// Notes a connection, so that a cut closes it.
    pub(crate) fn note(&self, socket: &UnixStream) -> Result<(), TapError> {
        let clone = self.keep(socket)?;
        let mut state = self.state.lock();
        if state.cut {
            return Err(TapError::Stopped);
        }
        state.sockets.push(clone);
        Ok(())
    }

    fn keep(&self, socket: &UnixStream) -> Result<UnixStream, TapError> {
        let clone = self.try_again(|| socket.try_clone());
        clone.map_err(|source| TapError::Io { what: "keeping a connection of QEMU", source })
    }

    /// Repeats a call that fails for lack of descriptors or memory: until it succeeds, for
    /// [`AGAIN_MAX`] at most, and no longer once the connections are cut.
    pub(crate) fn try_again<T>(&self, call: impl Fn() -> io::Result<T>) -> io::Result<T> {
        let end = Instant::now() + AGAIN_MAX;
        loop {
            let done = call();
            let passes = done.as_ref().err().is_some_and(is_passing);
            if !passes || Instant::now() >= end || !self.pause() {
                return done;
            }
        }
    }

    /// Waits a moment; `false` if the connections are cut.
    fn pause(&self) -> bool {
        let mut state = self.state.lock();
        if !state.cut {
            let _ = self.changed.wait_for(&mut state, AGAIN_EVERY);
        }
        !state.cut
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use page::{Batch, Pool, SLOT_BYTES};
    use rustix::io::Errno;

    use super::*;
    use crate::output::{Head, Stopped};

    struct Nothing;

    impl Output for Nothing {
        fn head(&self, _: Head) -> Result<(), Stopped> {
            Ok(())
        }
        fn batch(&self, _: Batch) -> Result<(), Stopped> {
            Ok(())
        }
        fn tail(&self, _: &[u8]) -> Result<(), Stopped> {
            Ok(())
        }
        fn whole(&self, _: &[u8], _: Option<&str>) -> Result<(), Stopped> {
            Ok(())
        }
    }

    /// How often a call is made that fails with `error` the first `failures` times, and whether it
    /// succeeds in the end.
    fn calls(shared: &Shared, error: Errno, failures: u32) -> (u32, bool) {
        let calls = Cell::new(0);
        let done = shared.try_again(|| {
            calls.set(calls.get() + 1);
            if calls.get() > failures { Ok(()) } else { Err(error.into()) }
        });
        (calls.get(), done.is_ok())
    }

    #[test]
    fn a_connection_is_not_lost_for_want_of_descriptors() {
        let shared = Shared::new(Channels::Classic, Pool::new(SLOT_BYTES), Arc::new(Nothing));
        for error in [Errno::MFILE, Errno::NFILE, Errno::CONNABORTED] {
            assert_eq!(calls(&shared, error, 2), (3, true), "{error}");
        }
        // As from a listener that was shut down.
        assert_eq!(calls(&shared, Errno::INVAL, 2), (1, false));
        // A tap that was stopped still has to read what QEMU writes.
        shared.end(TapError::Stopped);
        assert_eq!(calls(&shared, Errno::MFILE, 1), (2, true));
        shared.state.lock().cut = true;
        assert_eq!(calls(&shared, Errno::MFILE, 1), (1, false));
    }
}
