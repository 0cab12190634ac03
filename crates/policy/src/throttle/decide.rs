//! Turns a sample into a decision.

use std::time::Duration;

use super::view::{COUNTED_ON, View};
use super::wave::Trough;
use super::{Decision, Look, OnStall, Ratio, Settings, Stall, Step, Throttle, Why};
use crate::switchover::predicted_blackout;

/// How long later passes are observed before the VM is throttled. QEMU's rates are over a second,
/// and a burst that is over by then needs nothing. Longer observation helps only guests that rest
/// soon, which mostly showed in the first pass; for all others it is time without progress.
const LOOK_S: f64 = 1.5;
/// A rate near the boundary must stay above it for this long...
const NEED_S: f64 = 1.0;
/// ...but not a rate that exceeds it by this factor.
const FAR: f64 = 1.3;
/// Below this part of the boundary a VM is no longer throttled.
const LET_GO: f64 = 0.7;
/// A share is kept for at least this long, until its effect shows.
const KEEP_S: f64 = 0.4;
/// Smaller changes aren't made. If the ratio is near 1, a small excess is all of the gain, so only
/// this much of it may be lost.
const LOWER: f64 = 0.85;
const LOWER_LEAST: f64 = 0.95;
const RAISE: f64 = 1.2;
/// The largest change of a share at once. Lowering has to be fast; raising is an experiment.
const LOWER_MOST: f64 = 0.25;
const RAISE_MOST: f64 = 1.3;
/// A share this close to 1 means no throttling.
const ALL: f64 = 0.97;
/// A rate that exceeds the believed one by this factor is believed at once.
const JUMP: f64 = 1.5;
/// When the remainder is within this multiple of the budget, the share isn't raised for this long.
const NEAR: f64 = 2.0;
const NEAR_S: f64 = 5.0;
/// Waiting for troughs ends after this long in all.
const WAIT_S: f64 = 20.0;
/// Passes in a row whose sampled remainder was small enough without QEMU stopping the VM: it just
/// wasn't small enough for QEMU.
const ALMOST: u32 = 10;
/// CPU use without a quota is its maximum over about this many seconds.
const USE_S: f64 = 10.0;
const USE_SMOOTH_S: f64 = 0.5;
/// A VM that used less is assumed to have used this much.
const USE_LEAST: f64 = 0.01;
/// Readings are smoothed over this part of their span: quick passes give ten per second, while one
/// over a long pass counts in full.
const BELIEVE: f64 = 0.5;
/// This many readings in a row have to ask for a higher share.
const RAISE_SURE: u32 = 2;

impl Throttle {
    /// Without knowledge yet, and without throttling.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The decision after one more sample. Settings may change between samples.
    pub fn next(&mut self, settings: &Settings, look: &Look) -> Decision {
        let view = View::new(settings, look);
        self.note(look, view.as_ref());
        if settings.ratio == Ratio::Off || !look.first_pass_over {
            self.keep_off();
        } else if let Some(view) = &view {
            self.decide(view);
        }
        self.decision(settings, look, view.as_ref())
    }

    /// Notes the current state.
    fn note(&mut self, look: &Look, view: Option<&View>) {
        let at_s = look.at.as_secs_f64().max(self.at_s);
        let elapsed_s = at_s - self.at_s;
        (self.at_s, self.elapsed_s) = (at_s, elapsed_s);
        self.shared_s += self.share * elapsed_s;
        self.lost_s += (1.0 - self.share) * elapsed_s;
        self.note_use(look.used_cpus.max(0.0), elapsed_s);
        self.pass_over = false;
        let Some(view) = view else { return };
        self.delivered += view.rate * elapsed_s;
        if !look.first_pass_over {
            return;
        }
        self.begun_s.get_or_insert(at_s);
        let dirty = look.dirty_bytes_per_s.filter(|rate| rate.is_finite());
        let told = match look.counted_at_share {
            Some(share) => self.told.note_counted(dirty, share),
            None => self.told.note(dirty, at_s, self.shared_s),
        };
        let sums = (self.delivered, self.shared_s);
        self.pass_over = self.trend.note(view, sums);
        let is_measured = look.counted_at_share.is_none() && self.pass_over && view.is_busy();
        let reading = self.trend.reading().filter(|_| is_measured);
        if let Some(reading) = reading {
            self.read = true;
            self.believe(reading.dirty, reading.full);
        } else if let Some(full) = told.filter(|_| !self.read || !view.is_busy()) {
            self.believe(full * self.share, full * self.trend.unsaturated(view.left));
        }
        if let Some(dirty) = self.dirty {
            self.dirty_wave.note(at_s, dirty / self.share, elapsed_s);
        }
    }

