//! The reader: threads that read what is wanted and hand it on.
//!
//! One thread at a time has the *turn*: it waits for something to be wanted and
//! for the pace, takes the next request's items, and only then lets the next
//! one. So requests begin in order, and what is not begun can be taken from the
//! end until the last moment. A watching thread notices requests without an
//! answer, and clears up at the end: it takes the items from threads that hang
//! and leaves those behind.

mod watch;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use data_threads::DataThreads;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::size::Size;
use crate::wanted::{STRETCH_BYTES, Wanted};
use crate::{Consumer, Failure, Item, OpenError, Pace, Source};

/// Failed requests in a row that end the reader, and failed ones altogether.
const FAILURES_IN_A_ROW_MAX: u32 = 8;
const FAILURES_MAX: u32 = 64;
/// Threads left behind, of all readers, with which none is started any more.
const ABANDONED_MAX: usize = 64;

static ABANDONED: AtomicUsize = AtomicUsize::new(0);

/// How many threads of this process were left behind by their readers, because
/// their storage didn't answer, and still wait for it.
#[must_use]
pub fn abandoned_threads() -> usize {
    ABANDONED.load(Relaxed)
}

/// Whether another thread may be risked.
pub(crate) fn check_abandoned() -> Result<(), OpenError> {
    match abandoned_threads() {
        threads if threads < ABANDONED_MAX => Ok(()),
        threads => Err(OpenError::Abandoned { threads }),
    }
}

/// A thread is left behind.
pub(crate) fn abandon() {
    ABANDONED.fetch_add(1, Relaxed);
}

/// One that was left behind has come back.
pub(crate) fn came_back() {
    ABANDONED.fetch_sub(1, Relaxed);
}

/// How a reader behaves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Requests at a time, each with a thread and a buffer of about 1 MiB,
    /// 1 to 64.
    pub in_flight: usize,
    /// What lies between two wanted pages and is read rather than left out;
    /// none: as the storage's speed suggests.
    pub gap_bytes_max: Option<u64>,
    /// How long a request may be without an answer.
    pub patience: Duration,
    /// The bound on what is read, shared by all readers of one storage.
    pub pace: Arc<Pace>,
    /// What the threads join that read.
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
    /// Pages that are wanted and not begun.
    pub wanted_pages: usize,
    /// Requests that are begun and not answered.
    pub in_flight: usize,
    /// Requests that were answered well.
    pub requests: u64,
    /// What they read, with gaps.
    pub read_bytes: u64,
    /// Pages that were handed on.
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

/// Reads wanted pages of one image. Dropping it stops it.
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
    /// For who has the turn: something is wanted, or it is over.
    wanted: Condvar,
    /// For the watch: it is over, there is something to watch, a thread ended.
    watched: Condvar,
    /// For the owner: nothing is wanted, or all has ended.
    quiet: Condvar,
}

#[derive(Debug)]
struct State {
    wanted: Wanted,
    size: Size,
    /// One for each thread.
    desks: Vec<Desk>,
    /// Threads that have items.
    busy: usize,
    /// Threads that have not ended and are not left behind.
    live: usize,
    /// Nothing was wanted or under way since something was added.
    idle: bool,
    /// The watch waits for a request to watch.
    watch_rests: bool,
    failures_in_a_row: u32,
    failures: u32,
    /// Why nothing more is begun.
    over: Option<Failure>,
    /// And all has ended.
    ended: bool,
    progress: Progress,
}

/// What a thread is waiting for.
#[derive(Debug, Default)]
struct Desk {
    /// None also if the watch has given its items back.
    request: Option<Request>,
    /// It is asking the storage.
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
    /// Starts the threads; nothing is wanted yet.
    ///
    /// # Errors
    /// If the system has no threads, or many of earlier readers still hang.
    pub fn start(
        source: impl Source,
        consumer: Arc<dyn Consumer>,
        settings: Settings,
    ) -> Result<Self, OpenError> {
        Self::start_boxed(Box::new(source), consumer, settings)
    }

    /// As [`Reader::start`].
    ///
    /// # Errors
    /// As [`Reader::start`].
    pub fn start_boxed(
        source: Box<dyn Source>,
        consumer: Arc<dyn Consumer>,
        settings: Settings,
    ) -> Result<Self, OpenError> {
        check_abandoned()?;
        let in_flight = settings.in_flight.clamp(1, 64);
        // A server may say anything; sums of offsets and pages must not wrap.
        let image_bytes = source.bytes().min(i64::MAX.unsigned_abs());
        let state = State {
            wanted: Wanted::new(image_bytes),
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
            wanted: Condvar::new(),
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
            // Counted before it could end.
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

    /// These are wanted too. They take 16 bytes each until they are begun;
    /// offsets may be any.
    ///
    /// # Errors
    /// If the reader has failed or was stopped: then none was added.
    pub fn add(&self, items: &[Item]) -> Result<(), Failure> {
        let mut state = self.shared.state.lock();
        if let Some(why) = &state.over {
            return Err(why.clone());
        }
        if !items.is_empty() {
            state.wanted.add(items);
            state.idle = false;
            drop(state);
            self.shared.wanted.notify_one();
        }
        Ok(())
    }

    /// Takes the items with the highest offsets that no request has begun:
    /// appends their tokens, highest first. Returns how many.
    pub fn take_from_the_end(&self, pages_max: usize, into: &mut Vec<u64>) -> usize {
        let mut state = self.shared.state.lock();
        let taken = state.wanted.take_from_the_end(pages_max, into);
        state.progress.taken_pages += taken as u64;
        self.shared.tell_if_idle(state);
        taken
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.shared.state.lock().progress()
    }

    /// Why it reads no more, if so.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.shared.state.lock().over.clone()
    }

    /// Waits until nothing is wanted and nothing is under way.
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

    /// Nothing more is begun. What is not read is given back as failed, from
    /// another thread.
    pub fn stop(&self) {
        self.shared.end(&mut self.shared.state.lock(), Failure::Stopped);
    }

    /// Stops, and waits until all items have ended: a second at most for the
    /// storage. Threads that still wait for it are left behind.
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
    /// The first reason counts.
    fn end(&self, state: &mut State, why: Failure) {
        state.over.get_or_insert(why);
        self.wanted.notify_all();
        self.watched.notify_all();
    }

    fn tell_if_idle(&self, mut state: MutexGuard<'_, State>) {
        let quiet = state.wanted.is_empty() && state.busy == 0 && state.over.is_none();
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

    /// These items end so. Not to be called with the state locked.
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
        let wanted_pages = self.wanted.len();
        let in_flight = self.desks.iter().filter(|desk| desk.request.is_some()).count();
        Progress { wanted_pages, in_flight, ..self.progress }
    }
}

#[cfg(test)]
mod tests;
