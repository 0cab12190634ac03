//! Writes the stream that the destination's QEMU loads.
//!
//! One thread owns the writing end of the socket. Data for QEMU is put into a chunk, and the
//! chunk is queued; the order of the queue is the order of the stream. Chunks are counted, so
//! when QEMU reads slowly, lanes wait instead of filling memory. A chunk is obtained *before* any
//! range is locked, and queueing one never waits.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use page::{BATCH_PAGES, PAGE_BYTES, Pool, Room, SLOT_BYTES};
use parking_lot::{Condvar, Mutex};

use crate::FeederError;

/// Large enough for a section with a whole batch.
const CHUNK_BYTES: usize = 520 * 1024;
/// The bytes of a section of one block besides its records: 5 before them, the block's name once,
/// and 8 + 5 after them.
const SECTION_BYTES_MAX: usize = 5 + 256 + 8 + 5;
/// The pool counts each chunk as one of its own slots.
const _: () = assert!(CHUNK_BYTES <= SLOT_BYTES);
const _: () = assert!(CHUNK_BYTES >= SECTION_BYTES_MAX + BATCH_PAGES * (8 + PAGE_BYTES));

/// The most fill records in a chunk.
pub(crate) const FILLS_MAX: usize = (CHUNK_BYTES - SECTION_BYTES_MAX) / (8 + 1);

/// A chunk of at most this size is copied into the last queued chunk if that has room: a few
/// fills must not take up a whole chunk.
const JOIN_BYTES_MAX: usize = 64 * 1024;

/// The format of the stream's RAM sections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RamSection {
    pub(crate) id: u32,
    pub(crate) footers: bool,
}

#[derive(Debug)]
struct State {
    queue: VecDeque<(Vec<u8>, Room)>,
    /// Buffers for the next chunks; at most as many as are in use.
    free: Vec<Vec<u8>>,
    fed: Fed,
    failed: Option<FeederError>,
}

/// How far the stream was fed.
#[derive(Clone, Copy, Debug)]
enum Fed {
    /// No head, and perhaps a stream that is passed through unchanged.
    NoHead,
    /// The head is being queued.
    Head,
    /// The head is queued: pages may follow it.
    Pages(RamSection),
    /// No page can follow.
    Tail,
    /// No more chunks will be queued; the thread ends when the queue is empty.
    All,
}

/// Called for sections of pages.
type TellSections = Box<dyn Fn() + Send + Sync>;

struct Shared {
    /// Called for each section of pages.
    sections: OnceLock<TellSections>,
    state: Mutex<State>,
    queued: Condvar,
    /// Accounts for each chunk that is being filled, queued or written.
    pool: Arc<Pool>,
    /// For [`FeederHandle::stop`]: a shutdown ends a write that is blocked because QEMU doesn't
    /// read.
    socket: UnixStream,
}

/// Feeds the destination's QEMU with its stream: the head, pages, the tail. If it is dropped
/// before [`Feeder::finish`], it stops at once.
#[derive(Debug)]
pub struct Feeder {
    handle: FeederHandle,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A handle for users that don't end the feeder.
#[derive(Clone, Debug)]
pub struct FeederHandle {
    shared: Arc<Shared>,
}

impl Feeder {
    /// Starts feeding `socket`, which a QEMU reads that was told to load a stream. What waits for
    /// it is kept within `pool`, which is the feeder's own and is closed with it.
    ///
    /// # Errors
    /// If there are too many open files or threads.
    pub fn start(socket: UnixStream, pool: Arc<Pool>) -> io::Result<Self> {
        let state =
            State { queue: VecDeque::new(), free: Vec::new(), fed: Fed::NoHead, failed: None };
        let shared = Arc::new(Shared {
            sections: OnceLock::new(),
            state: Mutex::new(state),
            queued: Condvar::new(),
            pool,
            socket: socket.try_clone()?,
        });
        let thread = data_threads::spawn("feeder", {
            let shared = Arc::clone(&shared);
            move || {
                let _fault = EndsOnFault(&shared);
                shared.feed(socket);
            }
        })?;
        Ok(Self { handle: FeederHandle { shared }, thread: Mutex::new(Some(thread)) })
    }

    /// Ends feeding once QEMU reads nothing for `limit` while there is something to read. Without
    /// it, a thread that feeds a QEMU that hangs waits until [`FeederHandle::stop`].
    ///
    /// # Errors
    /// If the limit is zero.
    pub fn give_up_after(&self, limit: Duration) -> io::Result<()> {
        // The thread's handle is of the same socket.
        self.handle.shared.socket.set_write_timeout(Some(limit))
    }

