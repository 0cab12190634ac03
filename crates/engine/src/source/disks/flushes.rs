//! Disk flushes that were requested of the destination and are not done yet.

use std::collections::HashMap;

use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;
use wire::ToDestination;

use crate::link::Link;

type Outcome = Result<(), String>;

#[derive(Default)]
pub(crate) struct Flushes(Mutex<State>);

#[derive(Default)]
struct State {
    next: u64,
    waiting: HashMap<u64, Sender<Outcome>>,
    over: bool,
}

impl Flushes {
    /// Requests a flush, and blocks until the destination has done it or the
    /// migration ends.
    pub(crate) fn ask(&self, link: &Link<ToDestination>, disk: u16) -> Outcome {
        let (tell, outcome) = bounded(1);
        let ticket = {
            let mut state = self.0.lock();
            if state.over {
                return Err("the migration ended".to_owned());
            }
            state.next += 1;
            let ticket = state.next;
            state.waiting.insert(ticket, tell);
            ticket
        };
        link.say(&ToDestination::FlushDisk { ticket, disk }).map_err(|error| error.to_string())?;
        outcome.recv().unwrap_or_else(|_| Err("the migration ended".to_owned()))
    }

    /// The destination's answer.
    pub(crate) fn answered(&self, ticket: u64, error: Option<String>) {
        if let Some(waiting) = self.0.lock().waiting.remove(&ticket) {
            let _ = waiting.send(error.map_or(Ok(()), Err));
        }
    }

    /// Fails all waiting and later requests.
    pub(crate) fn end(&self) {
        let mut state = self.0.lock();
        state.over = true;
        state.waiting.clear();
    }
}