    /// Notes the CPU use of the VM's vCPUs, to which a share refers.
    fn note_use(&mut self, used_cpus: f64, elapsed_s: f64) {
        let weight = 1.0 - (-elapsed_s / USE_SMOOTH_S).exp();
        self.used += (used_cpus - self.used) * weight;
        if self.share >= 1.0 {
            self.used_most = self.used.max(self.used_most * (-elapsed_s / USE_S).exp());
        }
        self.cpu_wave.note(self.at_s, used_cpus / self.share, elapsed_s);
        if self.why == Why::Waiting {
            self.waited_s += elapsed_s;
        }
    }

    /// Notes a dirty rate, at the current share and at full speed. Noise is smoothed; a jump up is
    /// believed at once, because it costs most.
    fn believe(&mut self, dirty: f64, full: f64) {
        let weight = 1.0 - (-(self.at_s - self.believed_s) / (self.trend.span_s() * BELIEVE)).exp();
        let blend = |before: Option<f64>, now: f64| match before {
            Some(before) if now <= before * JUMP => before + (now - before) * weight,
            _ => now,
        };
        self.believed_s = self.at_s;
        self.dirty = Some(blend(self.dirty, dirty));
        self.full = Some(blend(self.full, full));
        self.fresh = true;
    }

    /// Throttles nothing.
    fn keep_off(&mut self) {
        self.set(1.0);
        self.why = Why::Nothing;
        self.stalled = false;
    }

    fn decide(&mut self, view: &View) {
        let Some(full) = self.full else {
            self.why = Why::Looking;
            return;
        };
        if self.share >= 1.0 {
            self.decide_free(view, full);
        } else {
            self.decide_slowed(view, full);
        }
        if !self.pass_over {
            return;
        }
        if view.missing() <= 0.0 || !matches!(self.why, Why::Needed | Why::Floor) {
            self.patience.restart();
            self.stalled = false;
        } else {
            let floor = self.why == Why::Floor;
            self.stalled = self.patience.is_over(view.left, view.at_s, view.pass, floor);
        }
    }

    /// Decides whether a VM at full speed has to be throttled.
    fn decide_free(&mut self, view: &View, full: f64) {
        let dirty = self.dirty.unwrap_or(full);
        let bound = (view.boundary * view.rate).min(view.in_time());
        if view.missing() <= 0.0 && !self.pass_over {
            // The rest of the guest's writes shows when the pass ends.
            return;
        }
        let is_little = view.missing() <= 0.0;
        self.almost = if is_little { self.almost + 1 } else { 0 };
        // When the pass ended and QEMU compared the remainder with its threshold, the remainder was
        // larger by what has been delivered since.
        let left_then = view.left + view.rate * self.elapsed_s;
        let ends_soon = is_little && (self.almost < ALMOST || left_then <= view.budget);
        if ends_soon || dirty <= bound {
            self.need_since = None;
            self.why = Why::Unneeded;
            return;
        }
        let needed_s = view.at_s - *self.need_since.get_or_insert(view.at_s);
        let looked_s = view.at_s - self.begun_s.unwrap_or(view.at_s);
        if looked_s < LOOK_S || (dirty < bound * FAR && needed_s < NEED_S) {
            self.why = Why::Looking;
        } else if self.waits(view, dirty) {
            self.why = Why::Waiting;
        } else {
            self.missed_alone = dirty > view.boundary * view.rate;
            self.change(view, self.target(view, full));
        }
    }

    /// Whether the next trough is soon and long enough to wait for.
    fn waits(&self, view: &View, dirty: f64) -> bool {
        let enough = |trough: Trough| {
            let most = self.trend.most_left().max(view.left);
            let rise = (dirty - view.rate) * trough.within_s;
            let missing = ((view.left + rise).min(most) - view.budget).max(0.0);
            missing <= trough.lasts_s * COUNTED_ON * view.rate
                && view
                    .time
                    .is_none_or(|time| trough.within_s + missing / view.rate <= time * COUNTED_ON)
        };
        let troughs = [self.cpu_wave.trough(view.at_s), self.dirty_wave.trough(view.at_s)];
        self.waited_s < WAIT_S && troughs.into_iter().flatten().any(enough)
    }

    /// Decides whether a throttled VM has to be throttled more, or less.
    fn decide_slowed(&mut self, view: &View, full: f64) {
        let near = view.left <= view.budget * NEAR;
        self.near_since = near.then(|| self.near_since.unwrap_or(view.at_s));
        let ending = self.near_since.is_some_and(|since| view.at_s - since < NEAR_S);
        let idles = full <= LET_GO * (view.boundary * view.rate).min(view.in_time());
        self.idle_since = idles.then(|| self.idle_since.unwrap_or(view.at_s));
        let let_go = self.idle_since.is_some_and(|since| view.at_s - since >= NEED_S);

        let moved = (view.rate / self.rate_then - 1.0).abs() > 1.0 - LOWER;
        if view.at_s - self.changed_s < KEEP_S || !(self.fresh || moved) {
            return;
        }
        self.fresh = false;
        let dirty = self.dirty.unwrap_or(full) / self.share;
        self.missed_alone |= dirty > view.boundary * view.rate * FAR;
        let target = if let_go { 1.0 } else { self.target(view, full) };
        let lower = (2.0 * view.ratio / (1.0 + view.ratio)).clamp(LOWER, LOWER_LEAST);
        if target < self.share * lower {
            self.change(view, target.max(self.share * LOWER_MOST));
        } else if target <= self.share * RAISE || ending {
            self.raises = 0;
        } else if self.raises + 1 < RAISE_SURE {
            self.raises += 1;
        } else if let_go {
            self.change(view, 1.0);
        } else {
            self.change(view, target.min(self.share * RAISE_MOST));
        }
        self.say(view);
    }

