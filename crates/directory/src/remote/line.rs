//! What callers share with the two threads of a connection.

use std::collections::HashMap;
use std::io::{BufReader, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

use content::Name;
use parking_lot::{Condvar, Mutex};

use crate::directory::Answer;
use crate::error::DirectoryError;
use crate::host::HostName;
use crate::protocol::{HEADER_BYTES, ReplyHeader, RequestKind, request_bytes, write_request};
use crate::waiter::Waiter;

/// The most bytes of requests that wait to be written: some seconds' worth on a slow link. A
/// caller with more waits for room.
const WAITING_BYTES_MAX: usize = 1 << 20;
/// A connection is dropped if nothing has arrived for this long while requests were open. The
/// network need not report that the peer has disconnected.
const SILENT_MAX: Duration = Duration::from_secs(5);
const BUFFER_BYTES: usize = 1 << 16;

type Outcome = Result<Vec<Answer>, DirectoryError>;
type Shutdown = Arc<dyn Fn() + Send + Sync>;

/// The state of the connection.
enum Phase {
    /// There is no connection, and no request has asked for one. None if there never was one.
    Down(Option<Failed>),
    /// The sending thread is to connect, or does so. If the last attempt has failed, for this
    /// reason, claims don't wait for it: it may take as long, and pages wait for claims.
    Requested { doubt: Option<String> },
    /// Connected, by the sending thread's `number`th connection.
    Open { number: u64, again: Instant, shutdown: Shutdown },
    /// There will be no further connection.
    Ended,
}

/// How the last connection failed.
struct Failed {
    why: String,
    /// When the next attempt may be made.
    again: Instant,
    /// There was a connection, which broke.
    was_open: bool,
}

struct Pending {
    waiter: Arc<Waiter<Outcome>>,
    /// How many answers the reply has.
    answers: usize,
}

struct State {
    phase: Phase,
    /// Encoded requests, for the sending thread.
    outgoing: Vec<u8>,
    /// Callers by the reply that they wait for.
    pending: HashMap<u32, Pending>,
    last_id: u32,
    /// Since when requests have been open and nothing has arrived.
    silent_since: Option<Instant>,
}

pub(super) struct Line {
    at: String,
    state: Mutex<State>,
    /// For the sending thread: there is something to do.
    work: Condvar,
    /// For callers: there is room in `outgoing`.
    room: Condvar,
}

/// One queued request. Dropping it discards the reply.
pub(super) struct Ticket<'a> {
    line: &'a Line,
    id: u32,
    waiter: Arc<Waiter<Outcome>>,
}

impl Ticket<'_> {
    pub(super) fn wait(self, until: Instant) -> Outcome {
        self.waiter.wait(until).unwrap_or_else(|| {
            self.line.missed();
            Err(self.line.late())
        })
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.line.state.lock().pending.remove(&self.id);
    }
}

impl Line {
    pub(super) fn new(at: String) -> Self {
        let state = State {
            phase: Phase::Down(None),
            outgoing: Vec::new(),
            pending: HashMap::new(),
            last_id: 0,
            silent_since: None,
        };
        let state = Mutex::new(state);
        Self { at, state, work: Condvar::new(), room: Condvar::new() }
    }

    pub(super) fn at(&self) -> &str {
        &self.at
    }

    fn late(&self) -> DirectoryError {
        DirectoryError::Late { at: self.at.clone() }
    }

    fn unreachable(&self, why: &str) -> DirectoryError {
        DirectoryError::Unreachable { at: self.at.clone(), why: why.to_owned() }
    }

