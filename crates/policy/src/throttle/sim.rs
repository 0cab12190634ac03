//! The controller with a VM, a QEMU and a path in simulated time.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates made up here are positive and small"
)]

use std::time::Duration;

use super::{Decision, OnStall, Ratio, Settings, Step, Throttle, ThrottleInput};
use crate::passes::{self, Counted};
use crate::precopy::Vm;
use crate::switchover::budget_bytes;

impl Default for Settings {
    fn default() -> Self {
        Self {
            goal: Duration::from_millis(300),
            fixed: Duration::ZERO,
            floor: 0.2,
            ratio: Ratio::Auto,
            deadline: None,
            on_stall: OnStall::Cancel,
        }
    }
}

pub(super) const MIB: f64 = (1 << 20) as f64;
/// 200 Mbit/s, without headers.
pub(super) const LINK: f64 = 23.9e6;
const STEP_S: f64 = 0.01;
const DECISION_STEPS: u64 = 5;
/// A quick pass takes at least this long, and QEMU reports a rate this often.
const PASS_LEAST_S: f64 = 0.1;
const REPORTED_S: f64 = 1.0;
/// Lanes are paced this often.
const PACED_STEPS: u64 = 100;
/// The time to deliver what waits for the lanes, while QEMU is held and while it isn't.
pub(super) const POOL_LARGE_S: f64 = 6.0;
pub(super) const POOL_S: f64 = 1.0;
pub(super) const POOL_SMALL_S: f64 = 0.05;

/// What the controller knows of QEMU.
struct Known {
    left: f64,
    rate: f64,
    dirty: Option<f64>,
    counted_at_share: Option<f64>,
}

/// Reproducible noise.
struct Random(u64);

impl Random {
    /// Between -1 and 1.
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// A task in the guest: the CPU that it wants, and what it writes with that.
#[derive(Clone, Copy)]
pub(super) struct Work {
    pub(super) cpus: f64,
    pub(super) bytes_per_s: f64,
}

/// A factor as a function of time.
type Over = fn(f64) -> f64;

#[derive(Clone)]
pub(super) struct Sim {
    pub(super) ram: f64,
    pub(super) set: f64,
    /// Whether the set is written from its beginning to its end, and not in random order.
    pub(super) in_order: bool,
    pub(super) works: Vec<Work>,
    /// The guest's activity over time, and the link's rate.
    pub(super) activity: Over,
    pub(super) link: Over,
    /// Up to how many times that rate others yield to the VM.
    pub(super) yields: f64,
    /// The error of the dirty rate that QEMU reports, and that of the link's measured rate.
    pub(super) reported: Over,
    pub(super) measured: Over,
    /// How far QEMU can be ahead: the further, the quicker its passes are.
    pub(super) pool_s: f64,
    pub(super) noise: f64,
    /// QEMU can't be queried: its passes are counted.
    pub(super) counted: bool,
    pub(super) seed: u64,
    pub(super) settings: Settings,
    /// How long the remainder must have been small enough until QEMU stops the VM.
    pub(super) ends_in_s: f64,
    pub(super) until_s: f64,
}

/// The result of a run.
pub(super) struct Outcome {
    /// Each decision from the end of the first pass on, with its time.
    pub(super) decisions: Vec<(f64, Decision)>,
    pub(super) first_pass_s: f64,
    /// When the VM was stopped, and its downtime.
    pub(super) stopped_s: Option<f64>,
    pub(super) blackout_s: f64,
    pub(super) step: Step,
    /// CPU time that the guest wanted and didn't get, as seconds at full speed.
    pub(super) lost_s: f64,
    /// Whether the VM was throttled before the first pass was over.
    pub(super) early: bool,
    /// The most that lanes got, as a multiple of what others leave.
    pub(super) widest: f64,
    /// Whether the deadline was reported as missed.
    pub(super) late: bool,
}

impl Outcome {
    /// Seconds from the end of the first pass to the stop.
    pub(super) fn later_s(&self) -> f64 {
        self.stopped_s.map_or(f64::INFINITY, |at| at - self.first_pass_s)
    }

    pub(super) fn lowest(&self) -> f64 {
        self.decisions.iter().map(|(_, decision)| decision.share).fold(1.0, f64::min)
    }

