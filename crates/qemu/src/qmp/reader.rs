//! The reader thread: answers go to waiting callers, events to subscribers.

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::{Condvar, Mutex};
use serde_json::Value;

use super::line::Lines;
use super::{Event, QmpError};

/// Most events that a subscriber may leave unread. QEMU limits most kinds to one
/// a second; this bound is for a guest that causes disk errors as fast as it can.
const EVENTS_UNREAD_MAX: usize = 4096;

/// Most in-band commands that QEMU may leave unanswered. It queues eight and then
/// stops reading, so it would no longer receive out-of-band commands either, which
/// free a QEMU whose main loop is blocked.
const IN_BAND_MAX: usize = 6;

/// QEMU's error answer.
pub(super) struct Refusal {
    pub(super) class: String,
    pub(super) desc: String,
}

type Answer = Sender<Result<Value, Refusal>>;

struct Subscriber {
    names: Option<&'static [&'static str]>,
    to: Sender<Event>,
}

#[derive(Default)]
struct State {
    waiting: HashMap<u64, Answer>,
    /// In-band commands not answered, whether or not a caller still waits.
    in_band: HashSet<u64>,
    subscribers: Vec<Subscriber>,
    closed: bool,
}

/// The state that the reader and the callers share.
#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Notified when an in-band command was answered, or the connection ended.
    answered: Condvar,
}

impl Shared {
    /// Registers a command. Returns whether it may be sent: not if QEMU leaves too
    /// many in-band ones unanswered for the whole `timeout`.
    pub(super) fn expect(
        &self,
        id: u64,
        is_in_band: bool,
        answer: Answer,
        timeout: Duration,
    ) -> Result<bool, QmpError> {
        let mut state = self.state.lock();
        if is_in_band {
            let full = |state: &mut State| !state.closed && state.in_band.len() >= IN_BAND_MAX;
            if self.answered.wait_while_for(&mut state, full, timeout).timed_out() {
                return Ok(false);
            }
        }
        if state.closed {
            return Err(QmpError::Closed);
        }
        if is_in_band {
            state.in_band.insert(id);
        }
        state.waiting.insert(id, answer);
        Ok(true)
    }

    pub(super) fn forget(&self, id: u64) {
        self.state.lock().waiting.remove(&id);
    }

    pub(super) fn subscribe(&self, names: Option<&'static [&'static str]>) -> Receiver<Event> {
        // `tell` bounds it: a bounded channel would take 400 KB at once, for each VM several times.
        let (to, from) = unbounded();
        let mut state = self.state.lock();
        // After the end `to` is dropped here, and the receiver disconnects.
        if !state.closed {
            state.subscribers.push(Subscriber { names, to });
        }
        from
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    fn answer(&self, message: &Value) {
        let Some(id) = message["id"].as_u64() else {
            tracing::debug!(%message, "QMP answered no command");
            return;
        };
        let answer = {
            let mut state = self.state.lock();
            if state.in_band.remove(&id) {
                self.answered.notify_one();
            }
            // After a timeout no caller waits any more.
            let Some(answer) = state.waiting.remove(&id) else { return };
            answer
        };
        let outcome = match message.get("return") {
            Some(value) => Ok(value.clone()),
            None => Err(Refusal {
                class: text(&message["error"]["class"]),
                desc: text(&message["error"]["desc"]),
            }),
        };
        let _ = answer.send(outcome);
    }

    fn tell(&self, event: &Event) {
        self.state.lock().subscribers.retain(|subscriber| {
            if subscriber.names.is_some_and(|names| !names.contains(&event.name.as_str())) {
                return true;
            }
            if subscriber.to.len() >= EVENTS_UNREAD_MAX {
                tracing::warn!(
                    "{EVENTS_UNREAD_MAX} QEMU events left unread: dropping a stalled reader"
                );
                return false;
            }
            // An error means that its receiver was dropped.
            subscriber.to.send(event.clone()).is_ok()
        });
    }

    fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        // Dropping their senders wakes all waiting callers.
        state.waiting.clear();
        state.subscribers.clear();
        self.answered.notify_all();
    }
}

/// Reads until the connection ends.
pub(super) fn run<R: Read>(mut lines: Lines<R>, shared: &Shared) {
    let _closed = Closed(shared);
    loop {
        match lines.next_value() {
            Ok(message) => match message["event"].as_str() {
                Some(name) => {
                    tracing::trace!(name, "from QEMU");
                    shared.tell(&Event::parse(name, &message));
                }
                None => shared.answer(&message),
            },
            Err(QmpError::Closed) => break,
            Err(error) => {
                tracing::warn!(%error, "closing a QMP connection");
                break;
            }
        }
    }
}

/// Nothing more is read, also after a panic: all that wait for an answer get an error.
struct Closed<'s>(&'s Shared);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or("(no text)").to_owned()
}
