//! Decides when QEMU may finish, and how much may be in flight until then.
//!
//! QEMU decides by how fast our socket accepted bytes, which says nothing about how fast the
//! destination receives them. Left alone, it stops a VM while the pool is full. So the pool is
//! small from before the end of the first pass on, and QEMU gets a threshold that accounts for the
//! pool's content.

use std::time::Duration;

/// Share of the downtime goal that the backlog may use. The rest is for QEMU's remainder, the
/// device state and the load at the destination.
const BACKLOG_SHARE: f64 = 0.25;
/// The share if QEMU's remainder uses the whole goal, so that the backlog comes on top.
const UNCOUNTED_SHARE: f64 = 0.0625;

/// A path is kept full with as much more than it holds: with less its rate could not grow.
const PATH_MORE: f64 = 1.25;

/// The part of the goal that is planned for pages even if the fixed cost leaves less of it, and the
/// least time for them. A goal that the fixed cost uses up is missed in any case, and with no time
/// for pages the VM would have to stop writing before it is stopped.
const PAGES_PART: u32 = 4;
const PAGES_LEAST: Duration = Duration::from_millis(10);

/// The least time for QEMU's remainder if the backlog uses up the time for pages, as a share of the
/// goal and in milliseconds: QEMU must be allowed to finish at some point. On a long path a guest
/// dirties a few pages before each batch is acknowledged.
const MOVE_SHARE: f64 = 0.125;
const MOVE_MS_MIN: f64 = 1.0;

/// More may be left when a VM that does not converge is stopped than when that was decided: half as
/// much again, and a twentieth at least, because the remainder fluctuates with the passes.
const MORE_PART: u32 = 2;
const MORE_LEAST_PART: u32 = 20;
/// The share of the longest downtime that may be planned: at that bound the move is taken back.
const PLANNED_SHARE: f64 = 0.95;

/// The input for the backlog's bound.
#[derive(Clone, Copy, Debug)]
pub struct BacklogInput {
    /// Guest bytes that the first pass has yet to hand over, as the tap counts;
    /// none when it has ended.
    pub first_pass_left_bytes: Option<u64>,
    /// Guest bytes by which QEMU can be ahead of the tap, with socket buffers full of records for
    /// zero pages.
    pub hidden_bytes: u64,
    /// Bytes of page bodies delivered per second; none before the first.
    pub bodies_per_s: Option<f64>,
    /// The downtime goal.
    pub goal: Duration,
    /// Whether QEMU is ordered to leave that much less.
    pub counted: bool,
    /// The pool's full size.
    pub pool_bytes: u64,
    /// The least with which the lanes always have something to send.
    pub least_bytes: u64,
    /// As much as keeps the path full, in addition to that; 0 if it is not known.
    pub path_bytes: u64,
}

/// Bytes of buffers that keep a path full if it delivers `bytes_per_s` of them.
///
/// A buffer is in use for a round trip after it was sent. Those that lanes are writing count, too,
/// because each lane has only a share of the path, but no more of them than the path holds: on
/// short and slow paths next to nothing is added.
#[must_use]
pub fn path_bytes(bytes_per_s: f64, round_trip: Duration, writing_bytes: u64) -> u64 {
    let holds = bytes_per_s * round_trip.as_secs_f64();
    whole(holds * PATH_MORE + holds.min(writing_bytes as f64))
}

/// How many bytes may be between tap and placer now.
///
/// It is never less than the path needs. Otherwise no more than the bound would be delivered in a
/// round trip, this would be measured as the path's rate, and the next bound would be smaller by as
/// much. What the path holds hardly costs downtime: it arrives within a round trip, which the end
/// takes in any case.
///
/// The full pool is used only while QEMU can't be near the end of its first pass. The line is twice
/// what can be hidden: when it is crossed, QEMU has more left than fits into the sockets, so it
/// blocks until the pool has drained to the small bound.
#[must_use]
pub fn backlog_limit_bytes(input: BacklogInput) -> u64 {
    let far =
        input.first_pass_left_bytes.is_some_and(|left| left > input.hidden_bytes.saturating_mul(2));
    if far {
        return input.pool_bytes;
    }
    let Some(bodies_per_s) = input.bodies_per_s else {
        return input.least_bytes.min(input.pool_bytes);
    };
    let share = if input.counted { BACKLOG_SHARE } else { UNCOUNTED_SHARE };
    let within_goal = whole(bodies_per_s * input.goal.as_secs_f64() * share);
    let on_path = input.least_bytes.saturating_add(input.path_bytes);
    within_goal.max(on_path).clamp(input.least_bytes.min(input.pool_bytes), input.pool_bytes)
}

