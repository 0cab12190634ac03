//! Counts that are known only at some instants.

use std::time::Instant;

/// The count at an instant, interpolated between the known counts around it.
pub(crate) fn at(counts: &[(Instant, u64)], when: Instant) -> f64 {
    let next = counts.partition_point(|(at, _)| *at <= when);
    match (next.checked_sub(1).and_then(|last| counts.get(last)), counts.get(next)) {
        (Some((at, count)), Some((next_at, next_count))) => {
            let share = (when - *at).as_secs_f64() / (*next_at - *at).as_secs_f64();
            *count as f64 + share * next_count.saturating_sub(*count) as f64
        }
        (Some((_, count)), None) | (None, Some((_, count))) => *count as f64,
        (None, None) => 0.0,
    }
}

/// How much was counted between two instants.
pub(crate) fn between(counts: &[(Instant, u64)], from: Instant, to: Instant) -> f64 {
    at(counts, to) - at(counts, from)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn counts_between_two_reports_are_interpolated() {
        let start = Instant::now();
        let when = |ms| start + Duration::from_millis(ms);
        let counts = [(when(100), 10), (when(200), 20), (when(400), 60)];
        let table = [(0, 10.0), (100, 10.0), (150, 15.0), (300, 40.0), (400, 60.0), (900, 60.0)];
        for (ms, count) in table {
            assert!((at(&counts, when(ms)) - count).abs() < 1e-6, "{ms}");
        }
        assert!((between(&counts, when(150), when(300)) - 25.0).abs() < 1e-6);
        assert_eq!(at(&[], start), 0.0);
    }
}
