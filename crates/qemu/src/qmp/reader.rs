//! The thread that reads: answers go to who waits, events to who subscribed.

use std::collections::HashMap;
use std::io::Read;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use parking_lot::Mutex;
use serde_json::Value;

use super::line::Lines;
use super::{Event, QmpError};

/// Events that a subscriber may leave unread. QEMU limits most kinds to one a
/// second; this is for a guest that makes disk errors as fast as it can.
const EVENTS_UNREAD_MAX: usize = 4096;

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
    subscribers: Vec<Subscriber>,
    closed: bool,
}

/// What the reader and the callers share.
#[derive(Default)]
pub(super) struct Shared(Mutex<State>);

impl Shared {
    pub(super) fn expect(&self, id: u64, answer: Answer) -> Result<(), QmpError> {
        let mut state = self.0.lock();
        if state.closed {
            return Err(QmpError::Closed);
        }
        state.waiting.insert(id, answer);
        Ok(())
    }

    pub(super) fn forget(&self, id: u64) {
        self.0.lock().waiting.remove(&id);
    }

    pub(super) fn subscribe(&self, names: Option<&'static [&'static str]>) -> Receiver<Event> {
        let (to, from) = bounded(EVENTS_UNREAD_MAX);
        let mut state = self.0.lock();
        // After the end `to` is dropped here, and the receiver says so.
        if !state.closed {
            state.subscribers.push(Subscriber { names, to });
        }
        from
    }

    pub(super) fn is_closed(&self) -> bool {
        self.0.lock().closed
    }

    fn answer(&self, message: &Value) {
        let Some(id) = message["id"].as_u64() else {
            tracing::debug!(%message, "QMP answered nobody");
            return;
        };
        // Nobody waits any more after a timeout.
        let Some(answer) = self.0.lock().waiting.remove(&id) else { return };
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
        self.0.lock().subscribers.retain(|subscriber| {
            if subscriber.names.is_some_and(|names| !names.contains(&event.name.as_str())) {
                return true;
            }
            match subscriber.to.try_send(event.clone()) {
                Ok(()) => true,
                Err(TrySendError::Disconnected(_)) => false,
                Err(TrySendError::Full(_)) => {
                    tracing::warn!(
                        "{EVENTS_UNREAD_MAX} QEMU events left unread: giving up on one reader"
                    );
                    false
                }
            }
        });
    }

    fn close(&self) {
        let mut state = self.0.lock();
        state.closed = true;
        // Dropping their senders wakes everybody who waits.
        state.waiting.clear();
        state.subscribers.clear();
    }
}

/// Reads until the connection ends.
pub(super) fn run<R: Read>(mut lines: Lines<R>, shared: &Shared) {
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
                tracing::warn!(%error, "giving up a QMP connection");
                break;
            }
        }
    }
    shared.close();
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or("(no text)").to_owned()
}
