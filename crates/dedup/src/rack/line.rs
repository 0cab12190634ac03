//! Connections that fetch content of other hosts of the rack.

use std::sync::Arc;
use std::time::Instant;

use content::{Domain, Name};
use crossbeam_channel::Sender;
use directory::HostName;
use parking_lot::Mutex;
use wire::ContentRequest;

use super::Rack;
use crate::destination::CLAIM_MAX;

/// A connection to another host, or one that has failed a moment ago.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) number: u64,
    wants: Sender<ContentRequest>,
    /// When content last arrived.
    pub(super) received_at: Mutex<Instant>,
    pub(super) state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The last one to that host has failed: it is not known whether this one will connect.
    Doubtful,
    /// It is connected, or there is no reason to doubt that it will be.
    Usable,
    /// It has ended because nothing was requested for a while.
    Idle,
    /// It could not connect, or broke.
    Failed,
}

impl Line {
    pub(super) fn new(number: u64, wants: Sender<ContentRequest>, state: State) -> Self {
        Self { number, wants, received_at: Mutex::new(Instant::now()), state: Mutex::new(state) }
    }

    pub(super) fn state(&self) -> State {
        *self.state.lock()
    }

    /// Its number, while content may be requested.
    pub(super) fn usable(&self) -> Option<u64> {
        (self.state() == State::Usable).then_some(self.number)
    }

    pub(super) fn has_ended(&self) -> bool {
        matches!(self.state(), State::Idle | State::Failed)
    }
}

impl Rack {
    /// Requests content by the line with that number. If it has ended, its waiters find out by
    /// themselves.
    pub(crate) fn want(&self, host: &HostName, number: u64, domain: &Domain, names: Vec<Name>) {
        let line = self.lines.lock().get(host).map(Arc::clone);
        if let Some(line) = line.filter(|line| line.number == number) {
            // An error means that it has ended.
            let _ = line.wants.send(ContentRequest { domain: domain.clone(), names });
        }
    }

    /// Whether content that was requested of that line at time `since` won't arrive.
    pub(crate) fn is_lost(&self, number: u64, since: Instant, now: Instant) -> bool {
        let lines = self.lines.lock();
        let line = lines.values().find(|line| line.number == number);
        line.is_none_or(|line| {
            let since = since.max(*line.received_at.lock());
            line.has_ended() || now.duration_since(since) > CLAIM_MAX
        })
    }
}
