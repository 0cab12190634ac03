//! Determines what other traffic leaves of one NIC.
//!
//! The traffic of others can be measured, their demand can't: on a full NIC they may want more. So
//! a NIC is never filled while others use it. If it is full all the same, others have grown. They
//! keep what they took; if the NIC stays full, they get a quarter of the spare bandwidth, then
//! half, then three quarters; and if they grew by much, twice that growth at once. As soon as the
//! NIC is no longer full, others use as much as they want, and the rest is spare.

use super::{NicUse, Room};

/// Lanes with this share of their time in writes fill their path.
pub(super) const FILLING: f64 = 0.5;
/// The lanes' least share of a NIC's traffic if it is they that fill it.
const FILLED_BY: f64 = 0.25;
/// A NIC that shows less than this share of what its lanes write carries other traffic than theirs:
/// their address may be on an interface that only holds it, or the destination on the same host.
const CARRIES: f64 = 0.5;
/// A NIC that carries more than the NIC at the other end, by this factor...
pub(super) const CARRIES_MORE: f64 = 1.25;
/// ...with less than this share for the migration, may be the full one.
pub(super) const MOSTLY: f64 = 0.5;
/// The part of a NIC's speed that its counters show at least: they omit preambles and gaps, and
/// software that counts before it splits packets misses headers.
const SHOWN: f64 = 0.94;
/// A NIC is full if less is free than this share of what was meant to be free...
const FULL: f64 = 0.5;
/// ...within these bounds, as shares of its capacity. The least is the precision of a second's
/// counters; the most applies if nothing was meant to be free.
const FULL_LEAST: f64 = 0.002;
const FULL_MOST: f64 = 0.01;
/// Traffic of others below this share is background protocols, or the difference between bytes
/// written and bytes on the wire.
const QUIET: f64 = 0.03;
/// Samples without other traffic until none has to be spared any more.
const QUIET_SAMPLES: u32 = 5;
/// Share of the spare bandwidth that is left free, to show when others want more: at least, at
/// most, and as a multiple of the mean change of their traffic.
const FREE_LEAST: f64 = 0.08;
const FREE_MOST: f64 = 0.12;
const FREE_CHANGES: f64 = 1.0;
/// Weight of the newest change in their mean.
const CHANGE_WEIGHT: f64 = 0.2;
/// Growth of others beyond fluctuation: as a share of the NIC's capacity, and as a multiple of the
/// mean change.
const MUCH: f64 = 0.1;
const MUCH_CHANGES: f64 = 4.0;
/// To learn whether a NIC carries more than it ever showed, lanes exceed that by this much for one
/// sample: first after `TRY_FIRST` samples, then after twice as many each time, up to `TRY_LAST`,
/// until the NIC shows more. If it shows most of what was tried, the next trial follows at once and
/// is twice as large.
const TRY: f64 = 0.1;
const TRY_MOST: f64 = 1.0;
const TRY_FIRST: u32 = 4;
const TRY_LAST: u32 = 512;
const TRY_GAIN: f64 = 1.005;
const TRY_SHOWN: f64 = 0.5;
/// What a migration spares for other migrations, as a multiple of their traffic, when it takes what
/// they don't use.
const FELLOWS: f64 = 1.1;

/// One NIC in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Nic {
    highest: f64,
    /// Whether lanes have filled it, so that the highest rate is its capacity.
    filled: bool,
    others: Option<f64>,
    change: f64,
    /// What the last decision meant to leave free.
    free: f64,
    quiet: u32,
    full: u32,
    trial: Trial,
}

impl Default for Nic {
    fn default() -> Self {
        Self {
            highest: 0.0,
            filled: false,
            others: None,
            change: 0.0,
            free: f64::INFINITY,
            // There was no other traffic yet.
            quiet: QUIET_SAMPLES,
            full: 0,
            trial: Trial { rest: TRY_FIRST, pause: TRY_FIRST, beyond: TRY, from: None },
        }
    }
}