    /// A handle for the placer, and for stopping the feeder from another thread.
    #[must_use]
    pub fn handle(&self) -> FeederHandle {
        self.handle.clone()
    }

    /// Calls `tell` for each section of pages that is queued. It must not wait. To be set once,
    /// before the head.
    pub fn notify_sections(&self, tell: impl Fn() + Send + Sync + 'static) {
        let _ = self.handle.shared.sections.set(Box::new(tell));
    }

    /// Feeds the head: everything before the pages, up to the block list. Pages then come in
    /// sections with the id `ram_section`, with `footers` if the machine type writes them.
    ///
    /// # Errors
    /// If QEMU stopped reading, or this was called before.
    pub fn head(&self, bytes: &[u8], ram_section: u32, footers: bool) -> Result<(), FeederError> {
        let shared = &self.handle.shared;
        let mut state = shared.state.lock();
        match state.fed {
            Fed::NoHead => state.fed = Fed::Head,
            Fed::Head | Fed::Pages(_) | Fed::Tail => return Err(FeederError::SecondHead),
            Fed::All => return Err(FeederError::Ended),
        }
        drop(state);
        self.handle.feed(bytes)?;
        // From here on, pages are accepted: they queue behind the head.
        let mut state = shared.state.lock();
        if matches!(state.fed, Fed::Head) {
            state.fed = Fed::Pages(RamSection { id: ram_section, footers });
        }
        Ok(())
    }

    /// Feeds the tail: everything after the pages. No page can follow.
    ///
    /// # Errors
    /// If QEMU stopped reading.
    pub fn tail(&self, bytes: &[u8]) -> Result<(), FeederError> {
        let mut state = self.handle.shared.state.lock();
        if !matches!(state.fed, Fed::All) {
            state.fed = Fed::Tail;
        }
        drop(state);
        self.handle.feed(bytes)
    }

    /// Feeds a piece of a stream that is passed through unchanged.
    ///
    /// # Errors
    /// If QEMU stopped reading.
    pub fn whole(&self, bytes: &[u8]) -> Result<(), FeederError> {
        self.handle.feed(bytes)
    }

    /// Stops feeding at once. See [`FeederHandle::stop`].
    pub fn stop(&self) {
        self.handle.stop();
    }

    /// The most bytes that were ever waiting for QEMU.
    #[must_use]
    pub fn high_water_bytes(&self) -> u64 {
        self.handle.shared.pool.high_water_bytes() as u64
    }

    /// Waits until everything is written, and ends the stream.
    ///
    /// # Errors
    /// If any part of the stream was not written; the first reason.
    pub fn finish(&self) -> Result<(), FeederError> {
        let shared = &self.handle.shared;
        shared.state.lock().fed = Fed::All;
        shared.queued.notify_one();
        // Callers that still wait for room are too late.
        shared.pool.close();
        self.join();
        shared.state.lock().failed.clone().map_or(Ok(()), Err)
    }

    fn join(&self) {
        if let Some(thread) = self.thread.lock().take() {
            // A panic is already in the log.
            let _ = thread.join();
        }
    }
}

impl Drop for Feeder {
    fn drop(&mut self) {
        if self.thread.lock().is_some() {
            self.stop();
            self.join();
        }
    }
}

impl FeederHandle {
    /// Stops feeding at once, also in the middle of a write. QEMU sees its
    /// stream end early, and every waiting call returns
    /// [`FeederError::Stopped`]. Does nothing after [`Feeder::finish`].
    pub fn stop(&self) {
        self.shared.fail(FeederError::Stopped);
    }

    /// An empty chunk for pages, and the format of their section. Waits for QEMU to read if too
    /// much is queued.
    pub(crate) fn chunk_for_pages(&self) -> Result<(Chunk<'_>, RamSection), FeederError> {
        let chunk = self.shared.chunk()?;
        let fed = self.shared.state.lock().fed;
        match fed {
            Fed::NoHead | Fed::Head => Err(FeederError::NoHead),
            Fed::Pages(ram) => Ok((chunk, ram)),
            Fed::Tail | Fed::All => Err(FeederError::Ended),
        }
    }

    fn feed(&self, bytes: &[u8]) -> Result<(), FeederError> {
        for piece in bytes.chunks(CHUNK_BYTES) {
            let mut chunk = self.shared.chunk()?;
            chunk.bytes.extend_from_slice(piece);
            chunk.queue()?;
        }
        Ok(())
    }
}

/// A buffer that is being filled for QEMU. If it is dropped without being queued, it is given
/// back.
pub(crate) struct Chunk<'f> {
    pub(crate) bytes: Vec<u8>,
    /// None once it is queued.
    room: Option<Room>,
    shared: &'f Shared,
}

