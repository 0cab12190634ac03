//! Decides whether to chase a guest that writes, or to let QEMU finish.
//!
//! QEMU copies a page when the pass reaches it, and reads dirty bits only at the pass's end. So a
//! page that is written before its turn is sent, and is sent again in the next pass although it has
//! not changed since. The longer a pass takes, the more is sent in vain. While QEMU is held and
//! can't finish, a large pool lets it run through its passes at once. Dirty pages then wait in the
//! pool and not in QEMU, a page that is written while it waits is dropped before it is sent, and
//! hardly any page is sent twice.
//!
//! But everything in the pool would have to be delivered during the downtime. So before QEMU may
//! finish, the pool is drained to its small bound, which costs a little of the gain.

use std::time::Duration;

/// A chase ends after this long without progress. A pass takes 0.1 s or more, and the remainder
/// fluctuates with the passes.
const PATIENCE: Duration = Duration::from_millis(1500);
/// Progress is a remainder that is smaller than ever before, by this share.
const GAIN: f64 = 0.05;
/// The longest time for delivering the pool's content. A larger pool would only keep pages until
/// the guest has changed them.
const WAIT: Duration = Duration::from_secs(1);

/// The stage of a chase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// QEMU is held, the pool may be large.
    Chasing,
    /// QEMU is held, the pool is small, and its former content is in flight.
    Draining,
    /// QEMU may finish, and the pool stays small.
    Over,
}

/// The input of a decision.
#[derive(Clone, Copy, Debug)]
pub struct ChaseInput {
    /// Bytes that are dirty as far as QEMU knows, or in flight.
    pub left: u64,
    /// Bytes that can be delivered within the downtime goal; none while no rate is known.
    pub budget: Option<u64>,
    /// Bytes in buffers that were taken from the pool.
    pub pool: u64,
    /// The small bound that the pool has to be drained to.
    pub bound: u64,
    /// The guest is being throttled, or about to be, so there will be progress.
    pub helped: bool,
}

/// The state of a chase, which starts after the first pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chase {
    stage: Stage,
    least: u64,
    since_least: Duration,
}

impl Default for Chase {
    fn default() -> Self {
        Self { stage: Stage::Chasing, least: u64::MAX, since_least: Duration::ZERO }
    }
}

impl Chase {
    /// The current stage.
    #[must_use]
    pub fn stage(self) -> Stage {
        self.stage
    }

    /// The state after `elapsed` more.
    #[must_use]
    pub fn next(self, input: ChaseInput, elapsed: Duration) -> Self {
        match self.stage {
            Stage::Chasing => self.chase(input, elapsed),
            Stage::Draining => self.drain(input),
            Stage::Over => self,
        }
    }

    fn chase(self, input: ChaseInput, elapsed: Duration) -> Self {
        // Without a rate, next to nothing was delivered, so there is nothing to chase.
        if input.budget.is_none_or(|budget| input.left <= budget) {
            return self.drain(input);
        }
        if (input.left as f64) < self.least as f64 * (1.0 - GAIN) {
            return Self { least: input.left, since_least: Duration::ZERO, ..self };
        }
        if input.helped {
            return Self { since_least: Duration::ZERO, ..self };
        }
        let since_least = self.since_least.saturating_add(elapsed);
        if since_least >= PATIENCE {
            return self.drain(input);
        }
        Self { since_least, ..self }
    }

    fn drain(self, input: ChaseInput) -> Self {
        let stage = if input.pool <= input.bound { Stage::Over } else { Stage::Draining };
        Self { stage, ..self }
    }
}

/// The pool's bound while a guest is chased, out of its `pool_bytes`.
#[must_use]
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub fn pool_bytes(bodies_per_s: Option<f64>, least_bytes: u64, pool_bytes: u64) -> u64 {
    let worth = bodies_per_s.unwrap_or(0.0) * WAIT.as_secs_f64();
    (worth as u64).clamp(least_bytes.min(pool_bytes), pool_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const TICK: Duration = Duration::from_millis(50);
    const INPUT: ChaseInput = ChaseInput {
        left: 100 * MIB,
        budget: Some(15 * MIB),
        pool: 60 * MIB,
        bound: 4 * MIB,
        helped: false,
    };

    /// Ticks until a chase with these inputs leaves its current stage.
    fn lasts(mut chase: Chase, inputs: impl Fn(u64) -> ChaseInput) -> u64 {
        let stage = chase.stage();
        (1..=1000)
            .find(|tick| {
                chase = chase.next(inputs(*tick), TICK);
                chase.stage() != stage
            })
            .unwrap_or(u64::MAX)
    }

    #[test]
    fn an_idle_guest_is_not_chased() {
        for budget in [Some(15 * MIB), None] {
            let input = ChaseInput { left: 2 * MIB, budget, pool: MIB, ..INPUT };
            assert_eq!(Chase::default().next(input, TICK).stage(), Stage::Over);
        }
        let draining = Chase::default().next(ChaseInput { left: 15 * MIB, ..INPUT }, TICK);
        assert_eq!(draining.stage(), Stage::Draining);
    }

    #[test]
    fn a_chase_lasts_as_long_as_it_makes_progress() {
        // 2 % less each tick: 5 % every third.
        let gaining = |tick: u64| ChaseInput {
            left: (0..tick).fold(INPUT.left, |left, _| left * 98 / 100),
            ..INPUT
        };
        let ticks = lasts(Chase::default(), gaining);
        assert!(gaining(ticks).left <= 15 * MIB && gaining(ticks - 1).left > 15 * MIB, "{ticks}");
        // A remainder that stays the same, or fluctuates, is no progress.
        assert_eq!(lasts(Chase::default(), |_| INPUT), 31);
        let swinging = |tick| ChaseInput { left: INPUT.left + tick % 7 * MIB, ..INPUT };
        assert!(lasts(Chase::default(), swinging) < 40);
        // Nor is one above the smallest so far.
        let worse = |tick| ChaseInput { left: INPUT.left + tick * MIB, ..INPUT };
        assert_eq!(lasts(Chase::default(), worse), 31);
        // A chase doesn't end while the guest is being throttled.
        let slowed = |tick| ChaseInput { helped: tick < 500, ..INPUT };
        assert_eq!(lasts(Chase::default(), slowed), 529);
    }

    #[test]
    fn qemu_may_finish_only_once_the_pool_is_drained_and_then_for_good() {
        let mut chase = Chase::default();
        while chase.stage() == Stage::Chasing {
            chase = chase.next(INPUT, TICK);
        }
        // However much is left, the pool never becomes large again.
        for pool in [60 * MIB, 30 * MIB, 4 * MIB + 1] {
            for left in [0, 1 << 40] {
                chase = chase.next(ChaseInput { left, pool, ..INPUT }, TICK);
                assert_eq!(chase.stage(), Stage::Draining, "{pool} in the pool");
            }
        }
        chase = chase.next(ChaseInput { pool: 4 * MIB, ..INPUT }, TICK);
        assert_eq!(chase.stage(), Stage::Over);
        assert_eq!(chase.next(INPUT, TICK).stage(), Stage::Over);
    }

    #[test]
    fn the_pool_holds_a_second_of_delivery_within_its_bounds() {
        let pool = |rate| pool_bytes(rate, MIB, 128 * MIB);
        assert_eq!(pool(Some(60e6)), 60_000_000);
        assert_eq!(pool(Some(1e9)), 128 * MIB);
        assert_eq!(pool(Some(1e3)), MIB);
        assert_eq!(pool(None), MIB);
        assert_eq!(pool_bytes(Some(1e9), MIB, 1000), 1000);
    }
}