impl Nic {
    /// Bytes per second for a migration that now writes `mine` over the NIC. None if no other
    /// traffic has to be spared, or if the NIC's speed is not known yet. `filling`: its lanes wrote
    /// as fast as their path allowed. `others_keep`: what others keep if the VM needs more than
    /// they leave, if that is bounded.
    pub(super) fn next(
        &mut self,
        used: NicUse,
        mine: f64,
        filling: bool,
        others_keep: Option<u64>,
    ) -> Option<Room> {
        let all = used.all_bytes_per_s as f64;
        self.highest = self.highest.max(all);
        // If little gets through, the bottleneck is elsewhere; if nothing does, the path is broken.
        let carries = mine > 0.0 && all >= mine * CARRIES;
        self.filled |= filling && carries && mine >= all * FILLED_BY;
        let content = (used.content_bytes_per_s as f64).clamp(all / 4.0, all);
        let wire_per_content = if content > 0.0 { all / content } else { 1.0 };
        let ours = used.ours_bytes_per_s as f64 * wire_per_content;
        let others = (all - ours).max(0.0);
        let grown = self.grown(others);
        let can = self.can(used.speed_bytes_per_s)?;
        let is_full = can - all < (self.free * FULL).clamp(can * FULL_LEAST, can * FULL_MOST);
        if others < can * QUIET {
            self.full = 0;
            self.quiet = self.quiet.saturating_add(1);
            if self.quiet > QUIET_SAMPLES {
                self.free = f64::INFINITY;
                return None;
            }
        } else {
            self.quiet = 0;
            self.full = if is_full { self.full.saturating_add(1) } else { 0 };
        }
        let mut allowed = self.allowed(can, others, grown);
        if self.full == 0 && self.trial.is_due(self.highest) {
            let beyond = used.speed_bytes_per_s.map_or(f64::INFINITY, |speed| speed as f64 - can);
            allowed = (can - others + beyond.min(can * self.trial.beyond)).max(allowed);
        }
        let most = others_keep.map_or(allowed, |keep| allowed.max(can - keep as f64));
        let fellows = (ours - mine * wire_per_content).max(0.0);
        let part = |allowed: f64| {
            let even = allowed / f64::from(used.migrations.max(1));
            even.max(allowed - fellows * FELLOWS) / wire_per_content
        };
        Some(Room { spare: part(allowed), most: part(most) })
    }

    /// The growth of others since the previous sample.
    fn grown(&mut self, others: f64) -> Grown {
        let Some(before) = self.others.replace(others) else {
            return Grown { by: 0.0, changes: f64::INFINITY };
        };
        let by = others - before;
        let changes = if self.change > 0.0 { by / self.change } else { f64::INFINITY };
        self.change += (by.abs() - self.change) * CHANGE_WEIGHT;
        Grown { by, changes }
    }

    /// Its capacity, as its counters show it.
    fn can(&self, speed: Option<u64>) -> Option<f64> {
        match speed {
            Some(speed) => Some(self.highest.clamp(speed as f64 * SHOWN, speed as f64)),
            None => self.filled.then_some(self.highest),
        }
    }

    fn allowed(&mut self, can: f64, others: f64, grown: Grown) -> f64 {
        let spare = (can - others).max(0.0);
        let free = (self.change * FREE_CHANGES).clamp(spare * FREE_LEAST, spare * FREE_MOST);
        self.free = free;
        let mut allowed = spare - free;
        match self.full {
            0 | 1 => {}
            2 => allowed *= 0.75,
            3 => allowed *= 0.5,
            _ => allowed *= 0.25,
        }
        if self.full > 0 && grown.by > can * MUCH && grown.changes > MUCH_CHANGES {
            allowed = allowed.min(spare - 2.0 * grown.by);
        }
        allowed.max(0.0)
    }
}

#[derive(Clone, Copy, Debug)]
struct Grown {
    by: f64,
    /// As a multiple of the mean change.
    changes: f64,
}

/// When to try whether the NIC carries more.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Trial {
    /// Samples until the next trial.
    rest: u32,
    pause: u32,
    /// By how much the next trial exceeds the capacity, as a share.
    beyond: f64,
    /// The highest rate before the current trial.
    from: Option<f64>,
}

impl Trial {
    fn is_due(&mut self, highest: f64) -> bool {
        if let Some(from) = self.from.take() {
            self.judge(highest / from.max(1.0));
        }
        self.rest = self.rest.saturating_sub(1);
        let is_due = self.rest == 0;
        self.from = is_due.then_some(highest);
        is_due
    }

    /// Judges a trial after which the highest rate is `gain` times as large.
    fn judge(&mut self, gain: f64) {
        self.pause = if gain > TRY_GAIN { TRY_FIRST } else { (self.pause * 2).min(TRY_LAST) };
        self.rest = self.pause;
        if gain > 1.0 + self.beyond * TRY_SHOWN {
            self.beyond = (self.beyond * 2.0).min(TRY_MOST);
            self.rest = 1;
        } else {
            self.beyond = TRY;
        }
    }
}
