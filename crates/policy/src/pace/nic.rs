//! What others leave of one NIC.
//!
//! What others use can be measured, what they want can't: on a full NIC they
//! may want more. So a NIC is never filled while others use it. If it is full
//! all the same, others have grown. They keep what they took; if the NIC stays
//! full, a quarter more, half, three quarters; and if they grew by much, twice
//! that at once. As soon as it is no longer full, others use what they want,
//! and the rest is spare.

use super::NicUse;

/// Lanes that spend this much of their time in writes fill their path.
pub(super) const FILLING: f64 = 0.5;
/// The lanes' least share of what crosses the NIC when it is they that fill it.
const FILLED_BY: f64 = 0.25;
/// A NIC that carries more than the one at the other end, by this factor...
pub(super) const CARRIES_MORE: f64 = 1.25;
/// ...and of that less than this share for the migration, may be what is full.
pub(super) const MOSTLY: f64 = 0.5;
/// What of a NIC's speed shows in its counters at least: preambles and gaps
/// don't, and software that counts before it splits packets misses headers.
const SHOWN: f64 = 0.94;
/// It is full if less is free than this share of what was meant to be...
const FULL: f64 = 0.5;
/// ...but at least and at most so much of what it can carry. The least is what a
/// second's counters are exact to; the most is for when nothing was meant.
const FULL_LEAST: f64 = 0.002;
const FULL_MOST: f64 = 0.01;
/// Others that use less than this are background protocols, or the difference
/// between bytes written and bytes on the wire.
const QUIET: f64 = 0.03;
/// Samples without other traffic until none has to be spared any more.
const QUIET_SAMPLES: u32 = 5;
/// How much of the spare bandwidth is left free, so that it shows when others
/// want more: at least, at most, and in mean changes of what they use.
const FREE_LEAST: f64 = 0.08;
const FREE_MOST: f64 = 0.12;
const FREE_CHANGES: f64 = 1.0;
/// Weight of the newest change in their mean.
const CHANGE_WEIGHT: f64 = 0.2;
/// A growth of others that is no fluctuation: of what the NIC carries, and in
/// mean changes.
const MUCH: f64 = 0.1;
const MUCH_CHANGES: f64 = 4.0;
/// Whether the NIC carries more than it ever showed is tried by going this much
/// beyond, for one sample; first after so many samples, then after twice as
/// many, at most so many, until it shows that much more. One that shows most of
/// what was tried is tried again at once, by twice as much.
const TRY: f64 = 0.1;
const TRY_MOST: f64 = 1.0;
const TRY_FIRST: u32 = 4;
const TRY_LAST: u32 = 512;
const TRY_GAIN: f64 = 1.005;
const TRY_SHOWN: f64 = 0.5;
/// What a migration leaves beside what other migrations use, when it takes what
/// they don't.
const FELLOWS: f64 = 1.1;

/// One NIC in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Nic {
    highest: f64,
    /// Lanes have filled it, so the highest is what it can carry.
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
            // Nobody has been here yet.
            quiet: QUIET_SAMPLES,
            full: 0,
            trial: Trial { rest: TRY_FIRST, pause: TRY_FIRST, beyond: TRY, from: None },
        }
    }
}

impl Nic {
    /// Bytes per second for a migration that now writes `mine` over it. None if
    /// no other traffic has to be spared, or if the NIC's speed is not known
    /// yet. `filling`: its lanes wrote as fast as their path allowed.
    pub(super) fn next(&mut self, used: NicUse, mine: f64, filling: bool) -> Option<f64> {
        let all = used.all_bytes_per_s as f64;
        self.highest = self.highest.max(all);
        // A path that lets little through is narrow elsewhere.
        self.filled |= filling && mine >= all * FILLED_BY;
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
        let fellows = (ours - mine * wire_per_content).max(0.0);
        let even = allowed / f64::from(used.migrations.max(1));
        Some(even.max(allowed - fellows * FELLOWS) / wire_per_content)
    }

    /// By how much others grew, and whether that is much.
    fn grown(&mut self, others: f64) -> Grown {
        let Some(before) = self.others.replace(others) else {
            return Grown { by: 0.0, changes: f64::INFINITY };
        };
        let by = others - before;
        let changes = if self.change > 0.0 { by / self.change } else { f64::INFINITY };
        self.change += (by.abs() - self.change) * CHANGE_WEIGHT;
        Grown { by, changes }
    }

    /// What it can carry, as it counts.
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
    /// In mean changes.
    changes: f64,
}

/// When to try whether there is more.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Trial {
    /// Samples until then.
    rest: u32,
    pause: u32,
    /// What is tried, as a share.
    beyond: f64,
    /// The highest rate before the one that is on.
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

    /// One is over, after which the highest is so many times what it was.
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
