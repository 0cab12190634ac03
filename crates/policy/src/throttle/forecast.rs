//! Predicts a migration before it starts.

use std::time::Duration;

use super::input::Settings;
use super::need::AIM;
use super::view::{Aims, PASSES_ALONE};
use crate::precopy::{Passes, Path, Prediction, Throttled, Vm, predict, predict_throttled};

/// Bisection steps between two shares: to a thousandth.
const HALVINGS: u32 = 10;

/// The forecast for a migration. Downtimes and totals include the fixed cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// Without throttling.
    pub free: Prediction,
    /// With the settings.
    pub throttled: Throttled,
    /// The ratio of dirty rate to delivered rate below which nothing is
    /// throttled.
    pub boundary: f64,
    /// The ratio that a VM is throttled to; none: throttling is off.
    pub ratio: Option<f64>,
    /// If the deadline can't be met, the shortest time that the migration takes.
    pub misses_deadline: Option<Duration>,
    /// The delivered rate with which the VM would not have to be throttled. None: it need not be.
    pub needed_bytes_per_s: Option<f64>,
}

/// Predicts a migration of a VM with this dirty rate when `bytes_per_s` are delivered, with the
/// controller's own targets.
///
/// The forecast is a little optimistic if the guest writes in order, or in waves: the controller
/// may have to observe it for longer.
#[must_use]
pub fn forecast(
    settings: &Settings,
    vm: Vm,
    bytes_per_s: f64,
    dirty_bytes_per_s: f64,
    passes: Passes,
) -> Forecast {
    let aims = Aims::new(settings, vm.ram_bytes, bytes_per_s);
    let path =
        Path { bytes_per_s, passes_max: PASSES_ALONE, threshold_bytes: aims.budget_bytes, passes };
    let free = predict(vm, path, |_| dirty_bytes_per_s);
    let at = |share| with_fixed(predict_throttled(vm, path, dirty_bytes_per_s, share), settings);
    let wanted = match aims.ratio {
        Some(ratio) if !free.met => {
            (ratio * bytes_per_s / dirty_bytes_per_s.max(1.0)).max(aims.floor).min(1.0)
        }
        _ => 1.0,
    };
    let floor = if aims.ratio.is_some() { aims.floor } else { 1.0 };
    let deadline = settings.deadline.unwrap_or(Duration::MAX);
    let least = at(floor).prediction.total;
    Forecast {
        free: at(1.0).prediction,
        throttled: at(in_time(wanted, floor, |share| at(share).prediction.total <= deadline)),
        boundary: aims.boundary,
        ratio: aims.ratio,
        misses_deadline: (least > deadline).then_some(least),
        needed_bytes_per_s: (!free.met).then(|| dirty_bytes_per_s / (aims.boundary * AIM)),
    }
}

/// The largest share up to `wanted` that meets the deadline, or else the floor.
fn in_time(wanted: f64, floor: f64, is_in_time: impl Fn(f64) -> bool) -> f64 {
    if is_in_time(wanted) {
        return wanted;
    }
    let (mut low, mut high) = (floor.min(wanted), wanted);
    for _ in 0..HALVINGS {
        let middle = (low + high) / 2.0;
        if is_in_time(middle) { low = middle } else { high = middle }
    }
    low
}

fn with_fixed(throttled: Throttled, settings: &Settings) -> Throttled {
    let prediction = throttled.prediction;
    let more = |time: Duration| time.saturating_add(settings.fixed);
    let prediction = Prediction {
        total: more(prediction.total),
        blackout: more(prediction.blackout),
        ..prediction
    };
    Throttled { prediction, ..throttled }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::throttle::Ratio;

    const LINK: f64 = 23.9e6;
    const VM: Vm = Vm { ram_bytes: 512 << 20, working_set_bytes: Some(128 << 20) };

    fn settings() -> Settings {
        Settings { fixed: Duration::from_millis(50), floor: 0.05, ..Settings::default() }
    }

    fn of(settings: &Settings, times: f64) -> Forecast {
        forecast(settings, VM, LINK, times * LINK, Passes::Quick)
    }

    #[test]
    fn throttling_meets_the_goal_that_is_missed_without() {
        for (times, alone) in [(0.25, true), (0.8, true), (1.5, false), (4.0, false)] {
            let forecast = of(&settings(), times);
            let goal = Duration::from_millis(301);
            assert_eq!(forecast.free.met, alone, "{times}");
            assert_eq!(forecast.free.blackout < goal, alone, "{times}");
            assert!(forecast.throttled.prediction.blackout < goal, "{times}: {forecast:?}");
            assert_eq!(forecast.throttled.share >= 1.0, alone, "{times}");
            assert_eq!(forecast.misses_deadline, None);
            assert_eq!(forecast.needed_bytes_per_s.is_none(), alone, "{times}");
            if let Some(needed) = forecast.needed_bytes_per_s {
                let wide = super::forecast(&settings(), VM, needed, times * LINK, Passes::Quick);
                assert!(needed > LINK && wide.free.met, "{times}: {wide:?}");
            }
            let off = of(&Settings { ratio: Ratio::Off, ..settings() }, times);
            assert_eq!(off.throttled.prediction, off.free);
        }
        let floor = of(&Settings { floor: 0.2, ..settings() }, 8.0);
        assert!(!floor.throttled.prediction.met && floor.throttled.share == 0.2);
    }

    #[test]
    fn a_deadline_lowers_the_share_as_far_as_it_has_to() {
        let by = |seconds, times| {
            let deadline = Some(Duration::from_secs(seconds));
            (deadline, of(&Settings { deadline, ..settings() }, times))
        };
        for times in [0.8, 2.0, 4.0] {
            let least = by(0, times).1.misses_deadline.unwrap();
            let (_, none) = by(3600, times);
            let tight = least.as_secs() + 1;
            let (deadline, forecast) = by(tight, times);
            assert!(Some(forecast.throttled.prediction.total) <= deadline, "{times}: {forecast:?}");
            assert!(forecast.throttled.share <= none.throttled.share);
            assert!(forecast.throttled.share >= 0.05 && forecast.misses_deadline.is_none());
            assert!(by(least.as_secs(), times).1.misses_deadline.is_some());
        }
    }
}
