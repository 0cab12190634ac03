//! Disk flushes that were requested of the destination and are not done yet.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;
use wire::ToDestination;

use crate::link::Link;

type Outcome = Result<(), String>;

#[derive(Default)]
pub(crate) struct Flushes(Mutex<State>);

enum State {
    /// Those that wait, by ticket, and the last ticket.
    Open { last: u64, waiting: HashMap<u64, Flush> },
    /// The migration has ended.
    Ended,
}

/// A flush that the destination has not answered.
struct Flush {
    since: Instant,
    tell: Sender<Outcome>,
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
                waiting.insert(*last, Flush { since: Instant::now(), tell });
                *last
            }
            State::Ended => return ended(),
        };
        link.send(&ToDestination::FlushDisk { ticket, disk }).map_err(|error| error.to_string())?;
        outcome.recv().unwrap_or_else(|_| ended())
    }

    /// The destination's answer.
    pub(crate) fn answered(&self, ticket: u64, error: Option<String>) {
        if let State::Open { waiting, .. } = &mut *self.0.lock()
            && let Some(flush) = waiting.remove(&ticket)
        {
            let _ = flush.tell.send(error.map_or(Ok(()), Err));
        }
    }

    /// How long the destination has not answered; none if it has answered all.
    pub(crate) fn unanswered(&self, now: Instant) -> Option<Duration> {
        let state = self.0.lock();
        let State::Open { waiting, .. } = &*state else { return None };
        let first = waiting.values().map(|flush| flush.since).min()?;
        Some(now.saturating_duration_since(first))
    }

    /// Fails all waiting and later requests.
    pub(crate) fn end(&self) {
        *self.0.lock() = State::Ended;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_flush_without_an_answer_counts() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let flush = |nth: u32| Flush { since: start + second * nth, tell: bounded(1).0 };
        let waiting = HashMap::from([(1, flush(0)), (2, flush(5))]);
        let flushes = Flushes(Mutex::new(State::Open { last: 2, waiting }));
        let now = start + second * 7;
        assert_eq!(flushes.unanswered(now), Some(second * 7));
        flushes.answered(1, None);
        assert_eq!(flushes.unanswered(now), Some(second * 2));
        flushes.answered(2, Some("no space left".to_owned()));
        assert_eq!(flushes.unanswered(now), None);
        flushes.end();
        assert_eq!(flushes.unanswered(now), None);
    }
}