    fn change(&mut self, view: &View, share: f64) {
        self.set(if share >= ALL { 1.0 } else { share.max(view.floor) });
        self.rate_then = view.rate;
        self.say(view);
    }

    fn say(&mut self, view: &View) {
        let wanted = self.full.map_or(1.0, |full| self.wanted(view, full));
        self.why = match self.share {
            share if share <= view.floor && wanted < view.floor => Why::Floor,
            share if share >= 1.0 => Why::Unneeded,
            _ => Why::Needed,
        };
    }

    /// Changes the share. Readings at another share say nothing about this one.
    fn set(&mut self, share: f64) {
        if share == self.share {
            return;
        }
        self.dirty = self.dirty.map(|dirty| dirty * share / self.share);
        self.share = share;
        self.changed_s = self.at_s;
        self.trend.restart();
        self.raises = 0;
        (self.need_since, self.idle_since) = (None, None);
        self.fresh = false;
    }

    /// The target share regardless of the floor (equation 9). If the goal would be met without
    /// throttling, only the deadline counts.
    fn wanted(&self, view: &View, full: f64) -> f64 {
        let aim = if self.missed_alone { view.ratio * view.rate } else { f64::INFINITY };
        aim.min(view.in_time()).max(0.0) / full.max(1.0)
    }

    fn target(&self, view: &View, full: f64) -> f64 {
        self.wanted(view, full).max(view.floor).min(1.0)
    }

    fn decision(&mut self, settings: &Settings, look: &Look, view: Option<&View>) -> Decision {
        let rate = view.map_or(0.0, |view| view.rate);
        let blackout = predicted_blackout(look.left_bytes, rate, settings.fixed);
        let stalled = self.stalled.then(|| Stall {
            dirty_bytes_per_s: self.dirty.unwrap_or(0.0),
            delivered_bytes_per_s: rate,
            share: self.share,
            left_bytes: look.left_bytes,
            predicted_blackout: blackout,
        });
        if self.over.is_none() {
            self.over = match (stalled, settings.on_stall) {
                (None, _) | (_, OnStall::Keep) => None,
                (Some(_), OnStall::Stop) => Some(Step::Finish),
                (Some(stall), OnStall::Cancel) => Some(Step::GiveUp(stall)),
            };
        }
        Decision {
            share: self.share,
            quota_cpus: (self.share < 1.0).then(|| self.share * self.used_most.max(USE_LEAST)),
            step: self.over.unwrap_or(Step::Go),
            why: self.why,
            predicted_blackout: view.map(|_| blackout),
            full_dirty_bytes_per_s: self.full,
            ratio: view.map(|view| view.ratio).filter(|ratio| ratio.is_finite()),
            time_left: view.and_then(|view| self.time_left(view)),
            misses_deadline: view.and_then(|view| self.misses(settings, view)),
            stalled,
            work_lost: duration(self.lost_s),
        }
    }

    fn time_left(&self, view: &View) -> Option<Duration> {
        let dirty = if view.first_pass_over { self.dirty? } else { 0.0 };
        let gain = view.rate - dirty;
        (gain > 0.0).then(|| duration(view.missing() / gain))
    }

    /// The earliest time at which the VM arrives, if that is past the deadline.
    fn misses(&mut self, settings: &Settings, view: &View) -> Option<Duration> {
        let deadline = settings.deadline?;
        let least = if settings.ratio == Ratio::Off { 1.0 } else { view.floor };
        let dirty = if view.first_pass_over { self.full.unwrap_or(0.0) * least } else { 0.0 };
        let gain = view.rate - dirty;
        let end_s = view.at_s + view.missing() / gain;
        let total = match gain > 0.0 || view.missing() <= 0.0 {
            true => duration(end_s).saturating_add(settings.goal),
            false => Duration::MAX,
        };
        self.late_since = (total > deadline).then(|| self.late_since.unwrap_or(view.at_s));
        // A single look may be wrong.
        self.late_since.filter(|since| view.at_s - since >= NEED_S).map(|_| total)
    }
}

fn duration(seconds: f64) -> Duration {
    Duration::from_secs_f64(if seconds >= 0.0 { seconds.min(1e9) } else { 1e9 })
}
