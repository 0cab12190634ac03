//! What happens at this agent, for those who follow it.
//!
//! The latest events are kept in a ring that is bounded in bytes. To report one is to
//! write there, which never waits. Each reader has a place in the ring and reads at its own
//! pace; one that falls behind the ring's end is told that it has missed something.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api::{ErrorCode, Event, GapReason, Happening};
use axum::body::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::denied::Denied;

/// Letters of a reason or a problem; the report has all of it.
const TEXT_LETTERS_MAX: usize = 1024;

/// How much events may take up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// A migration tells some 2 KiB: the ring has those of some hundreds.
    pub(crate) ring_bytes: usize,
    /// Readers at a time.
    pub(crate) readers: usize,
    /// How long a reader may take nothing before it is given up. It can come back, and go
    /// on where it was.
    pub(crate) stuck: Duration,
    /// How long a connection is without a byte: a proxy or a firewall may forget it then.
    pub(crate) silent: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let (stuck, silent) = (Duration::from_secs(30), Duration::from_secs(15));
        Self { ring_bytes: 1 << 20, readers: 32, stuck, silent }
    }
}

/// What happened, and who may read it.
pub(crate) struct Events {
    limits: Limits,
    /// Tells ids of this start of the agent from those of others.
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

/// Consecutive events; the first ever has number 1.
#[derive(Default)]
struct Ring {
    frames: VecDeque<Bytes>,
    bytes: usize,
    newest: u64,
}

impl Ring {
    /// The number before the oldest that is kept.
    fn begin(&self) -> u64 {
        self.newest - self.frames.len() as u64
    }

    /// The one after this number; none if it has not happened yet, or is not kept.
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
            start: crate::migrations::random_id()?,
            ring: Mutex::default(),
            newest: watch::Sender::default(),
            readers: Arc::new(Semaphore::new(limits.readers)),
        }))
    }

    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    /// Keeps it, and wakes those who wait for it. Never waits for a reader.
    pub(crate) fn tell(&self, what: Happening) {
        let mut ring = self.ring.lock();
        ring.newest += 1;
        let number = ring.newest;
        ring.push(self.frame(number, what), self.limits.ring_bytes);
        self.newest.send_modify(|newest| newest.number = number);
    }

    /// Ends all readers, once they have what has happened until now.
    pub(crate) fn close(&self) {
        self.newest.send_modify(|newest| newest.closed = true);
    }

    /// A reader of what happens from now on, or after the event with the id `last`.
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
            // No event, but a reader that is cut off before its first one has a place to
            // go on from.
            None => Bytes::from(format!("id: {}\n\n", self.id(after))),
        };
        Ok(Reader { events: Arc::clone(self), newest, after, first: Some(first), _slot: slot })
    }

    /// Whether nobody reads.
    #[cfg(test)]
    pub(crate) fn has_no_reader(&self) -> bool {
        self.readers.available_permits() == self.limits.readers
    }

    /// What is kept.
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

    /// The number of the event with this id, if it is one of this start's.
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

    /// As it is sent.
    fn frame(&self, number: u64, what: Happening) -> Bytes {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let at_unix_ms = u64::try_from(now).unwrap_or(u64::MAX);
        let event = Event { id: self.id(number), at_unix_ms, what };
        // JSON has its line ends escaped.
        let json = serde_json::to_value(&event).unwrap_or_default();
        let name = json["event"].as_str().unwrap_or_default();
        format!("id: {}\nevent: {name}\ndata: {json}\n\n", event.id).into()
    }
}

/// As much of a text as an event has.
pub(crate) fn shortened(text: &str) -> String {
    match text.char_indices().nth(TEXT_LETTERS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// One reader of them.
pub(crate) struct Reader {
    events: Arc<Events>,
    newest: watch::Receiver<Newest>,
    /// The number of the last one that it has.
    after: u64,
    first: Option<Bytes>,
    _slot: OwnedSemaphorePermit,
}

impl Reader {
    /// The next one, as it is sent; none at the end. Safe to drop while it waits.
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

    /// The next one, of which it is known that it has happened.
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