/// The threshold that QEMU gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// The value of `avail-switchover-bandwidth`, if QEMU has it.
    pub bytes_per_s: u64,
    /// The value of `downtime-limit`. Never 0: with that, QEMU 7.2 finishes after one pass, with
    /// everything dirty left for the downtime.
    pub downtime_ms: u64,
}

/// The input for the permission to finish.
#[derive(Clone, Copy, Debug)]
pub struct FinishInput {
    /// Whether the first pass has ended.
    pub first_pass_over: bool,
    /// Bytes of page bodies delivered per second.
    pub bodies_per_s: Option<f64>,
    /// The downtime goal.
    pub goal: Duration,
    /// The downtime without any pages: device state, load, `cont`.
    pub fixed: Duration,
    /// The backlog's bound. All of it may have to be delivered during the downtime.
    pub backlog_bytes: u64,
    /// Whether QEMU takes a bandwidth from us. Otherwise it multiplies the limit by what our socket
    /// accepted in its last 100 ms.
    pub exact: bool,
}

/// The threshold for QEMU, or none while it must not finish.
#[must_use]
pub fn allowance(input: FinishInput) -> Option<Allowance> {
    let bodies_per_s = input.bodies_per_s.filter(|rate| *rate >= 1.0)?;
    if !input.first_pass_over {
        return None;
    }
    let backlog_ms = input.backlog_bytes as f64 / bodies_per_s * 1e3;
    let pages_ms = pages_time(input.goal, input.fixed).as_secs_f64() * 1e3;
    let least_ms = (input.goal.as_secs_f64() * 1e3 * MOVE_SHARE).max(MOVE_MS_MIN);
    let mut move_ms = (pages_ms - backlog_ms).max(least_ms);
    if !input.exact {
        // In 100 ms our socket accepts at most what is delivered meanwhile and the content of an
        // empty pool, by which QEMU may overestimate the bandwidth.
        let believed = 1.0 + backlog_ms / 100.0;
        move_ms = (move_ms / believed).max(MOVE_MS_MIN);
    }
    Some(Allowance { bytes_per_s: whole(bodies_per_s).max(1), downtime_ms: whole(move_ms).max(1) })
}

/// The expected downtime if the VM stopped now.
#[must_use]
pub fn predicted_blackout(left_bytes: u64, bodies_per_s: f64, fixed: Duration) -> Duration {
    let moving = left_bytes as f64 / bodies_per_s.max(1.0);
    fixed + Duration::from_secs_f64(moving.min(1e9))
}

/// The time for pages in a downtime that just meets the goal, or a part of the goal if the fixed
/// cost leaves less.
#[must_use]
pub fn pages_time(goal: Duration, fixed: Duration) -> Duration {
    let least = (goal / PAGES_PART).max(PAGES_LEAST).min(goal);
    goal.saturating_sub(fixed).max(least)
}

/// Whether the fixed cost leaves less than [`pages_time`], so that the goal is likely to be missed.
#[must_use]
pub fn is_missed(goal: Duration, fixed: Duration) -> bool {
    fixed.saturating_add(pages_time(goal, fixed)) > goal
}

/// Bytes that can be delivered in [`pages_time`].
#[must_use]
pub fn budget_bytes(bodies_per_s: f64, goal: Duration, fixed: Duration) -> u64 {
    whole(bodies_per_s * pages_time(goal, fixed).as_secs_f64())
}

/// The downtime to accept for a VM that does not converge, if this one was predicted and `max` is
/// the longest. None if that is too near to the longest.
#[must_use]
pub fn accepted(predicted: Duration, max: Option<Duration>) -> Option<Duration> {
    let most = max.map_or(Duration::MAX, |max| max.mul_f64(PLANNED_SHARE));
    let with = |part: u32| predicted.saturating_add(predicted / part);
    (with(MORE_LEAST_PART) <= most).then(|| with(MORE_PART).min(most))
}

