//! The reader: threads that read requested pages and pass them to the consumer.
//!
//! One thread at a time has the *turn*: it waits for requested items and for the
//! pace, takes the next request's items, and only then passes the turn on. So
//! requests start in order, and items that are not started can be taken from the
//! end until the last moment. A watch thread notices requests without an
//! answer, and cleans up at the end: it takes the items from threads that hang
//! and leaves the threads behind.

mod watch;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use data_threads::DataThreads;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::requested::{Requested, STRETCH_BYTES};
use crate::size::Size;
use crate::{Consumer, Failure, Item, OpenError, Pace, Source};

/// Failed requests in a row that end the reader, and failed ones altogether.
const FAILURES_IN_A_ROW_MAX: u32 = 8;
const FAILURES_MAX: u32 = 64;
/// With this many threads left behind, by all readers, no reader is started any more.
const ABANDONED_MAX: usize = 64;

static ABANDONED: AtomicUsize = AtomicUsize::new(0);

/// How many threads of this process were left behind by their readers, because
/// their storage didn't answer, and still wait for it.
#[must_use]
pub fn abandoned_threads() -> usize {
    ABANDONED.load(Relaxed)
}

/// Checks that few enough threads are left behind to start another.
pub(crate) fn check_abandoned() -> Result<(), OpenError> {
    match abandoned_threads() {
        threads if threads < ABANDONED_MAX => Ok(()),
        threads => Err(OpenError::Abandoned { threads }),
    }
}

/// Counts a thread that is left behind.
pub(crate) fn abandon() {
    ABANDONED.fetch_add(1, Relaxed);
}

/// Counts a thread that was left behind and has come back.
pub(crate) fn came_back() {
    ABANDONED.fetch_sub(1, Relaxed);
}

/// How a reader behaves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Requests at a time, each with a thread and a buffer of about 1 MiB,
    /// 1 to 64.
    pub in_flight: usize,
    /// The largest gap between two requested pages that is read with them rather than
    /// skipped; `None`: chosen by the storage's speed.
    pub gap_bytes_max: Option<u64>,
    /// How long a request may be without an answer.
    pub patience: Duration,
    /// The bound on what is read, shared by all readers of one storage.
    pub pace: Arc<Pace>,
    /// The group that the reading threads join.
    pub threads: Option<Arc<DataThreads>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            in_flight: 16,
            gap_bytes_max: None,
            patience: Duration::from_secs(5),
            pace: Arc::default(),
            threads: None,
        }
    }
}

/// How far a reader is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Pages that are requested and not started.
    pub wanted_pages: usize,
    /// Requests that are started and not answered.
    pub in_flight: usize,
    /// Requests that succeeded.
    pub requests: u64,
    /// Bytes that they read, with gaps.
    pub read_bytes: u64,
    /// Pages that were passed to the consumer.
    pub read_pages: u64,
    /// Pages that failed, or were given back at the end.
    pub failed_pages: u64,
    /// Pages that the consumer did not want any more.
    pub refused_pages: u64,
    /// Pages that were taken from the end.
    pub taken_pages: u64,
    /// Threads that this reader has left behind.
    pub abandoned_threads: usize,
}

/// Reads requested pages of one image. Dropping it stops it.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    watch: Option<JoinHandle<()>>,
}

struct Shared {
    source: Box<dyn Source>,
    /// None once all has ended: a thread that hangs must not keep it.
    consumer: Mutex<Option<Arc<dyn Consumer>>>,
    settings: Settings,
    image_bytes: u64,
    /// Held by the thread that is about to take the next request's items.
    turn: Mutex<()>,
    state: Mutex<State>,
    /// For the thread with the turn: something is requested, or the reader has ended.
    requested: Condvar,
    /// For the watch: the reader has ended, a request has started, or a thread has ended.
    watched: Condvar,
    /// For the owner: the reader is idle, or has ended.
    quiet: Condvar,
}

#[derive(Debug)]
struct State {
    requested: Requested,
    size: Size,
    /// One for each thread.
    desks: Vec<Desk>,
    /// Threads that have items.
    busy: usize,
    /// Threads that have not ended and are not left behind.
    live: usize,
    /// Nothing is requested or in flight.
    idle: bool,
    /// The watch waits for a request to start.
    watch_rests: bool,
    failures_in_a_row: u32,
    failures: u32,
    /// Why no more requests are started.
    over: Option<Failure>,
    /// All items and threads have ended, too, or are left behind.
    ended: bool,
    progress: Progress,
}

/// The request of one thread.
#[derive(Debug, Default)]
struct Desk {
    /// None also if the watch has given its items back.
    request: Option<Request>,
    /// The thread waits for the storage.
    asks: bool,
    abandoned: bool,
}

/// A request without an answer yet.
#[derive(Debug)]
struct Request {
    items: Vec<Item>,
    began: Instant,
    due: Instant,
}

