//! Turns a sample into a decision.

use std::time::Duration;

use super::view::{COUNTED_ON, View};
use super::wave::Trough;
use super::{
    Course, Decision, DirtyRate, OnStall, Rates, Ratio, Settings, Stall, Step, Throttle,
    ThrottleInput, Throttled, Troughs, Why,
};
use crate::switchover::predicted_blackout;

/// How long later passes are observed before the VM is throttled. QEMU's rates are over a second,
/// and a burst that has ended by then needs nothing. Longer observation helps only guests that rest
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
    /// The decision after one more sample. Settings may change between samples.
    pub fn next(&mut self, settings: &Settings, input: &ThrottleInput) -> Decision {
        let mut view = View::new(settings, input);
        self.note(input, view.as_mut());
        if settings.ratio == Ratio::Off || !input.first_pass_over {
            self.keep_off();
            if let Some(view) = &view {
                self.need.find(view, self.dirty_unthrottled());
            }
        } else if let Some(view) = &view {
            self.decide(view);
        }
        self.decision(settings, input, view.as_ref())
    }

    /// The dirty rate with all of its CPU time, as far as it shows; 0 while it is unknown.
    fn dirty_unthrottled(&self) -> f64 {
        self.rates.believed.map_or(0.0, |rate| rate.now / self.share())
    }

    fn share(&self) -> f64 {
        match &self.course {
            Course::Free { .. } => 1.0,
            Course::Throttled(slowed) => slowed.share,
        }
    }

    /// Notes the current state.
    fn note(&mut self, input: &ThrottleInput, view: Option<&mut View>) {
        let share = self.share();
        let at_s = input.at.as_secs_f64().max(self.clock.at_s);
        let elapsed_s = at_s - self.clock.at_s;
        (self.clock.at_s, self.clock.elapsed_s) = (at_s, elapsed_s);
        self.sums.shared_s += share * elapsed_s;
        self.sums.lost_s += (1.0 - share) * elapsed_s;
        self.note_use(input.used_cpus.max(0.0), elapsed_s);
        let Some(view) = view else { return };
        let waits = self.why == Why::Widening;
        self.need.note(view, if waits { elapsed_s } else { 0.0 });
        self.sums.delivered += view.rate * elapsed_s;
        if !input.first_pass_over {
            return;
        }
        self.clock.later_s.get_or_insert(at_s);
        let dirty = input.dirty_bytes_per_s.filter(|rate| rate.is_finite());
        let Rates { trend, reported, .. } = &mut self.rates;
        let reported = match input.counted_at_share {
            Some(share) => reported.note_counted(dirty, share),
            None => reported.note(dirty, at_s, self.sums.shared_s),
        };
        view.pass_over = trend.note(view, (self.sums.delivered, self.sums.shared_s));
        let is_measured = input.counted_at_share.is_none() && view.pass_over && view.is_busy();
        let reading = trend.reading().filter(|_| is_measured);
        if let Some(reading) = reading {
            self.rates.read = true;
            self.believe(DirtyRate { now: reading.dirty, full: reading.full });
        } else if let Some(full) = reported.filter(|_| !self.rates.read || !view.is_busy()) {
            let unsaturated = full * self.rates.trend.unsaturated(view.left);
            self.believe(DirtyRate { now: full * share, full: unsaturated });
        }
        if let Some(DirtyRate { now, .. }) = self.rates.believed {
            self.troughs.dirty.note(at_s, now / share, elapsed_s);
        }
    }

    /// Notes the CPU use of the VM's vCPUs, to which a share refers.
    fn note_use(&mut self, used_cpus: f64, elapsed_s: f64) {
        let (share, cpu) = (self.share(), &mut self.cpu);
        let weight = 1.0 - (-elapsed_s / USE_SMOOTH_S).exp();
        cpu.smooth += (used_cpus - cpu.smooth) * weight;
        if share >= 1.0 {
            cpu.most = cpu.smooth.max(cpu.most * (-elapsed_s / USE_S).exp());
        }
        self.troughs.cpu.note(self.clock.at_s, used_cpus / share, elapsed_s);
        if self.why == Why::Waiting {
            self.troughs.waited_s += elapsed_s;
        }
    }

    /// Notes a dirty rate. Noise is smoothed; a jump up is believed at once, because it costs most.
    fn believe(&mut self, rate: DirtyRate) {
        let Rates { trend, believed, believed_s, .. } = &mut self.rates;
        let since_s = self.clock.at_s - *believed_s;
        let weight = 1.0 - (-since_s / (trend.span_s() * BELIEVE)).exp();
        let blend = |before: f64, now: f64| {
            if now <= before * JUMP { before + (now - before) * weight } else { now }
        };
        *believed_s = self.clock.at_s;
        *believed = Some(believed.map_or(rate, |before| DirtyRate {
            now: blend(before.now, rate.now),
            full: blend(before.full, rate.full),
        }));
        if let Course::Throttled(slowed) = &mut self.course {
            slowed.fresh = true;
        }
    }

    /// Throttles nothing.
    fn keep_off(&mut self) {
        if let Course::Throttled(_) = self.course {
            self.set(1.0, Course::default());
        }
        self.why = Why::Nothing;
        self.stalled = false;
    }

    fn decide(&mut self, view: &View) {
        let Some(rate) = self.rates.believed else {
            self.why = Why::Looking;
            return;
        };
        match self.course.clone() {
            Course::Free { need_since } => self.decide_free(view, rate, need_since),
            Course::Throttled(slowed) => self.decide_throttled(view, rate, slowed),
        }
        if !view.pass_over {
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
    fn decide_free(&mut self, view: &View, rate: DirtyRate, need_since: Option<f64>) {
        let dirty = rate.now;
        let bound = (view.boundary * view.rate).min(view.in_time());
        if view.missing() <= 0.0 && !view.pass_over {
            // The rest of the guest's writes shows when the pass ends.
            return;
        }
        let is_little = view.missing() <= 0.0;
        self.almost = if is_little { self.almost + 1 } else { 0 };
        // When the pass ended and QEMU compared the remainder with its threshold, the remainder was
        // larger by what has been delivered since.
        let left_then = view.left + view.rate * self.clock.elapsed_s;
        let ends_soon = is_little && (self.almost < ALMOST || left_then <= view.budget);
        if ends_soon || dirty <= bound {
            self.course = Course::Free { need_since: None };
            self.why = Why::Unneeded;
            return;
        }
        let since = need_since.unwrap_or(view.at_s);
        self.course = Course::Free { need_since: Some(since) };
        let needed_s = view.at_s - since;
        let looked_s = view.at_s - self.clock.later_s.unwrap_or(view.at_s);
        if looked_s < LOOK_S || (dirty < bound * FAR && needed_s < NEED_S) {
            self.why = Why::Looking;
        } else if self.waits(view, dirty) {
            self.why = Why::Waiting;
        } else if self.need.is_awaited(view) {
            self.why = Why::Widening;
        } else {
            self.missed_alone = dirty > view.boundary * view.rate;
            self.change(view, self.target(view, rate.full));
        }
    }

    /// Whether the next trough is soon and long enough to wait for.
    fn waits(&self, view: &View, dirty: f64) -> bool {
        let enough = |trough: Trough| {
            let most = self.rates.trend.most_left().max(view.left);
            let rise = (dirty - view.rate) * trough.within_s;
            let missing = ((view.left + rise).min(most) - view.budget).max(0.0);
            missing <= trough.lasts_s * COUNTED_ON * view.rate
                && view
                    .time
                    .is_none_or(|time| trough.within_s + missing / view.rate <= time * COUNTED_ON)
        };
        let Troughs { cpu, dirty, waited_s } = &self.troughs;
        let troughs = [cpu.trough(view.at_s), dirty.trough(view.at_s)];
        *waited_s < WAIT_S && troughs.into_iter().flatten().any(enough)
    }

    /// Decides whether a throttled VM has to be throttled more, or less.
    fn decide_throttled(&mut self, view: &View, rate: DirtyRate, mut slowed: Throttled) {
        let (share, full) = (slowed.share, rate.full);
        let near = view.left <= view.budget * NEAR;
        self.near_since = near.then(|| self.near_since.unwrap_or(view.at_s));
        let ending = self.near_since.is_some_and(|since| view.at_s - since < NEAR_S);
        let idles = full <= LET_GO * (view.boundary * view.rate).min(view.in_time());
        slowed.idle_since = idles.then(|| slowed.idle_since.unwrap_or(view.at_s));
        let let_go = slowed.idle_since.is_some_and(|since| view.at_s - since >= NEED_S);

        let moved = (view.rate / slowed.chosen_for - 1.0).abs() > 1.0 - LOWER;
        if view.at_s - slowed.chosen_s < KEEP_S || !(slowed.fresh || moved) {
            self.course = Course::Throttled(slowed);
            return;
        }
        slowed.fresh = false;
        let dirty = rate.now / share;
        self.missed_alone |= dirty > view.boundary * view.rate * FAR;
        let target = if let_go { 1.0 } else { self.target(view, full) };
        let lower = (2.0 * view.ratio / (1.0 + view.ratio)).clamp(LOWER, LOWER_LEAST);
        let chosen = if target < share * lower {
            Some(target.max(share * LOWER_MOST))
        } else if target <= share * RAISE || ending {
            slowed.raises = 0;
            None
        } else if slowed.raises + 1 < RAISE_SURE {
            slowed.raises += 1;
            None
        } else if let_go {
            Some(1.0)
        } else {
            Some(target.min(share * RAISE_MOST))
        };
        self.course = Course::Throttled(slowed);
        match chosen {
            Some(share) => self.change(view, share),
            None => self.say(view),
        }
    }

    fn change(&mut self, view: &View, share: f64) {
        let share = if share >= ALL { 1.0 } else { share.max(view.floor) };
        let (chosen_s, chosen_for) = (self.clock.at_s, view.rate);
        match &mut self.course {
            Course::Throttled(slowed) if share == slowed.share => slowed.chosen_for = chosen_for,
            _ if share < 1.0 => {
                let (idle_since, raises, fresh) = (None, 0, false);
                let slowed = Throttled { share, chosen_s, chosen_for, idle_since, raises, fresh };
                self.set(share, Course::Throttled(slowed));
            }
            Course::Throttled(_) => self.set(1.0, Course::default()),
            Course::Free { .. } => {}
        }
        self.say(view);
    }

    fn say(&mut self, view: &View) {
        let wanted = self.rates.believed.map_or(1.0, |rate| self.wanted(view, rate.full));
        self.why = match self.share() {
            share if share <= view.floor && wanted < view.floor => Why::Floor,
            share if share >= 1.0 => Why::Unneeded,
            _ => Why::Needed,
        };
    }

    /// Changes the share. Readings at another share say nothing about this one.
    fn set(&mut self, share: f64, course: Course) {
        let before = self.share();
        if let Some(rate) = &mut self.rates.believed {
            rate.now = rate.now * share / before;
        }
        self.rates.trend.restart();
        self.course = course;
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

    fn decision(
        &mut self,
        settings: &Settings,
        input: &ThrottleInput,
        view: Option<&View>,
    ) -> Decision {
        let (share, believed) = (self.share(), self.rates.believed);
        let (rate, dirty) = (view.map_or(0.0, |view| view.rate), self.dirty_unthrottled());
        let blackout = predicted_blackout(input.left_bytes, rate, settings.fixed);
        let stalled = self.stalled.then(|| Stall {
            dirty_bytes_per_s: believed.map_or(0.0, |rate| rate.now),
            delivered_bytes_per_s: rate,
            share,
            left_bytes: input.left_bytes,
            predicted_blackout: blackout,
        });
        if let (Step::Go, Some(stall)) = (self.step, stalled) {
            self.step = match settings.on_stall {
                OnStall::Keep => Step::Go,
                OnStall::Stop => Step::Finish,
                OnStall::Cancel => Step::GiveUp(stall),
            };
        }
        Decision {
            share,
            quota_cpus: (share < 1.0).then(|| share * self.cpu.most.max(USE_LEAST)),
            step: self.step,
            why: self.why,
            predicted_blackout: view.map(|_| blackout),
            full_dirty_bytes_per_s: believed.map(|rate| rate.full),
            ratio: view.map(|view| view.ratio).filter(|ratio| ratio.is_finite()),
            needed_bytes_per_s: view.and_then(|view| self.need.rate(view, dirty)),
            time_left: view.and_then(|view| self.time_left(view)),
            misses_deadline: view.and_then(|view| self.misses(settings, view)),
            stalled,
            work_lost: duration(self.sums.lost_s),
        }
    }

    fn time_left(&self, view: &View) -> Option<Duration> {
        let dirty = if view.first_pass_over { self.rates.believed?.now } else { 0.0 };
        let gain = view.rate - dirty;
        (gain > 0.0).then(|| duration(view.missing() / gain))
    }

    /// The earliest time at which the VM arrives, if that is past the deadline.
    fn misses(&mut self, settings: &Settings, view: &View) -> Option<Duration> {
        let deadline = settings.deadline?;
        let least = if settings.ratio == Ratio::Off { 1.0 } else { view.floor };
        let full = self.rates.believed.filter(|_| view.first_pass_over).map_or(0.0, |r| r.full);
        let gain = view.rate - full * least;
        let end_s = view.at_s + view.missing() / gain;
        let total = match gain > 0.0 || view.missing() <= 0.0 {
            true => duration(end_s).saturating_add(settings.goal),
            false => Duration::MAX,
        };
        self.late_since = (total > deadline).then(|| self.late_since.unwrap_or(view.at_s));
        let late_s = self.need.late_s(view);
        self.late_since.filter(|since| view.at_s - since >= late_s).map(|_| total)
    }
}

fn duration(seconds: f64) -> Duration {
    Duration::from_secs_f64(if seconds >= 0.0 { seconds.min(1e9) } else { 1e9 })
}