/// A rate or size as a whole number; invalid values become 0 or the largest.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(value: f64) -> u64 {
    value as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn input() -> BacklogInput {
        BacklogInput {
            first_pass_left_bytes: Some(10_000 * MIB),
            hidden_bytes: 400 * MIB,
            bodies_per_s: Some(119e6),
            goal: Duration::from_millis(300),
            counted: true,
            pool_bytes: 128 * MIB,
            least_bytes: MIB,
            path_bytes: 0,
        }
    }

    #[test]
    fn far_from_the_end_the_pool_is_used_in_full() {
        assert_eq!(backlog_limit_bytes(input()), 128 * MIB);
    }

    #[test]
    fn near_the_end_a_quarter_of_the_goal_may_be_in_flight() {
        let near = BacklogInput { first_pass_left_bytes: Some(800 * MIB), ..input() };
        assert_eq!(backlog_limit_bytes(near), 8_925_000);
        let later = BacklogInput { first_pass_left_bytes: None, ..input() };
        assert_eq!(backlog_limit_bytes(later), 8_925_000);
        let uncounted = BacklogInput { counted: false, ..later };
        assert_eq!(backlog_limit_bytes(uncounted), 8_925_000 / 4);
    }

    #[test]
    fn a_small_vm_before_any_measurement_gets_the_least() {
        let small =
            BacklogInput { first_pass_left_bytes: Some(512 * MIB), bodies_per_s: None, ..input() };
        assert_eq!(backlog_limit_bytes(small), MIB);
    }

    #[test]
    fn a_path_is_kept_full_whatever_the_goal() {
        let ms = Duration::from_millis;
        let later = BacklogInput { first_pass_left_bytes: None, ..input() };
        for (path_bytes, expected) in [
            (0, 8_925_000),
            (7_000_000, 8_925_000),
            (9_000_000, MIB + 9_000_000),
            (u64::MAX, 128 * MIB),
        ] {
            assert_eq!(backlog_limit_bytes(BacklogInput { path_bytes, ..later }), expected);
        }
        // 12 MB on the path, with more or less than that being written.
        assert_eq!(path_bytes(120e6, ms(100), 2_000_000), 17_000_000);
        assert_eq!(path_bytes(120e6, ms(100), 40_000_000), 27_000_000);
        assert_eq!(path_bytes(120e6, Duration::ZERO, 2_000_000), 0);
    }

    const SLOT: u64 = 544 << 10;
    const BODIES: u64 = 512 << 10;

    /// The slots of the pool with 8 lanes, if so many bytes of bodies are delivered per second.
    fn slots(bodies_per_s: f64, round_trip: Duration, of: BacklogInput) -> u64 {
        let slot_bytes_per_s = bodies_per_s * SLOT as f64 / BODIES as f64;
        let limit_bytes = backlog_limit_bytes(BacklogInput {
            first_pass_left_bytes: None,
            bodies_per_s: Some(bodies_per_s),
            least_bytes: 2 * SLOT,
            path_bytes: path_bytes(slot_bytes_per_s, round_trip, 8 * SLOT),
            ..of
        });
        limit_bytes / SLOT
    }

    /// Each slot is in use for a round trip, so the bound bounds the rate, which sets the bound.
    #[test]
    fn the_bound_and_the_rate_of_a_long_path_do_not_pull_each_other_down() {
        for (link, goal_ms, counted) in
            [(119e6, 300, false), (1190e6, 300, false), (119e6, 100, true), (1190e6, 50, true)]
        {
            let of = BacklogInput { goal: Duration::from_millis(goal_ms), counted, ..input() };
            for round_trip_ms in [1, 5, 10, 15, 20, 30, 50, 80, 100] {
                let round_trip = Duration::from_millis(round_trip_ms);
                let next = |rate: f64| {
                    let bytes = slots(rate, round_trip, of) * BODIES;
                    f64::min(link, bytes as f64 / round_trip.as_secs_f64())
                };
                // From the link's rate, and from what is left of it after a time of trouble.
                for begin in [link, link / 100.0] {
                    let settled = (0..40).fold(begin, |rate, _| next(rate));
                    assert!(settled >= link * 0.99, "{link} {round_trip_ms} ms: {settled}");
                }
            }
        }
    }

    #[test]
    fn on_short_and_slow_paths_the_bound_is_what_it_was() {
        for (bodies_per_s, round_trip_us) in [
            (119e6, 100),
            (119e6, 1000),
            (1190e6, 100),
            (3e9, 50),
            (12e6, 10_000),
            (1.2e6, 50_000),
            (119e3, 200_000),
        ] {
            for (goal_ms, counted) in [(300, false), (300, true), (50, true), (50, false)] {
                let of = BacklogInput { goal: Duration::from_millis(goal_ms), counted, ..input() };
                let with = |us| slots(bodies_per_s, Duration::from_micros(us), of);
                assert_eq!(with(round_trip_us), with(0), "{bodies_per_s} {round_trip_us} us");
            }
        }
    }

    fn finish() -> FinishInput {
        FinishInput {
            first_pass_over: true,
            bodies_per_s: Some(12e6),
            goal: Duration::from_millis(300),
            fixed: Duration::from_millis(50),
            backlog_bytes: MIB,
            exact: true,
        }
    }

    #[test]
    fn what_qemu_may_leave_fits_the_goal_with_backlog_and_fixed_cost() {
        let allowance = allowance(finish()).unwrap();
        assert_eq!(allowance, Allowance { bytes_per_s: 12_000_000, downtime_ms: 162 });
        let left = allowance.bytes_per_s * allowance.downtime_ms / 1000 + MIB;
        let blackout = predicted_blackout(left, 12e6, Duration::from_millis(50));
        assert!(blackout <= Duration::from_millis(300), "{blackout:?}");
    }

    #[test]
    fn the_budget_is_what_a_blackout_at_the_goal_delivers() {
        let (goal, fixed) = (Duration::from_millis(300), Duration::from_millis(50));
        let budget = budget_bytes(12e6, goal, fixed);
        assert_eq!(budget, 3_000_000);
        assert_eq!(predicted_blackout(budget, 12e6, fixed), goal);
    }

    /// Without any, a migration would end only once nothing at all is left.
    #[test]
    fn a_goal_that_the_fixed_cost_uses_up_still_has_time_for_pages() {
        let ms = Duration::from_millis;
        for (goal_ms, fixed_ms, pages_us) in [
            (300, 60, 240_000),
            (100, 60, 40_000),
            (300, 225, 75_000),
            (300, 290, 75_000),
            (300, 400, 75_000),
            (50, 60, 12_500),
            (20, 60, 10_000),
            (1, 60, 1_000),
        ] {
            let (goal, fixed) = (ms(goal_ms), ms(fixed_ms));
            let expected = Duration::from_micros(pages_us);
            assert_eq!(pages_time(goal, fixed), expected, "{goal_ms} {fixed_ms}");
            let is_missed_by_plan = fixed_ms * 1000 + pages_us > goal_ms * 1000;
            assert_eq!(is_missed(goal, fixed), is_missed_by_plan, "{goal_ms} {fixed_ms}");
            assert!(budget_bytes(12e6, goal, fixed) > 10_000);
            for backlog_bytes in [0, MIB, 1 << 40] {
                let input = FinishInput { goal, fixed, backlog_bytes, ..finish() };
                let allowed_ms = allowance(input).unwrap().downtime_ms;
                assert!(allowed_ms >= (goal_ms / 8).max(1), "{goal_ms} {fixed_ms}: {allowed_ms}");
            }
        }
    }

    #[test]
    fn a_longer_downtime_is_accepted_only_where_the_bound_has_room_for_it() {
        let ms = Duration::from_millis;
        for (predicted_ms, max_ms, expected_ms) in [
            (4000, None, Some(6000)),
            (4000, Some(10_000), Some(6000)),
            (7000, Some(10_000), Some(9500)),
            (9000, Some(10_000), Some(9500)),
            (9100, Some(10_000), None),
            (9500, Some(10_000), None),
            (11_000, Some(10_000), None),
        ] {
            let found = accepted(ms(predicted_ms), max_ms.map(ms));
            assert_eq!(found, expected_ms.map(ms), "{predicted_ms} {max_ms:?}");
        }
        assert_eq!(accepted(Duration::MAX, None), Some(Duration::MAX));
    }

    #[test]
    fn a_qemu_that_measures_by_itself_gets_less() {
        let old = allowance(FinishInput { exact: false, ..finish() }).unwrap();
        assert!(old.downtime_ms < 100, "{old:?}");
    }

    #[test]
    fn never_before_the_first_pass_is_over_or_a_rate_is_known_and_never_zero() {
        assert_eq!(allowance(FinishInput { first_pass_over: false, ..finish() }), None);
        assert_eq!(allowance(FinishInput { bodies_per_s: None, ..finish() }), None);
        let tight = FinishInput { goal: Duration::from_millis(1), ..finish() };
        assert_eq!(allowance(tight).unwrap().downtime_ms, 1);
    }
}
