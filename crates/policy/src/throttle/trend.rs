//! Derives the guest's dirty rate from how the remainder changes.
//!
//! `left' = dirty - delivered`: so the remainders at the ends of two passes, and what was delivered
//! between them, give the dirty rate that counts. QEMU's own figure is up to a second or a whole
//! pass old, and wrong if pages are written over and over.

use std::collections::VecDeque;

use super::view::View;

/// The number of passes that count at most.
const POINTS_MAX: usize = 64;
/// How long a trend is observed before it is used, within bounds. The remainder is known to a
/// percent or so of `left`. With ten passes a second that is an error in the slope of about
/// `left / t^1.5`; this makes it a twentieth of what is delivered. With much left there is time to
/// observe.
const SPAN_FACTOR: f64 = 0.25;
const SPAN_POWER: f64 = 2.0 / 3.0;
const SPAN_S: (f64, f64) = (0.4, 3.0);
/// The longest time observed, as a multiple of that.
const WINDOW: f64 = 1.5;
/// The largest part of the working set that is assumed to be dirty when writes are derived from
/// pages that got dirty: the more of it is dirty, the less is known.
const SATURATED_MOST: f64 = 0.8;

/// Sums at the end of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    at_s: f64,
    left: f64,
    /// Bytes delivered, and seconds times share, since the beginning.
    delivered: f64,
    shared_s: f64,
}

/// What the last passes tell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reading {
    /// Rate at which clean pages got dirty, at the share that the guest had.
    pub(super) dirty: f64,
    /// The same rate, if all of the guest's writes went to clean pages and its share were 1.
    pub(super) full: f64,
}

/// The ends of the last passes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Trend {
    points: VecDeque<Point>,
    pass: u32,
    span_s: f64,
    /// The largest remainder after the first pass: the working set, or the part of it seen so far.
    most_left: f64,
}

impl Trend {
    /// Notes a sample; returns whether a pass has ended.
    pub(super) fn note(&mut self, view: &View, sums: (f64, f64)) -> bool {
        let View { pass, at_s, left, rate, .. } = *view;
        if pass == self.pass {
            return false;
        }
        self.span_s = (left / rate * SPAN_FACTOR).powf(SPAN_POWER).clamp(SPAN_S.0, SPAN_S.1);
        self.pass = pass;
        self.most_left = self.most_left.max(left);
        if self.points.len() >= POINTS_MAX {
            self.points.pop_front();
        }
        let (delivered, shared_s) = sums;
        self.points.push_back(Point { at_s, left, delivered, shared_s });
        // At least two points remain, however long passes are.
        while self.points.len() > 2
            && self.points.get(1).is_some_and(|p| at_s - p.at_s > self.span_s * WINDOW)
        {
            self.points.pop_front();
        }
        true
    }

    /// Drops earlier readings, because the share has changed.
    pub(super) fn restart(&mut self) {
        let last = self.points.pop_back();
        self.points.clear();
        self.points.extend(last);
    }

    /// The shortest time for which a trend is observed.
    pub(super) fn span_s(&self) -> f64 {
        self.span_s
    }

    /// The largest remainder so far.
    pub(super) fn most_left(&self) -> f64 {
        self.most_left
    }

    /// The dirty rate since the last change of the share, if there are enough
    /// passes.
    pub(super) fn reading(&self) -> Option<Reading> {
        let (first, last) = (self.points.front()?, self.points.back()?);
        let span_s = last.at_s - first.at_s;
        if span_s < self.span_s {
            return None;
        }
        let share = (last.shared_s - first.shared_s) / span_s;
        let delivered = (last.delivered - first.delivered) / span_s;
        let dirty = (delivered + self.slope()).max(delivered * 0.01);
        Some(Reading { dirty, full: dirty / share.max(1e-3) * self.unsaturated(last.left) })
    }

    /// How much more is written than gets dirty while `left` is dirty: writes to pages that are
    /// dirty already don't show. The largest remainder so far is assumed to be the whole working
    /// set, written in random order.
    pub(super) fn unsaturated(&self, left: f64) -> f64 {
        let dirty_share = (left / self.most_left.max(1.0)).clamp(1e-6, SATURATED_MOST);
        -(-dirty_share).ln_1p() / dirty_share
    }

    /// The slope of the remainder over time, by least squares.
    fn slope(&self) -> f64 {
        let count = self.points.len() as f64;
        let mean = |of: fn(&Point) -> f64| self.points.iter().map(of).sum::<f64>() / count;
        let (at, left) = (mean(|p| p.at_s), mean(|p| p.left));
        let along: f64 = self.points.iter().map(|p| (p.at_s - at) * (p.left - left)).sum();
        let across: f64 = self.points.iter().map(|p| (p.at_s - at).powi(2)).sum();
        if across > 0.0 { along / across } else { 0.0 }
    }
}

/// The rate that QEMU reports, measured over at least a second in which the share may have changed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Reported {
    rate: Option<f64>,
    at_s: f64,
    shared_s: f64,
}

impl Reported {
    /// The rate at a share of 1; none if the reported rate isn't new.
    pub(super) fn note(&mut self, rate: Option<f64>, at_s: f64, shared_s: f64) -> Option<f64> {
        if rate == self.rate {
            return None;
        }
        let elapsed_s = at_s - self.at_s;
        let share = if elapsed_s > 0.0 { (shared_s - self.shared_s) / elapsed_s } else { 1.0 };
        *self = Self { rate, at_s, shared_s };
        rate.map(|rate| rate / share.clamp(1e-3, 1.0))
    }

    /// The same for a rate that was measured while the guest had this share.
    pub(super) fn note_counted(&mut self, rate: Option<f64>, share: f64) -> Option<f64> {
        if rate == self.rate {
            return None;
        }
        self.rate = rate;
        rate.map(|rate| rate / share.clamp(1e-3, 1.0))
    }
}
