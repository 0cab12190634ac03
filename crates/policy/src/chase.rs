//! Whether to chase a guest that writes, or to have QEMU finish.
//!
//! QEMU copies a page when the pass reaches it, and collects dirty marks only
//! at the pass's end. So a page that is written before its turn is sent, and
//! sent again in the next pass although it has not changed since: the longer a
//! pass takes, the more is sent for nothing. While QEMU is held and can't
//! finish, a large pool lets it run through its passes in no time. Dirty pages
//! then wait in the pool and not in QEMU, a page that is written while it waits
//! is dropped before it is sent, and hardly any page is sent twice.
//!
//! But everything in the pool would have to be delivered in the blackout. So
//! before QEMU may finish, the pool is drained to its small bound, which costs
//! a little of the gain.

use std::time::Duration;

/// A chase without progress for this long is over. A pass takes 0.1 s or more,
/// and the remainder goes up and down with the passes.
const PATIENCE: Duration = Duration::from_millis(1500);
/// What counts as progress: a remainder smaller than ever before, by this
/// share.
const GAIN: f64 = 0.05;
/// How long the pool's content may take to be delivered. A larger pool would
/// only keep pages until the guest has changed them.
const WAIT: Duration = Duration::from_secs(1);

/// What may be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// QEMU is held, the pool may be large.
    Chasing,
    /// QEMU is held, the pool is small, and what was in it is in flight.
    Draining,
    /// QEMU may finish, and the pool stays small.
    Over,
}

/// What the next stage depends on. All in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Dirty as far as QEMU knows, or in flight.
    pub left: u64,
    /// What can be delivered within the downtime goal; none while no rate is
    /// known.
    pub budget: Option<u64>,
    /// Out of the pool.
    pub pool: u64,
    /// The small bound that the pool has to be drained to.
    pub bound: u64,
    /// The guest is being throttled, or about to be: there will be progress.
    pub helped: bool,
}

/// Where a chase stands. It begins when the first pass is over.
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
    /// What may be done now.
    #[must_use]
    pub fn stage(self) -> Stage {
        self.stage
    }

    /// The state after `elapsed` more.
    #[must_use]
    pub fn next(self, look: Look, elapsed: Duration) -> Self {
        match self.stage {
            Stage::Chasing => self.chase(look, elapsed),
            Stage::Draining => self.drain(look),
            Stage::Over => self,
        }
    }

    fn chase(self, look: Look, elapsed: Duration) -> Self {
        // Without a rate next to nothing was delivered: there is nothing to
        // chase.
        if look.budget.is_none_or(|budget| look.left <= budget) {
            return self.drain(look);
        }
        if (look.left as f64) < self.least as f64 * (1.0 - GAIN) {
            return Self { least: look.left, since_least: Duration::ZERO, ..self };
        }
        if look.helped {
            return Self { since_least: Duration::ZERO, ..self };
        }
        let since_least = self.since_least.saturating_add(elapsed);
        if since_least >= PATIENCE {
            return self.drain(look);
        }
        Self { since_least, ..self }
    }

    fn drain(self, look: Look) -> Self {
        let stage = if look.pool <= look.bound { Stage::Over } else { Stage::Draining };
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
    const LOOK: Look = Look {
        left: 100 * MIB,
        budget: Some(15 * MIB),
        pool: 60 * MIB,
        bound: 4 * MIB,
        helped: false,
    };

    /// Ticks until a chase over these looks is no longer at `stage`.
    fn lasts(mut chase: Chase, looks: impl Fn(u64) -> Look) -> u64 {
        let stage = chase.stage();
        (1..=1000)
            .find(|tick| {
                chase = chase.next(looks(*tick), TICK);
                chase.stage() != stage
            })
            .unwrap_or(u64::MAX)
    }

    #[test]
    fn an_idle_guest_is_not_chased() {
        for budget in [Some(15 * MIB), None] {
            let look = Look { left: 2 * MIB, budget, pool: MIB, ..LOOK };
            assert_eq!(Chase::default().next(look, TICK).stage(), Stage::Over);
        }
        let draining = Chase::default().next(Look { left: 15 * MIB, ..LOOK }, TICK);
        assert_eq!(draining.stage(), Stage::Draining);
    }

    #[test]
    fn it_lasts_as_long_as_ground_is_gained() {
        // 2 % less each tick: 5 % every third.
        let gaining =
            |tick: u64| Look { left: (0..tick).fold(LOOK.left, |left, _| left * 98 / 100), ..LOOK };
        let ticks = lasts(Chase::default(), gaining);
        assert!(gaining(ticks).left <= 15 * MIB && gaining(ticks - 1).left > 15 * MIB, "{ticks}");
        // As much as before, and up and down around it.
        assert_eq!(lasts(Chase::default(), |_| LOOK), 31);
        let swinging = |tick| Look { left: LOOK.left + tick % 7 * MIB, ..LOOK };
        assert!(lasts(Chase::default(), swinging) < 40);
        // Nothing counts that is worse than what was reached once.
        let worse = |tick| Look { left: LOOK.left + tick * MIB, ..LOOK };
        assert_eq!(lasts(Chase::default(), worse), 31);
        // Nor does it end while the guest is being throttled.
        let slowed = |tick| Look { helped: tick < 500, ..LOOK };
        assert_eq!(lasts(Chase::default(), slowed), 529);
    }

    #[test]
    fn qemu_may_finish_only_once_the_pool_is_drained_and_then_for_good() {
        let mut chase = Chase::default();
        while chase.stage() == Stage::Chasing {
            chase = chase.next(LOOK, TICK);
        }
        // Whatever is left: the pool never becomes large again.
        for pool in [60 * MIB, 30 * MIB, 4 * MIB + 1] {
            for left in [0, 1 << 40] {
                chase = chase.next(Look { left, pool, ..LOOK }, TICK);
                assert_eq!(chase.stage(), Stage::Draining, "{pool} in the pool");
            }
        }
        chase = chase.next(Look { pool: 4 * MIB, ..LOOK }, TICK);
        assert_eq!(chase.stage(), Stage::Over);
        assert_eq!(chase.next(LOOK, TICK).stage(), Stage::Over);
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
