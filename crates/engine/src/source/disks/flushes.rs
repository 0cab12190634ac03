//! Disk flushes that were requested of the destination and are not done yet.

use std::collections::HashMap;

use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;
use wire::ToDestination;

use crate::link::Link;

type Outcome = Result<(), String>;

#[derive(Default)]
pub(crate) struct Flushes(Mutex<State>);

enum State {
    /// Those that wait, by ticket, and the last ticket.
    Open { last: u64, waiting: HashMap<u64, Sender<Outcome>> },
    /// The migration has ended.
    Ended,
}

impl Default for State {
    fn default() -> Self {
        Self::Open { last: 0, waiting: HashMap::new() }
    }
}

fn ended() -> Outcome {
    Err("the migration ended".to_owned())
}

impl Flushes {
    /// Requests a flush, and blocks until the destination has done it or the
    /// migration ends.
    pub(crate) fn ask(&self, link: &Link<ToDestination>, disk: u16) -> Outcome {
        let (tell, outcome) = bounded(1);
        let ticket = match &mut *self.0.lock() {
            State::Open { last, waiting } => {
                *last += 1;
                waiting.insert(*last, tell);
                *last
            }
            State::Ended => return ended(),
        };
        link.say(&ToDestination::FlushDisk { ticket, disk }).map_err(|error| error.to_string())?;
        outcome.recv().unwrap_or_else(|_| ended())
    }

    /// The destination's answer.
    pub(crate) fn answered(&self, ticket: u64, error: Option<String>) {
        if let State::Open { waiting, .. } = &mut *self.0.lock()
            && let Some(waiting) = waiting.remove(&ticket)
        {
            let _ = waiting.send(error.map_or(Ok(()), Err));
        }
    }

    /// Fails all waiting and later requests.
    pub(crate) fn end(&self) {
        *self.0.lock() = State::Ended;
    }
}
