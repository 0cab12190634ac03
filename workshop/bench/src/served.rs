//! A server in the guest: what its clients got before, during and after the migration.

use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::visitors::Visitors;
use crate::contender::Moved;
use lab::error::Result;
use lab::hosts::Outside;

/// How long clients are watched before and after.
const BEFORE: Duration = Duration::from_secs(3);
const AFTER: Duration = Duration::from_secs(5);
/// Time until packets from clients reach a VM that just arrived.
const FOUND: Duration = Duration::from_secs(1);
/// Longest time until a fixed number of requests is answered.
const TASK_MAX: Duration = Duration::from_secs(600);
/// Length of a piece of the course.
const STEP: Duration = Duration::from_millis(100);

/// What the clients of a server in a guest got.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Served {
    /// Answers per second before the migration.
    pub before_per_s: f64,
    /// During it.
    pub during_per_s: f64,
    /// After it.
    pub after_per_s: f64,
    /// The longest time without any answer before.
    pub silence_before_ms: f64,
    /// During it.
    pub silence_ms: f64,
    /// After it.
    pub silence_after_ms: f64,
    /// Missing answers, from the start of the migration until some seconds after it.
    pub lost: f64,
    /// Seconds until a fixed number of requests was answered, from some seconds before the
    /// migration on. None if that isn't measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_s: Option<f64>,
    /// Answers that differ from what the server was given.
    pub wrong: u64,
    /// Seconds since the start of the migration, and answers per second from then on.
    pub course: Vec<(f64, f64)>,
}

pub(super) struct Serving {
    visitors: Visitors,
    alone_since: Instant,
    moving_since: Instant,
}

impl Serving {
    /// Starts clients, and watches them for a while.
    pub(super) fn start(outside: &Outside) -> Result<Self> {
        let visitors = Visitors::start(outside)?;
        // The server needs a moment to reach full speed.
        thread::sleep(BEFORE / 3);
        let alone_since = Instant::now();
        thread::sleep(BEFORE);
        Ok(Self { visitors, alone_since, moving_since: Instant::now() })
    }

    /// Waits until so many requests are answered, and returns how long that took.
    pub(super) fn task_s(&self, requests: u64) -> Option<f64> {
        let until = self.alone_since + TASK_MAX;
        while Instant::now() < until {
            if let Some(done) = self.visitors.when(self.alone_since, requests) {
                return Some((done - self.alone_since).as_secs_f64());
            }
            thread::sleep(STEP);
        }
        None
    }

    /// Computes the figures, some seconds after the VM has moved.
    pub(super) fn judge(&self, moved: &Moved) -> Served {
        let (from, to) = (moved.began, moved.ran);
        let end = to + FOUND + AFTER;
        thread::sleep((end + STEP).saturating_duration_since(Instant::now()));
        let per_s = |from: Instant, to: Instant| {
            let seconds = to.saturating_duration_since(from).as_secs_f64();
            self.visitors.answered(from, to) / seconds.max(1e-3)
        };
        let silence_ms = |from, to| self.visitors.silence(from, to).as_secs_f64() * 1e3;
        let before_per_s = per_s(self.alone_since, self.moving_since);
        let expected = before_per_s * (end - from).as_secs_f64();
        let mut course = Vec::new();
        let mut at = self.alone_since;
        while at < end {
            let since = at.saturating_duration_since(from).as_secs_f64()
                - from.saturating_duration_since(at).as_secs_f64();
            course.push((since, per_s(at, at + STEP)));
            at += STEP;
        }
        Served {
            before_per_s,
            during_per_s: per_s(from, to),
            after_per_s: per_s(to + FOUND, end),
            silence_before_ms: silence_ms(self.alone_since, self.moving_since),
            silence_ms: silence_ms(from, to),
            silence_after_ms: silence_ms(to + FOUND, end),
            lost: expected - self.visitors.answered(from, end),
            requests_s: None,
            wrong: self.visitors.wrong(),
            course,
        }
    }
}