    /// Queues a request for the sending thread.
    pub(super) fn request(
        &self,
        kind: RequestKind,
        host: &HostName,
        names: &[Name],
        until: Instant,
    ) -> Result<Ticket<'_>, DirectoryError> {
        let mut state = self.state.lock();
        loop {
            self.want(&mut state.phase, kind)?;
            if state.outgoing.len() + request_bytes(host, names) <= WAITING_BYTES_MAX {
                break;
            }
            if self.room.wait_until(&mut state, until).timed_out() {
                drop(state);
                self.missed();
                return Err(self.late());
            }
        }
        let id = state.next_id();
        let wait = until.saturating_duration_since(Instant::now());
        write_request(kind, id, host, names, wait, &mut state.outgoing);
        let waiter = Arc::new(Waiter::default());
        let answers = if kind == RequestKind::Claim { names.len() } else { 0 };
        state.pending.insert(id, Pending { waiter: Arc::clone(&waiter), answers });
        state.silent_since.get_or_insert_with(Instant::now);
        self.work.notify_one();
        Ok(Ticket { line: self, id, waiter })
    }

    /// Has the sending thread connect, if there is no connection.
    fn want(&self, phase: &mut Phase, kind: RequestKind) -> Result<(), DirectoryError> {
        match phase {
            Phase::Ended => return Err(self.unreachable("it is no longer queried")),
            Phase::Down(Some(failed)) if Instant::now() < failed.again => {
                return Err(self.unreachable(&failed.why));
            }
            Phase::Down(failed) => {
                let doubt = failed.take().filter(|failed| !failed.was_open);
                *phase = Phase::Requested { doubt: doubt.map(|failed| failed.why) };
                self.work.notify_one();
            }
            Phase::Requested { .. } | Phase::Open { .. } => {}
        }
        match phase {
            Phase::Requested { doubt: Some(why) } if kind == RequestKind::Claim => {
                Err(self.unreachable(why))
            }
            _ => Ok(()),
        }
    }

    /// A caller has waited in vain.
    fn missed(&self) {
        let state = self.state.lock();
        let Phase::Open { number, .. } = state.phase else { return };
        if state.silent_since.is_some_and(|since| since.elapsed() > SILENT_MAX) {
            drop(state);
            self.broke(number, "it sends nothing");
        }
    }

    /// For the sending thread: waits until a connection is needed. False if none will be any
    /// more.
    pub(super) fn is_needed(&self) -> bool {
        let mut state = self.state.lock();
        loop {
            match state.phase {
                Phase::Requested { .. } => return true,
                Phase::Ended => return false,
                _ => self.work.wait(&mut state),
            }
        }
    }

    /// For the sending thread: the connection is made.
    pub(super) fn opened(
        &self,
        number: u64,
        again: Instant,
        shutdown: Box<dyn Fn() + Send + Sync>,
    ) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Ended) {
            drop(state);
            shutdown();
            return;
        }
        // The time until the connection was made does not count as silence.
        state.silent_since = state.silent_since.map(|_| Instant::now());
        state.phase = Phase::Open { number, again, shutdown: shutdown.into() };
    }

    /// For the sending thread: the connection could not be made.
    pub(super) fn failed(&self, again: Instant, why: &str) {
        let state = self.state.lock();
        if !matches!(state.phase, Phase::Ended) {
            self.down(state, Failed { why: why.to_owned(), again, was_open: false });
        }
    }

    /// That connection is of no use any more. All waiting callers get an error.
    pub(super) fn broke(&self, broken: u64, why: &str) {
        let state = self.state.lock();
        let Phase::Open { number, again, shutdown } = &state.phase else { return };
        if *number == broken {
            let (again, shutdown) = (*again, Arc::clone(shutdown));
            self.down(state, Failed { why: why.to_owned(), again, was_open: true });
            shutdown();
        }
    }

    fn down(&self, mut state: parking_lot::MutexGuard<'_, State>, failed: Failed) {
        let error = self.unreachable(&failed.why);
        state.phase = Phase::Down(Some(failed));
        let pending = state.give_up();
        drop(state);
        pending.iter().for_each(|one| one.waiter.tell(Err(error.clone())));
        self.work.notify_one();
        self.room.notify_all();
    }

    /// No caller is left: the sending thread ends.
    pub(super) fn end(&self) {
        let mut state = self.state.lock();
        let phase = std::mem::replace(&mut state.phase, Phase::Ended);
        state.give_up();
        drop(state);
        self.work.notify_one();
        if let Phase::Open { shutdown, .. } = phase {
            shutdown();
        }
    }

    /// For the sending thread: waits for requests to write on that connection. False if it is of
    /// no use any more.
    pub(super) fn take(&self, number: u64, out: &mut Vec<u8>) -> bool {
        out.clear();
        let mut state = self.state.lock();
        loop {
            if !matches!(state.phase, Phase::Open { number: open, .. } if open == number) {
                return false;
            }
            if !state.outgoing.is_empty() {
                std::mem::swap(&mut state.outgoing, out);
                self.room.notify_all();
                return true;
            }
            self.work.wait(&mut state);
        }
    }

    /// For the reading thread: passes replies to their callers until the connection ends. Returns
    /// the reason.
    pub(super) fn receive(&self, reader: impl Read) -> String {
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, reader);
        let mut body = Vec::new();
        loop {
            let mut header = [0; HEADER_BYTES];
            if let Err(error) = reader.read_exact(&mut header) {
                return error.to_string();
            }
            let header = match ReplyHeader::parse(&header) {
                Ok(header) => header,
                Err(error) => return error.to_string(),
            };
            body.resize(header.body_bytes(), 0);
            if let Err(error) = reader.read_exact(&mut body) {
                return error.to_string();
            }
            let Some(pending) = self.came(header.id) else { continue };
            let outcome = self.read(&header, &body, pending.answers);
            let nonsense = match &outcome {
                Err(DirectoryError::Nonsense { why, .. }) => Some(why.clone()),
                _ => None,
            };
            pending.waiter.tell(outcome);
            if let Some(why) = nonsense {
                return why;
            }
        }
    }

    /// The caller that waits for a reply. None if it does not wait any more.
    fn came(&self, id: u32) -> Option<Pending> {
        let mut state = self.state.lock();
        let pending = state.pending.remove(&id);
        state.silent_since = (!state.pending.is_empty()).then(Instant::now);
        pending
    }

    fn read(&self, header: &ReplyHeader, body: &[u8], expected: usize) -> Outcome {
        let nonsense = |why: String| DirectoryError::Nonsense { at: self.at.clone(), why };
        if let Some(why) = header.refusal(body) {
            return Err(DirectoryError::Refused { at: self.at.clone(), why });
        }
        let mut answers = Vec::new();
        header.read_body(body, &mut answers).map_err(|error| nonsense(error.to_string()))?;
        if answers.len() != expected {
            return Err(nonsense(format!("{} answers to {expected} names", answers.len())));
        }
        Ok(answers)
    }
}

impl State {
    /// An id that no open request has.
    fn next_id(&mut self) -> u32 {
        loop {
            self.last_id = self.last_id.wrapping_add(1);
            if !self.pending.contains_key(&self.last_id) {
                return self.last_id;
            }
        }
    }

    fn give_up(&mut self) -> Vec<Pending> {
        self.outgoing.clear();
        self.silent_since = None;
        self.pending.drain().map(|(_, pending)| pending).collect()
    }
}
