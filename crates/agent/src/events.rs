//! The events of this agent, for their readers.
//!
//! The latest events are kept in a ring that is bounded in bytes. Publishing an event writes
//! to the ring, which never waits. Each reader has a position in the ring and reads at its
//! own pace; one that falls behind the ring's end gets a gap in place of the missing events.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api::{ErrorCode, Event, GapReason, Happening};
use axum::body::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::denied::Denied;
use crate::id::random_id;

/// The longest reason or problem in an event; the report has all of it.
const TEXT_LETTERS_MAX: usize = 1024;

/// The resources that events may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// A migration's events take some 2 KiB, so the ring holds those of some hundreds.
    pub(crate) ring_bytes: usize,
    /// Readers at a time.
    pub(crate) readers: usize,
    /// How long a reader may take nothing before it is dropped; it can reconnect and resume.
    pub(crate) stuck: Duration,
    /// How long a connection may stay idle: a proxy or a firewall might drop it after longer.
    pub(crate) silent: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let (stuck, silent) = (Duration::from_secs(30), Duration::from_secs(15));
        Self { ring_bytes: 1 << 20, readers: 32, stuck, silent }
    }
}

/// The ring of events and its readers.
pub(crate) struct Events {
    limits: Limits,
    /// Identifies this run of the agent in the ids of its events.
    start: String,
    ring: Mutex<Ring>,
    newest: watch::Sender<Newest>,
    readers: Arc<Semaphore>,
}

#[derive(Clone, Copy, Default)]
struct Newest {
    number: u64,
    closed: bool,
}

/// Consecutive events; the agent's first has number 1.
#[derive(Default)]
struct Ring {
    frames: VecDeque<Bytes>,
    bytes: usize,
    newest: u64,
}

impl Ring {
    /// The number before that of the oldest event in the ring.
    fn begin(&self) -> u64 {
        self.newest - self.frames.len() as u64
    }

    /// The event after this number; none if it has not happened yet or is no longer kept.
    fn after(&self, number: u64) -> Option<Bytes> {
        let index = usize::try_from(number.checked_sub(self.begin())?).ok()?;
        self.frames.get(index).cloned()
    }

    fn push(&mut self, frame: Bytes, bytes_max: usize) {
        self.bytes += frame.len();
        self.frames.push_back(frame);
        while self.bytes > bytes_max {
            let Some(oldest) = self.frames.pop_front() else { return };
            self.bytes -= oldest.len();
        }
    }
}

impl Events {
    pub(crate) fn new(limits: Limits) -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            limits,
            start: random_id()?,
            ring: Mutex::default(),
            newest: watch::Sender::default(),
            readers: Arc::new(Semaphore::new(limits.readers)),
        }))
    }

    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    /// Publishes an event; never waits for a reader.
    pub(crate) fn publish(&self, what: Happening) {
        let mut ring = self.ring.lock();
        ring.newest += 1;
        let number = ring.newest;
        ring.push(self.frame(number, what), self.limits.ring_bytes);
        self.newest.send_modify(|newest| newest.number = number);
    }

    /// Ends all readers once they have all events so far.
    pub(crate) fn close(&self) {
        self.newest.send_modify(|newest| newest.closed = true);
    }

    /// A reader of the events from now on, or after the event with the id `last`.
    pub(crate) fn read(self: &Arc<Self>, last: Option<&str>) -> Result<Reader, Denied> {
        let slot = Arc::clone(&self.readers).try_acquire_owned().map_err(|_| {
            let text = format!(
                "{} readers follow this agent's events already: end one of them",
                self.limits.readers
            );
            Denied::Coded(ErrorCode::TooManyReaders, text)
        })?;
        let newest = self.newest.subscribe();
        let ring = self.ring.lock();
        let (after, gap) = match last.map(|last| self.number(last, &ring)) {
            None => (ring.newest, None),
            Some(Ok(number)) => (number, None),
            Some(Err(why)) => (ring.begin(), Some(why)),
        };
        drop(ring);
        let first = match gap {
            Some(why) => self.frame(after, Happening::Gap { why }),
            // Not an event, but an id from which a reader can resume that is disconnected before
            // its first event.
            None => Bytes::from(format!("id: {}\n\n", self.id(after))),
        };
        Ok(Reader { events: Arc::clone(self), newest, after, first: Some(first), _slot: slot })
    }

    /// Whether there is no reader.
    #[cfg(test)]
    pub(crate) fn has_no_reader(&self) -> bool {
        self.readers.available_permits() == self.limits.readers
    }

    /// All events in the ring.
    #[cfg(test)]
    pub(crate) fn told(&self) -> Vec<Happening> {
        let ring = self.ring.lock();
        let event = |frame: &Bytes| {
            let text = String::from_utf8(frame.to_vec()).unwrap();
            let data = text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
            serde_json::from_str::<Event>(data).unwrap().what
        };
        ring.frames.iter().map(event).collect()
    }

    /// The number of the event with this id, if it is of this run of the agent.
    fn number(&self, id: &str, ring: &Ring) -> Result<u64, GapReason> {
        let (start, number) = id.split_once('-').ok_or(GapReason::Unknown)?;
        let number: u64 = number.parse().map_err(|_| GapReason::Unknown)?;
        match start == self.start {
            true if number <= ring.newest => Ok(number),
            true => Err(GapReason::Unknown),
            false => Err(GapReason::Restarted),
        }
    }

    fn id(&self, number: u64) -> String {
        format!("{}-{number}", self.start)
    }

    /// An event as it is sent.
    fn frame(&self, number: u64, what: Happening) -> Bytes {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let at_unix_ms = u64::try_from(now).unwrap_or(u64::MAX);
        let event = Event { id: self.id(number), at_unix_ms, what };
        // JSON escapes line ends, so `data` is one line.
        let json = serde_json::to_value(&event).unwrap_or_default();
        let name = json["event"].as_str().unwrap_or_default();
        format!("id: {}\nevent: {name}\ndata: {json}\n\n", event.id).into()
    }
}

/// The beginning of a text, as much as an event has.
pub(crate) fn shortened(text: &str) -> String {
    match text.char_indices().nth(TEXT_LETTERS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// One reader of events.
pub(crate) struct Reader {
    events: Arc<Events>,
    newest: watch::Receiver<Newest>,
    /// The number of the last event that it has.
    after: u64,
    first: Option<Bytes>,
    _slot: OwnedSemaphorePermit,
}

impl Reader {
    /// The next event, as it is sent; none at the end.
    ///
    /// The future can be dropped at any time.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        loop {
            let newest = *self.newest.borrow_and_update();
            if self.after < newest.number {
                return Some(self.take());
            }
            if newest.closed || self.newest.changed().await.is_err() {
                return None;
            }
        }
    }

    /// The next event, which is known to have happened.
    fn take(&mut self) -> Bytes {
        let ring = self.events.ring.lock();
        if let Some(frame) = ring.after(self.after) {
            self.after += 1;
            return frame;
        }
        self.after = ring.begin();
        drop(ring);
        self.events.frame(self.after, Happening::Gap { why: GapReason::TooOld })
    }
}

#[cfg(test)]
mod tests;
