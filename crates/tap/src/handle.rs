//! The tap's public interface.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use page::Pool;
use parking_lot::Mutex;

use crate::accept::{AlreadyRead, accept, read};
use crate::answer::Answer;
use crate::error::TapError;
use crate::main_channel::READ_BEFORE_BYTES_MAX;
use crate::output::Output;
use crate::shared::{Channels, Shared};
use crate::socket::abort;

/// The threads that read one QEMU migration.
///
/// A tap that fails or is stopped keeps reading and discards the data, until QEMU closes
/// its connections or they are cut. QEMU 10.0 waits for ever, and can't be cancelled any
/// more, if its multifd channels break while it sets up its migration: cancel it first, and
/// cut last.
#[derive(Debug)]
pub struct Tap {
    shared: Arc<Shared>,
}

/// Connections of one migration that the caller has accepted and sorted.
#[derive(Debug)]
pub struct Taken {
    /// The main channel.
    pub main: UnixStream,
    /// The bytes already read from it.
    pub before: Vec<u8>,
    /// The multifd channels.
    pub channels: Vec<TakenChannel>,
}

/// A multifd channel that was read past its first message.
#[derive(Debug)]
pub struct TakenChannel {
    /// Its number.
    pub id: u8,
    /// Its connection.
    pub socket: UnixStream,
    /// The bytes read after the first message: heads of packets without pages, and at most one
    /// of a packet with pages, or a part of a head.
    pub before: Vec<u8>,
}

impl Taken {
    /// The most bytes of the main channel that may have been read.
    pub const READ_BEFORE_BYTES_MAX: usize = READ_BEFORE_BYTES_MAX;

    fn kind(&self) -> Result<Channels, TapError> {
        if self.before.len() > READ_BEFORE_BYTES_MAX {
            return Err(TapError::Connection("more of it was read than can be split"));
        }
        match u8::try_from(self.channels.len()) {
            Ok(0) => Ok(Channels::Classic),
            Ok(count) => Ok(Channels::Multifd(count)),
            Err(_) => Err(TapError::Connection("more than 255 multifd channels")),
        }
    }

    /// The main channel's first.
    fn sockets(&self) -> impl Iterator<Item = &UnixStream> {
        std::iter::once(&self.main).chain(self.channels.iter().map(|one| &one.socket))
    }

    fn into_connections(self) -> Vec<(UnixStream, AlreadyRead)> {
        let connection = |one: TakenChannel| (one.socket, AlreadyRead::Channel(one.id, one.before));
        let channels = self.channels.into_iter().map(connection);
        std::iter::once((self.main, AlreadyRead::Main(self.before))).chain(channels).collect()
    }
}

/// Ends a tap from another thread, or lets QEMU end it.
#[derive(Clone, Debug)]
pub struct Stopper {
    shared: Arc<Shared>,
}

impl Tap {
    /// Waits for QEMU's connections on `listener` and reads them.
    ///
    /// The pool must be this migration's own: a tap that fails or is stopped closes it, so
    /// that no thread waits for a buffer.
    ///
    /// With `held`, QEMU has the capabilities `return-path` and `switchover-ack` enabled:
    /// it does not stop a running VM before [`Stopper::let_stop`].
    ///
    /// With multifd, `after_first` runs on the tap's thread once the main channel is accepted, and
    /// the other channels are accepted when it returns. A connection that was accepted breaks if
    /// this process dies, which QEMU must not see before it is ready for it.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(
        listener: UnixListener,
        channels: Channels,
        held: bool,
        pool: Arc<Pool>,
        output: Arc<dyn Output>,
        after_first: impl FnOnce() + Send + 'static,
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
        Self::begin(shared, move |shared| accept(shared, listener, after_first))
    }

    /// Reads the connections of a migration that another program commands, and whose return
    /// path its destination answers: what QEMU requests there is part of the head.
    ///
    /// # Errors
    /// If the system lacks a thread or descriptors, or more than
    /// [`Taken::READ_BEFORE_BYTES_MAX`] of the main channel was read before. The connections are
    /// returned, since QEMU may hang if channels are closed before it closes them: see
    /// [`Stopper::hang_up`].
    pub fn of_taken(
        taken: Taken,
        pool: Arc<Pool>,
        output: Arc<dyn Output>,
    ) -> Result<Self, Box<(TapError, Taken)>> {
        let shared = match taken.kind() {
            Ok(kind) => Shared { answered: true, ..Shared::new(kind, pool, output) },
            Err(error) => return Err(Box::new((error, taken))),
        };
        // Before the thread that reads them starts: a tap that hangs up at once must know which
        // is the main channel.
        let noted = taken.sockets().try_for_each(|socket| shared.note(socket));
        if let Err(error) = noted {
            return Err(Box::new((error, taken)));
        }
        // What a thread was given that can't be started would be closed.
        let (give, given) = sync_channel::<Taken>(1);
        let run = move |shared: &Arc<Shared>| {
            if let Ok(taken) = given.recv() {
                read(shared, taken.into_connections());
            }
        };
        match Self::begin(shared, run) {
            Ok(tap) => {
                // The thread waits for it.
                let _ = give.send(taken);
                Ok(tap)
            }
            Err(error) => Err(Box::new((error, taken))),
        }
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

    /// A handle that ends the tap.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper { shared: Arc::clone(&self.shared) }
    }

    /// Waits until all of QEMU's connections have ended, or an error has occurred.
    ///
    /// # Errors
    /// The first error. QEMU is still being read then, until [`Stopper::cut`].
    pub fn join(self) -> Result<(), TapError> {
        let mut state = self.shared.state.lock();
        loop {
            if let Some(error) = state.error.take() {
                return Err(error);
            }
            if state.over {
                return Ok(());
            }
            self.shared.changed.wait(&mut state);
        }
    }
}

impl Stopper {
    /// Lets QEMU stop the VM as soon as the remaining data is below its threshold. Does
    /// nothing for a tap that is not held, or when called again.
    ///
    /// A stopped VM is not held, and a stream that can't be split is released at once: the
    /// tap holds none of its pages.
    pub fn let_stop(&self) {
        self.shared.let_stop();
    }

    /// Whether a held QEMU ended its RAM section before it was allowed to. It does so if
    /// the VM is stopped; it must not otherwise.
    #[must_use]
    pub fn ended_early(&self) -> bool {
        self.shared.ended_early()
    }

    /// Stops handing anything on. The tap discards what QEMU still writes, so that its
    /// migration can be cancelled in any state.
    pub fn stop(&self) {
        self.shared.end(TapError::Stopped);
    }

    /// Closes QEMU's connections and waits for the threads. Call it once QEMU's migration
    /// has ended or never will.
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

    /// Fails a migration that another program commands and this agent can't cancel: closes
    /// the main channel, reads the multifd channels until QEMU closes them, for `limit` at
    /// most, then cuts what is left.
    ///
    /// QEMU 10.0 waits for ever if it loses a channel while it waits for the SYNC of
    /// another, so it must lose none.
    pub fn hang_up(&self, limit: Duration) {
        self.shared.end(TapError::Stopped);
        let end = Instant::now() + limit;
        let mut state = self.shared.state.lock();
        // The first socket is the main channel.
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