impl Reader {
    /// Starts the threads; nothing is requested yet.
    ///
    /// # Errors
    /// If a thread can't be started, or too many of earlier readers still hang.
    pub fn start(
        source: Box<dyn Source>,
        consumer: Arc<dyn Consumer>,
        settings: Settings,
    ) -> Result<Self, OpenError> {
        check_abandoned()?;
        let in_flight = settings.in_flight.clamp(1, 64);
        // A server may report any size; sums of offsets and pages must not wrap.
        let image_bytes = source.bytes().min(i64::MAX.unsigned_abs());
        let state = State {
            requested: Requested::new(image_bytes),
            size: Size::new(STRETCH_BYTES, Instant::now()),
            desks: std::iter::repeat_with(Desk::default).take(in_flight).collect(),
            busy: 0,
            live: 0,
            idle: true,
            watch_rests: false,
            failures_in_a_row: 0,
            failures: 0,
            over: None,
            ended: false,
            progress: Progress::default(),
        };
        let shared = Arc::new(Shared {
            source,
            consumer: Mutex::new(Some(consumer)),
            settings,
            image_bytes,
            turn: Mutex::new(()),
            state: Mutex::new(state),
            requested: Condvar::new(),
            watched: Condvar::new(),
            quiet: Condvar::new(),
        });
        let spawn = |name: String, run: Box<dyn FnOnce() + Send>| {
            data_threads::spawn(name, run).map_err(OpenError::Local)
        };
        let mut reader = Self { shared: Arc::clone(&shared), threads: Vec::new(), watch: None };
        let watching = Arc::clone(&shared);
        let watch = Box::new(move || watch::watch(&watching));
        reader.watch = Some(spawn("storage-watch".to_owned(), watch)?);
        for number in 0..in_flight {
            // Counted before the thread could end.
            shared.state.lock().live += 1;
            let working = Arc::clone(&shared);
            let work = Box::new(move || worker::work(&working, number));
            match spawn(format!("storage-{number}"), work) {
                Ok(thread) => reader.threads.push(thread),
                Err(error) => {
                    shared.state.lock().live -= 1;
                    return Err(error);
                }
            }
        }
        Ok(reader)
    }

    /// Adds requested items. They take 16 bytes each until they are started; any
    /// offset is allowed.
    ///
    /// # Errors
    /// If the reader has failed or was stopped: then none was added.
    pub fn add(&self, items: &[Item]) -> Result<(), Failure> {
        let mut state = self.shared.state.lock();
        if let Some(why) = &state.over {
            return Err(why.clone());
        }
        if !items.is_empty() {
            state.requested.add(items);
            state.idle = false;
            drop(state);
            self.shared.requested.notify_one();
        }
        Ok(())
    }

    /// Takes the items with the highest offsets that no request has started:
    /// appends their tokens, highest first. Returns how many.
    pub fn take_from_the_end(&self, pages_max: usize, into: &mut Vec<u64>) -> usize {
        let mut state = self.shared.state.lock();
        let taken = state.requested.take_from_the_end(pages_max, into);
        state.progress.taken_pages += taken as u64;
        self.shared.tell_if_idle(state);
        taken
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.shared.state.lock().progress()
    }

    /// Why it starts no more requests, if so.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.shared.state.lock().over.clone()
    }

    /// Waits until nothing is requested and nothing is in flight.
    ///
    /// # Errors
    /// If it has failed or was stopped; all items have ended then.
    pub fn wait_idle(&self) -> Result<(), Failure> {
        let mut state = self.shared.state.lock();
        loop {
            match &state.over {
                Some(why) if state.ended => return Err(why.clone()),
                None if state.idle => return Ok(()),
                _ => self.shared.quiet.wait(&mut state),
            }
        }
    }

    /// Stops beginning requests. Items that are not read are given back as failed, on
    /// another thread.
    pub fn stop(&self) {
        self.shared.end(&mut self.shared.state.lock(), Failure::Stopped);
    }

    /// Stops, and waits until all items have ended, at most a second for the
    /// storage. Threads that still wait for it are then left behind.
    #[must_use = "it says what was read"]
    pub fn finish(mut self) -> Progress {
        self.join();
        self.progress()
    }

    fn join(&mut self) {
        self.stop();
        let Some(watch) = self.watch.take() else { return };
        let mut panicked = watch.join().is_err();
        let left: Vec<bool> =
            self.shared.state.lock().desks.iter().map(|desk| desk.abandoned).collect();
        for (thread, left) in self.threads.drain(..).zip(left) {
            panicked |= !left && thread.join().is_err();
        }
        if panicked {
            tracing::error!("a thread that reads from storage panicked");
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.join();
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Shared {
    /// Ends the reader. The first reason counts.
    fn end(&self, state: &mut State, why: Failure) {
        state.over.get_or_insert(why);
        self.requested.notify_all();
        self.watched.notify_all();
    }

    fn tell_if_idle(&self, mut state: MutexGuard<'_, State>) {
        let quiet = state.requested.is_empty() && state.busy == 0 && state.over.is_none();
        if !quiet || state.idle {
            return;
        }
        state.idle = true;
        drop(state);
        self.quiet.notify_all();
        if let Some(consumer) = self.consumer() {
            consumer.idle();
        }
    }

    /// Reports these items as failed. Must not be called with the state locked.
    fn give_back(&self, items: &[Item], why: &Failure) {
        if !items.is_empty() {
            self.state.lock().progress.failed_pages += items.len() as u64;
            if let Some(consumer) = self.consumer() {
                consumer.failed(items, why);
            }
        }
    }

    fn consumer(&self) -> Option<Arc<dyn Consumer>> {
        self.consumer.lock().clone()
    }
}

impl State {
    fn progress(&self) -> Progress {
        let wanted_pages = self.requested.len();
        let in_flight = self.desks.iter().filter(|desk| desk.request.is_some()).count();
        Progress { wanted_pages, in_flight, ..self.progress }
    }
}

#[cfg(test)]
mod tests;
