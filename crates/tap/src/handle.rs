//! The tap, as those who start it see it.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use page::Pool;
use parking_lot::Mutex;

use crate::accept::{Begun, accept, read};
use crate::answer::Answer;
use crate::counters::Counters;
use crate::error::TapError;
use crate::main_channel::READ_BEFORE_BYTES_MAX;
use crate::output::Output;
use crate::shared::{Channels, Shared};
use crate::socket::abort;

/// How a stream that came to its end went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Whether its pages were taken out, or it was passed on whole.
    pub split: bool,
}

/// The threads that read one migration of QEMU.
///
/// A tap that fails or is stopped goes on reading and discards what it reads,
/// until QEMU closes its connections or they are cut. QEMU 10.0 waits for ever,
/// and can't be cancelled any more, if its multifd channels break while it sets
/// up its migration: cancel it first, and cut last.
#[derive(Debug)]
pub struct Tap {
    shared: Arc<Shared>,
}

/// Connections of one migration that were taken, and sorted, by somebody else.
#[derive(Debug)]
pub struct Taken {
    /// The main one.
    pub main: UnixStream,
    /// What was read of it.
    pub before: Vec<u8>,
    /// The multifd channels, each with its number, of whom the first message was read.
    pub channels: Vec<(u8, UnixStream)>,
}

impl Taken {
    /// The most of the main connection that may have been read.
    pub const READ_BEFORE_BYTES_MAX: usize = READ_BEFORE_BYTES_MAX;
}

/// Ends a tap from another thread, or lets QEMU end it.
#[derive(Clone, Debug)]
pub struct Stopper {
    shared: Arc<Shared>,
}

impl Tap {
    /// Waits for QEMU's connections on `listener` and reads them.
    ///
    /// The pool is this migration's own: a tap that fails or is stopped closes
    /// it, so that no thread waits for a buffer.
    ///
    /// With `held`, QEMU has the capabilities `return-path` and
    /// `switchover-ack` on: it does not stop a running VM before
    /// [`Stopper::let_stop`].
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
        let shared = Shared::new(channels, pool, output);
        let shared = Shared {
            listener: Mutex::new(Some(waker)),
            answer: held.then(Answer::default),
            ..shared
        };
        Self::begin(shared, move |shared| accept(shared, listener))
    }

    /// Reads connections of a QEMU that somebody else has migrate, and whose questions
    /// its destination answers: what it asks is in the head.
    ///
    /// # Errors
    /// If the system gives no thread, or more of the main connection was read before
    /// than [`Taken::READ_BEFORE_BYTES_MAX`].
    pub fn of_taken(
        taken: Taken,
        pool: Arc<Pool>,
        output: Arc<dyn Output>,
    ) -> Result<Self, TapError> {
        let Taken { main, before, channels } = taken;
        if before.len() > Taken::READ_BEFORE_BYTES_MAX {
            return Err(TapError::Connection("more of it was read than can be split"));
        }
        let kind = match u8::try_from(channels.len()) {
            Ok(0) => Channels::Classic,
            Ok(count) => Channels::Multifd(count),
            Err(_) => return Err(TapError::Connection("more than 255 multifd channels")),
        };
        let channels = channels.into_iter().map(|(id, socket)| (socket, Begun::Channel(id)));
        let connections: Vec<_> =
            std::iter::once((main, Begun::Main(before))).chain(channels).collect();
        let shared = Shared { answered: true, ..Shared::new(kind, pool, output) };
        Self::begin(shared, move |shared| read(shared, connections))
    }

    fn begin(
        shared: Shared,
        run: impl FnOnce(&Arc<Shared>) + Send + 'static,
    ) -> Result<Self, TapError> {
        let shared = Arc::new(shared);
        let accepting = data_threads::spawn("tap-accept", {
            let shared = Arc::clone(&shared);
            move || run(&shared)
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
    pub fn let_stop(&self) {
        self.shared.let_stop();
    }

    /// Lets QEMU stop the VM, and end its migration once it has sent all. The tap says
    /// so itself when RAM has ended, unless [`Output::ram_ended`](crate::Output::ram_ended)
    /// has that wait.
    pub fn let_finish(&self) {
        self.shared.let_finish();
    }

    /// Whether QEMU, which is held, has ended its RAM section before it was let: as it
    /// does if the VM stands still, and must not do by itself.
    #[must_use]
    pub fn ended_early(&self) -> bool {
        self.shared.ended_early()
    }

    /// Hands nothing on any more. What QEMU still writes is discarded, so that
    /// its migration can be cancelled whatever it is doing.
    pub fn stop(&self) {
        self.shared.end(TapError::Stopped);
    }

    /// Closes QEMU's connections and waits for the threads. Call it once QEMU's
    /// migration has ended, or will not.
    pub fn cut(&self) {
        self.shared.end(TapError::Stopped);
        let mut state = self.shared.state.lock();
        state.cut = true;
        for socket in std::mem::take(&mut state.sockets) {
            abort(&socket);
        }
        drop(state);
        self.shared.refuse_connections();
        if let Some(accepting) = self.shared.accepting.lock().take() {
            let _ = accepting.join();
        }
    }

    /// Makes a migration fail whose connections were taken by somebody else, who can't
    /// cancel it: closes the main one, and reads the channels until QEMU closes them, for
    /// `limit` at most. Then cuts what is left.
    ///
    /// A QEMU (10.0) that loses a channel while it waits for another one's SYNC waits for
    /// ever, so it is to lose none.
    pub fn hang_up(&self, limit: Duration) {
        self.shared.end(TapError::Stopped);
        let end = Instant::now() + limit;
        let mut state = self.shared.state.lock();
        // The first is the main one.
        match state.sockets.first() {
            Some(main) if !state.over => abort(main),
            _ => {}
        }
        while !state.over && !self.shared.changed.wait_until(&mut state, end).timed_out() {}
        drop(state);
        self.cut();
    }

    /// CPU time of the tap's threads that have ended.
    #[must_use]
    pub fn cpu(&self) -> Duration {
        self.shared.counters.cpu()
    }
}