    /// How often the share changed direction by more than a fifth.
    pub(super) fn turns(&self) -> usize {
        let (mut turns, mut up, mut edge) = (0, false, 1.0);
        for (_, Decision { share, .. }) in &self.decisions {
            if up && *share > edge || !up && *share < edge {
                edge = *share;
            } else if (share / edge - 1.0).abs() > 0.2 {
                (up, edge, turns) = (!up, *share, turns + 1);
            }
        }
        turns
    }
}

/// A guest of one CPU-bound writer at `times` the link's rate.
pub(super) fn writer(times: f64) -> Sim {
    Sim {
        ram: 512.0 * MIB,
        set: 128.0 * MIB,
        in_order: false,
        works: vec![Work { cpus: 1.0, bytes_per_s: times * LINK }],
        activity: |_| 1.0,
        link: |_| 1.0,
        yields: 1.0,
        reported: |_| 1.0,
        measured: |_| 1.0,
        pool_s: POOL_S,
        noise: 0.1,
        counted: false,
        seed: 1,
        settings: Settings { fixed: Duration::from_millis(50), floor: 0.05, ..Settings::default() },
        ends_in_s: 0.0,
        until_s: 300.0,
    }
}

/// The state of the simulation.
struct State {
    random: Random,
    throttle: Throttle,
    /// Bytes dirty as QEMU knows them, in the pool, and dirty without QEMU knowing yet.
    dirty: f64,
    pool: f64,
    unseen: f64,
    pass: u32,
    pass_s: f64,
    /// Bytes that went into the pool so far, and until the current pass began.
    came: f64,
    came_then: f64,
    passes: passes::Passes,
    share: f64,
    reported: Option<f64>,
    reported_s: f64,
    reported_bytes: f64,
    rate: f64,
    /// What the lanes get, as a multiple of what others leave, and what the VM needs.
    wide: f64,
    needed: f64,
    used: f64,
    quota: Option<f64>,
}

impl Sim {
    pub(super) fn vm(&self) -> Vm {
        Vm { ram_bytes: self.ram as u64, working_set_bytes: Some(self.set as u64) }
    }

