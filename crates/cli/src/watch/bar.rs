//! Shared parts of both displays.

/// The highest rate of redrawing.
pub(super) const DRAWS_PER_S: u8 = 10;

/// Longest pause between two lines, without a terminal.
const PAUSE_MAX_S: f64 = 60.0;
/// How many times as long as the pause it has taken by then.
const PAUSES: f64 = 30.0;

/// Seconds between two lines, without a terminal. They grow with what it has taken so far, so that
/// a move that takes hours fills no log.
pub(super) fn pause_s(elapsed_s: f64, shortest_s: f64) -> f64 {
    (elapsed_s / PAUSES).clamp(shortest_s, PAUSE_MAX_S)
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to 0..=1000 first"
)]
pub(super) fn permille(percent: f64) -> u64 {
    (percent * 10.0).clamp(0.0, 1000.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_rarer() {
        for (elapsed_s, pause) in [(0.0, 1.0), (30.0, 1.0), (300.0, 10.0), (36_000.0, 60.0)] {
            assert_eq!(pause_s(elapsed_s, 1.0), pause);
        }
        assert_eq!(pause_s(60.0, 5.0), 5.0);
    }

    #[test]
    fn percents_stay_on_the_bar() {
        for (percent, position) in [(-1.0, 0), (f64::NAN, 0), (73.4, 734), (250.0, 1000)] {
            assert_eq!(permille(percent), position);
        }
    }
}
