//! Axes with round values for their ticks.

/// A linear axis from 0.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Where the axis ends.
    pub max: f64,
    /// The distance between two ticks.
    pub step: f64,
}

/// Ticks on a vertical axis, at most.
const BYTE_TICKS: f64 = 4.0;
/// Ticks on a time axis, at most.
const TIME_TICKS: f64 = 10.0;
/// A peak is cut if it is above this multiple of the 90th percentile: zero pages are delivered far
/// faster than a network carries.
const PEAK: f64 = 4.0;
/// The end of the axis if a peak is cut, as a multiple of the 90th percentile.
const ABOVE_USUAL: f64 = 1.5;

impl Scale {
    /// An axis for bytes: steps of 1, 2 or 5 times 1, 10 or 100 of a binary unit, and the end
    /// at a step.
    #[must_use]
    pub fn bytes(most: f64) -> Self {
        let most = positive(most).max(1.0);
        let raw = most / BYTE_TICKS;
        let mut unit = 1.0;
        while raw > unit * 512.0 {
            unit *= 1024.0;
        }
        let factors = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 256.0, 512.0];
        let step = factors.iter().map(|f| f * unit).find(|&step| step >= raw).unwrap_or(raw);
        Self { max: (most / step).ceil() * step, step }
    }

    /// An axis for bytes per second, without short peaks that would flatten all else to it.
    #[must_use]
    pub fn rates(values: impl IntoIterator<Item = f64>) -> Self {
        // Zeros don't count: a series that is mostly 0 would have no usual rate.
        let values = values.into_iter().map(positive).filter(|value| *value > 0.0);
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let most = values.last().copied().unwrap_or(0.0);
        let usual = values.get(values.len() * 9 / 10).copied().unwrap_or(0.0);
        Self::bytes(if most > PEAK * usual { usual * ABOVE_USUAL } else { most })
    }

    /// An axis for percentages.
    pub(crate) fn percent() -> Self {
        Self { max: 100.0, step: 25.0 }
    }

    /// An axis for seconds: round steps, and the end where the data ends.
    #[must_use]
    pub fn time(most: f64) -> Self {
        let most = positive(most).max(0.001);
        let raw = most / TIME_TICKS;
        let round = [1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0];
        let step = if raw <= 1.0 {
            let power = 10f64.powf(raw.log10().floor());
            [1.0, 2.0, 5.0, 10.0].iter().map(|f| f * power).find(|&s| s >= raw * 0.999)
        } else {
            round.into_iter().find(|&step| step >= raw)
        };
        Self { max: most, step: step.unwrap_or(raw) }
    }

    /// The ticks, 0 first.
    pub fn ticks(self) -> impl Iterator<Item = f64> {
        // Some slack, so that the last tick is not lost to rounding.
        let last = self.max + self.step * 1e-6;
        (0..64u32).map(move |n| f64::from(n) * self.step).take_while(move |&tick| tick <= last)
    }

    /// A value's place, from 0 to 1.
    #[must_use]
    pub fn place(self, value: f64) -> f64 {
        (positive(value) / self.max).clamp(0.0, 1.0)
    }
}

/// The label of a tick of a time axis.
#[must_use]
pub fn time_label(seconds: f64, step: f64) -> String {
    if step >= 60.0 {
        format!("{:.0} min", seconds / 60.0)
    } else if step >= 1.0 {
        format!("{seconds:.0} s")
    } else if step >= 0.1 {
        format!("{seconds:.1} s")
    } else if step >= 0.01 {
        format!("{seconds:.2} s")
    } else {
        format!("{:.0} ms", seconds * 1e3)
    }
}

/// The value, or 0 if it is not finite or is negative.
pub(crate) fn positive(value: f64) -> f64 {
    if value.is_finite() { value.max(0.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_axes_end_above_the_data_at_a_round_value() {
        const MIB: f64 = 1_048_576.0;
        for (most, max, step) in [
            (0.0, 1.0, 1.0),
            (101.0 * MIB, 150.0 * MIB, 50.0 * MIB),
            (812.0 * MIB, 1024.0 * MIB, 256.0 * MIB),
            (1024.0 * MIB, 1024.0 * MIB, 256.0 * MIB),
            (1900.0 * MIB, 2048.0 * MIB, 512.0 * MIB),
            (f64::NAN, 1.0, 1.0),
        ] {
            let scale = Scale::bytes(most);
            assert_eq!((scale.max, scale.step), (max, step), "{most}");
        }
    }

    #[test]
    fn axes_have_few_ticks_whatever_the_data() {
        for exponent in -6..14 {
            for factor in [1.0, 1.7, 2.3, 4.9, 9.9] {
                let most = factor * 10f64.powi(exponent);
                for scale in [Scale::bytes(most), Scale::time(most)] {
                    assert!(scale.max >= most.min(scale.max) && scale.step > 0.0);
                    let ticks = scale.ticks().count();
                    assert!((1..=12).contains(&ticks), "{most}: {ticks} ticks");
                }
            }
        }
    }

    #[test]
    fn time_labels_follow_the_step() {
        for (at, step, label) in [
            (1.5, 0.5, "1.5 s"),
            (0.25, 0.05, "0.25 s"),
            (0.012, 0.002, "12 ms"),
            (30.0, 5.0, "30 s"),
            (120.0, 60.0, "2 min"),
        ] {
            assert_eq!(time_label(at, step), label);
        }
    }
}