    pub(super) fn run(&self) -> Outcome {
        let mut state = State {
            random: Random(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            throttle: Throttle::default(),
            dirty: self.ram,
            pool: 0.0,
            unseen: 0.0,
            pass: 1,
            pass_s: 0.0,
            came: 0.0,
            came_then: 0.0,
            passes: passes::Passes::default(),
            share: 1.0,
            reported: None,
            reported_s: 0.0,
            reported_bytes: 0.0,
            rate: LINK * (self.link)(0.0),
            wide: 1.0,
            needed: 0.0,
            used: 0.0,
            quota: None,
        };
        let mut outcome = Outcome {
            decisions: Vec::new(),
            first_pass_s: f64::INFINITY,
            stopped_s: None,
            blackout_s: 0.0,
            step: Step::Go,
            lost_s: 0.0,
            early: false,
            widest: 1.0,
            late: false,
        };
        let mut fits_s = 0.0;
        for step in 1u64.. {
            let at_s = step as f64 * STEP_S;
            if at_s > self.until_s {
                break;
            }
            if step % PACED_STEPS == 0 {
                let needed = state.needed / (LINK * (self.link)(at_s));
                state.wide = needed.clamp(1.0, self.yields);
                outcome.widest = outcome.widest.max(state.wide);
            }
            outcome.lost_s += self.work(&mut state, at_s);
            let synced = self.deliver(&mut state, at_s);
            if state.pass > 1 {
                outcome.first_pass_s = outcome.first_pass_s.min(at_s);
            }
            let left = state.dirty + state.pool;
            let link = LINK * (self.link)(at_s) * state.wide;
            let Settings { goal, fixed, .. } = self.settings;
            let fits = left <= budget_bytes(link, goal, fixed) as f64;
            fits_s = if fits { fits_s + STEP_S } else { 0.0 };
            if (synced && fits && fits_s > self.ends_in_s) || outcome.step == Step::Finish {
                outcome.blackout_s = left / link + fixed.as_secs_f64();
                outcome.stopped_s = Some(at_s);
                break;
            }
            if step % DECISION_STEPS == 0 {
                let decision = self.decide(&mut state, at_s);
                if state.pass > 1 {
                    outcome.decisions.push((at_s, decision));
                } else {
                    outcome.early |= decision.share < 1.0 || decision.quota_cpus.is_some();
                }
                outcome.late |= decision.misses_deadline.is_some();
                outcome.step = decision.step;
                if matches!(decision.step, Step::GiveUp(_)) {
                    break;
                }
            }
        }
        outcome
    }

    /// Runs the guest; returns how much less CPU time it got than it wanted, in seconds.
    fn work(&self, state: &mut State, at_s: f64) -> f64 {
        let activity = (self.activity)(at_s).max(0.01);
        let wanted: f64 = self.works.iter().map(|work| work.cpus * activity).sum();
        // The guest's scheduler is fair: a task that wants little gets all of it.
        let mut room = state.quota.unwrap_or(f64::INFINITY);
        let mut works: Vec<&Work> = self.works.iter().collect();
        works.sort_by(|a, b| a.cpus.total_cmp(&b.cpus));
        let (mut used, mut written) = (0.0, 0.0);
        for (nth, work) in works.iter().enumerate() {
            let part = room / (works.len() - nth) as f64;
            let gets = (work.cpus * activity).min(part);
            room -= gets;
            used += gets;
            written += work.bytes_per_s * gets / work.cpus;
        }
        written *= (1.0 + self.noise * state.random.next()) * STEP_S;
        state.unseen = if self.in_order {
            (state.unseen + written).min(self.set)
        } else {
            state.unseen + written * (1.0 - state.unseen / self.set)
        };
        state.used += used * STEP_S;
        (1.0 - used / wanted) * STEP_S
    }

    /// Delivers, and lets QEMU go on; returns whether a pass has ended.
    fn deliver(&self, state: &mut State, at_s: f64) -> bool {
        let link = LINK * (self.link)(at_s) * state.wide;
        let rate = link * (1.0 + self.noise * state.random.next());
        let all = rate * self.pool_s;
        state.pool = (state.pool - rate * STEP_S).max(0.0);
        let goes = (all - state.pool).clamp(0.0, state.dirty);
        state.pool += goes;
        state.dirty -= goes;
        state.came += goes;
        // Measured over 16 decisions.
        let weight = STEP_S / 0.4;
        state.rate += ((self.measured)(at_s) * rate - state.rate) * weight;
        if state.dirty > 0.0 || at_s - state.pass_s < PASS_LEAST_S {
            return false;
        }
        // A page that waits in the pool and is dirty again is dropped there.
        let again = if self.in_order {
            (state.pool + state.unseen - self.set).max(0.0)
        } else {
            state.pool * state.unseen / self.set
        };
        state.pool -= again;
        state.reported_bytes += state.unseen;
        state.dirty = state.unseen;
        state.unseen = 0.0;
        state.pass += 1;
        (state.pass_s, state.came_then) = (at_s, state.came);
        if at_s - state.reported_s >= REPORTED_S {
            let reported = state.reported_bytes / (at_s - state.reported_s);
            state.reported = Some(reported * (self.reported)(at_s));
            (state.reported_s, state.reported_bytes) = (at_s, 0.0);
        }
        true
    }

    fn decide(&self, state: &mut State, at_s: f64) -> Decision {
        let every_s = DECISION_STEPS as f64 * STEP_S;
        let used_cpus = state.used / every_s * (1.0 + self.noise * state.random.next());
        state.used = 0.0;
        // Some pages are counted twice, some not yet.
        let left = (state.dirty + state.pool) * (1.0 + 0.1 * self.noise * state.random.next());
        let Known { left, rate, dirty, counted_at_share } = self.known(state, at_s, left);
        let decision = state.throttle.next(
            &self.settings,
            &ThrottleInput {
                at: Duration::from_secs_f64(at_s),
                ram_bytes: self.ram as u64,
                left_bytes: left as u64,
                delivered_bytes_per_s: Some(rate),
                dirty_bytes_per_s: dirty,
                counted_at_share,
                pass: state.pass,
                first_pass_over: state.pass > 1,
                used_cpus,
                wider: state.wide < self.yields,
            },
        );
        state.needed = decision.needed_bytes_per_s.unwrap_or(0.0);
        (state.quota, state.share) = (decision.quota_cpus, decision.share);
        decision
    }

    /// What a query of QEMU returns, or what its passes show.
    fn known(&self, state: &mut State, at_s: f64, left: f64) -> Known {
        let queried =
            Known { left, rate: state.rate, dirty: state.reported, counted_at_share: None };
        if !self.counted {
            return queried;
        }
        let counted = state.passes.next(&passes::PassesInput {
            at: Duration::from_secs_f64(at_s),
            pass: state.pass,
            began: Duration::from_secs_f64(state.pass_s),
            bytes_then: state.came_then as u64,
            bytes: state.came as u64,
            share: state.share,
            ram_bytes: self.ram as u64,
        });
        let Counted { dirty, left_bytes, .. } = counted;
        Known {
            left: left_bytes.unwrap_or(0) as f64 + state.pool,
            dirty: dirty.map(|dirty| dirty.bytes_per_s),
            counted_at_share: Some(dirty.map_or(1.0, |dirty| dirty.share)),
            ..queried
        }
    }
}
