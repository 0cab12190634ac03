//! Shared parts of both displays.

/// The highest rate of redrawing.
pub(super) const DRAWS_PER_S: u8 = 10;

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
    fn percents_stay_on_the_bar() {
        for (percent, position) in [(-1.0, 0), (f64::NAN, 0), (73.4, 734), (250.0, 1000)] {
            assert_eq!(permille(percent), position);
        }
    }
}