impl Chunk<'_> {
    /// Queues a section of pages. Never waits.
    pub(crate) fn queue_section(self) -> Result<(), FeederError> {
        let shared = self.shared;
        self.queue()?;
        if let Some(tell) = shared.sections.get() {
            tell();
        }
        Ok(())
    }

    /// Queues the chunk. Never waits.
    fn queue(mut self) -> Result<(), FeederError> {
        if self.bytes.is_empty() {
            return Ok(());
        }
        let mut state = self.shared.state.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if matches!(state.fed, Fed::All) {
            return Err(FeederError::Ended);
        }
        match state.queue.back_mut() {
            Some((last, _))
                if self.bytes.len() <= JOIN_BYTES_MAX
                    && last.len() + self.bytes.len() <= CHUNK_BYTES =>
            {
                // Our own buffer is given back when `self` is dropped, after the state is
                // unlocked.
                last.extend_from_slice(&self.bytes);
                drop(state);
            }
            _ => {
                let Some(room) = self.room.take() else { return Ok(()) };
                state.queue.push_back((std::mem::take(&mut self.bytes), room));
                drop(state);
                self.shared.queued.notify_one();
            }
        }
        Ok(())
    }
}

impl Drop for Chunk<'_> {
    fn drop(&mut self) {
        // A queued chunk has left nothing here, and is still accounted for.
        if let Some(room) = self.room.take() {
            self.shared.give_back(std::mem::take(&mut self.bytes), room);
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Shared {
    fn chunk(&self) -> Result<Chunk<'_>, FeederError> {
        let Ok(room) = self.pool.take_room() else { return Err(self.why_closed()) };
        let mut state = self.state.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if matches!(state.fed, Fed::All) {
            return Err(FeederError::Ended);
        }
        let free = state.free.pop();
        drop(state);
        let bytes = free.unwrap_or_else(|| Vec::with_capacity(CHUNK_BYTES));
        Ok(Chunk { bytes, room: Some(room), shared: self })
    }

    fn why_closed(&self) -> FeederError {
        self.state.lock().failed.clone().unwrap_or(FeederError::Ended)
    }

    fn give_back(&self, mut bytes: Vec<u8>, room: Room) {
        bytes.clear();
        // Before the room is released, so that a thread that gets the room finds a buffer.
        self.state.lock().free.push(bytes);
        drop(room);
    }

    /// Records the first reason, and ends all waiting.
    fn fail(&self, error: FeederError) {
        let mut state = self.state.lock();
        if state.failed.is_none() {
            state.failed = Some(error);
        }
        drop(state);
        // This fails only if the other end is closed already.
        let _ = self.socket.shutdown(Shutdown::Both);
        self.queued.notify_all();
        self.pool.close();
    }

    /// The thread: writes chunk after chunk.
    fn feed(&self, mut socket: UnixStream) {
        while let Some((bytes, room)) = self.next() {
            data_threads::point();
            let written = socket.write_all(&bytes);
            self.give_back(bytes, room);
            if let Err(error) = written {
                self.fail(self.why(error));
                return;
            }
        }
        if self.state.lock().failed.is_none()
            && let Err(error) = socket.flush().and_then(|()| socket.shutdown(Shutdown::Write))
        {
            self.fail(FeederError::Write(Arc::new(error)));
        }
    }

    /// Why a write failed. One that took longer than it may fails as if it would block.
    fn why(&self, error: io::Error) -> FeederError {
        match self.socket.write_timeout() {
            Ok(Some(limit)) if error.kind() == io::ErrorKind::WouldBlock => {
                FeederError::Unread { seconds: limit.as_secs() }
            }
            _ => FeederError::Write(Arc::new(error)),
        }
    }

    /// The next chunk to write. None at the end.
    fn next(&self) -> Option<(Vec<u8>, Room)> {
        let mut state = self.state.lock();
        loop {
            if state.failed.is_some() {
                return None;
            }
            if let Some(next) = state.queue.pop_front() {
                return Some(next);
            }
            if matches!(state.fed, Fed::All) {
                return None;
            }
            self.queued.wait(&mut state);
        }
    }
}

/// Reports a panic of the writing thread: without it, all callers would wait for ever.
struct EndsOnFault<'s>(&'s Shared);

impl Drop for EndsOnFault<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.fail(FeederError::Fault);
        }
    }
}
