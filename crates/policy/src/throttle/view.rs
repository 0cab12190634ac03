//! The targets that follow from the settings for this VM at this rate.

use super::input::{Ratio, Settings, ThrottleInput};
use crate::precopy::boundary;
use crate::switchover::budget_bytes;

/// Passes in which a VM may converge by itself: the number that QEMU and Xen allow.
pub(super) const PASSES_ALONE: u32 = 30;
/// Passes in which a throttled VM should converge: with the resulting ratio, it takes less than
/// twice as long as a stopped guest would.
const PASSES_SLOWED: u32 = 5;
/// Bounds of that ratio. Below, hardly any time is gained; above, a slightly wrong rate means no
/// gain at all.
const RATIO: (f64, f64) = (0.25, 0.8);
/// A held QEMU's passes begin this far apart, and the path idles between short ones.
const PACED_S: f64 = 0.1;
/// No share is smaller, whatever the floor.
const SHARE_LEAST: f64 = 1e-3;
/// The part of a trough, or of the time to a deadline, that is relied on.
pub(super) const COUNTED_ON: f64 = 0.8;

/// The targets.
#[derive(Clone, Copy)]
pub(super) struct Aims {
    /// The largest remainder with which the VM may be stopped.
    pub(super) budget_bytes: u64,
    /// The ratio of rates below which the VM is not throttled.
    pub(super) boundary: f64,
    /// The ratio to which a VM is throttled; none means that throttling is off.
    pub(super) ratio: Option<f64>,
    pub(super) floor: f64,
}

impl Aims {
    pub(super) fn new(settings: &Settings, ram_bytes: u64, bytes_per_s: f64) -> Self {
        let budget_bytes = budget_bytes(bytes_per_s, settings.goal, settings.fixed).max(1);
        let of_model = boundary(ram_bytes, budget_bytes, PASSES_SLOWED);
        Self {
            budget_bytes,
            boundary: boundary(ram_bytes, budget_bytes, PASSES_ALONE),
            ratio: match settings.ratio {
                Ratio::Auto => Some(of_model.clamp(RATIO.0, RATIO.1)),
                Ratio::Constant(ratio) => Some(ratio.max(0.0)),
                Ratio::Off => None,
            },
            floor: if settings.floor > SHARE_LEAST { settings.floor.min(1.0) } else { SHARE_LEAST },
        }
    }
}

/// A sample with what follows from the settings.
#[derive(Clone, Copy)]
pub(super) struct View {
    pub(super) at_s: f64,
    pub(super) pass: u32,
    pub(super) first_pass_over: bool,
    /// Whether a pass has ended with this sample, once that was noted.
    pub(super) pass_over: bool,
    pub(super) left: f64,
    /// Bytes delivered per second.
    pub(super) rate: f64,
    /// The largest remainder with which the VM may be stopped.
    pub(super) budget: f64,
    /// The ratio of rates below which the VM is not throttled, and the target ratio.
    pub(super) boundary: f64,
    pub(super) ratio: f64,
    pub(super) floor: f64,
    /// Seconds until the remainder should be within the budget.
    pub(super) time: Option<f64>,
    /// Whether lanes may be given more of the network.
    pub(super) wider: bool,
}

impl View {
    pub(super) fn new(settings: &Settings, input: &ThrottleInput) -> Option<Self> {
        let rate = input.delivered_bytes_per_s.filter(|rate| *rate >= 1.0 && rate.is_finite())?;
        let aims = Aims::new(settings, input.ram_bytes, rate);
        let at_s = input.at.as_secs_f64();
        let end = settings.deadline.map(|deadline| deadline.saturating_sub(settings.goal));
        Some(Self {
            at_s,
            pass: input.pass,
            first_pass_over: input.first_pass_over,
            pass_over: false,
            left: input.left_bytes as f64,
            rate,
            budget: aims.budget_bytes as f64,
            boundary: aims.boundary,
            ratio: aims.ratio.unwrap_or(f64::INFINITY),
            floor: aims.floor,
            time: end.map(|end| end.as_secs_f64() - at_s),
            wider: input.wider,
        })
    }

    /// Whether enough is left to keep the path busy: otherwise less is delivered than possible.
    pub(super) fn is_busy(&self) -> bool {
        self.left >= self.budget.max(self.rate * PACED_S)
    }

    pub(super) fn missing(&self) -> f64 {
        (self.left - self.budget).max(0.0)
    }

    /// The dirty rate with which the deadline is met.
    pub(super) fn in_time(&self) -> f64 {
        self.time.map_or(f64::INFINITY, |time| {
            if self.missing() <= 0.0 {
                return f64::INFINITY;
            }
            self.rate - self.missing() / (time * COUNTED_ON).max(1e-3)
        })
    }
}
