//! Quotas of CPU time in the kernel's terms.

/// Long enough for a small quota to be worth a context switch, and short enough for a guest to
/// hardly notice its pauses: its longest were 4 to 26 ms with 10 ms, and up to 86 with 100 ms.
const PERIOD_US: u64 = 10_000;
/// The kernel accepts no smaller quota.
const QUOTA_US_MIN: u64 = 1_000;
/// The kernel accepts no longer period.
const PERIOD_US_MAX: u64 = 1_000_000;
/// The smallest quota, in seconds of CPU time a second.
pub const CPUS_MIN: f64 = QUOTA_US_MIN as f64 / PERIOD_US_MAX as f64;

/// An amount of CPU time for each period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    pub(crate) quota_us: u64,
    pub(crate) period_us: u64,
}

impl Quota {
    /// A quota of `cpus` seconds of CPU time a second, as near as the kernel permits.
    #[must_use]
    pub fn of(cpus: f64) -> Self {
        let cpus = if cpus.is_finite() { cpus.clamp(CPUS_MIN, 1e6) } else { 1e6 };
        let quota_us = whole(cpus * PERIOD_US as f64);
        if quota_us >= QUOTA_US_MIN {
            return Self { quota_us, period_us: PERIOD_US };
        }
        let period_us = whole(QUOTA_US_MIN as f64 / cpus).clamp(PERIOD_US, PERIOD_US_MAX);
        Self { quota_us: QUOTA_US_MIN, period_us }
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(value: f64) -> u64 {
    value.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_period_is_short_unless_the_quota_would_be_too_small() {
        let of = |cpus| (Quota::of(cpus).quota_us, Quota::of(cpus).period_us);
        assert_eq!(of(0.5), (5_000, 10_000));
        assert_eq!(of(3.2), (32_000, 10_000));
        assert_eq!(of(0.1), (1_000, 10_000));
        assert_eq!(of(0.05), (1_000, 20_000));
        assert_eq!(of(0.001), (1_000, 1_000_000));
        for nonsense in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let (quota_us, period_us) = of(nonsense);
            assert!(quota_us >= QUOTA_US_MIN && period_us <= PERIOD_US_MAX, "{nonsense}");
        }
    }
}
