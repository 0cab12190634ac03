//! Decides how much to throttle a VM that writes faster than its pages are delivered.
//!
//! A VM that is throttled to a share `s` of its CPU time dirties `s p` bytes per second, and `B`
//! are delivered, so the remainder shrinks by `B - s p`. The work lost is `(1 - s) / (B - s p)` for
//! each byte of the remainder; if `p > B`, that *falls* with `s`. So a VM that must be throttled at
//! all is best throttled well below what just converges: it loses less work and arrives sooner. If
//! `p < B`, it is best left alone. Hence two bounds, both from equation 5 of the model: one with
//! many passes, below which nothing is done, and one with few, which is the target.
//!
//! The share follows equation 9, `s' = C B s / p`, but `p` is derived from how the remainder
//! changes (`trend`) as long as that is known: a CPU quota limits CPU time and not writes, so its
//! effect is what counts.
//!
//! Nothing is throttled in the first pass: a page that is written during it is sent once more,
//! whenever it was written. Nor is a VM throttled before lanes have got all of the bandwidth that
//! other traffic may have to give up for it (`need`).

mod decide;
mod forecast;
mod input;
mod need;
#[cfg(test)]
mod sim;
mod stall;
#[cfg(test)]
mod tests;
mod trend;
mod view;
mod wave;

use std::time::Duration;

use need::Need;
use stall::Patience;
use trend::{Reported, Trend};
use wave::Wave;

pub use forecast::{Forecast, forecast};
pub use input::{Ratio, Settings, ThrottleInput};
pub use stall::{OnStall, Stall};

/// Why the share is what it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Why {
    /// Throttling is off, the first pass isn't over, or no rate is known.
    #[default]
    Nothing,
    /// The goal is met without throttling.
    Unneeded,
    /// Throttling seems to be needed; the VM is still being observed.
    Looking,
    /// A trough that is long enough is due soon.
    Waiting,
    /// Throttling seems to be needed, but lanes may get more bandwidth.
    Widening,
    /// Throttling is needed.
    Needed,
    /// More throttling is needed than the floor allows.
    Floor,
}

impl Why {
    /// Whether the remainder will shrink further, so that a chase of the guest is worth going on:
    /// by throttling, or by itself. A VM that needs no throttling has come near to what its goal
    /// permits, and may stay there for good; with more than a second's worth left it has not.
    #[must_use]
    pub fn helps(self, left_bytes: u64, bodies_per_s: Option<f64>) -> bool {
        match self {
            Self::Nothing => false,
            Self::Unneeded => bodies_per_s.is_some_and(|rate| left_bytes as f64 > rate),
            Self::Looking | Self::Waiting | Self::Widening | Self::Needed | Self::Floor => true,
        }
    }
}

/// What to do about the migration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Step {
    /// Go on.
    #[default]
    Go,
    /// Stop the VM now: the longer downtime is accepted.
    Finish,
    /// Cancel.
    GiveUp(Stall),
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The share of the CPU time that the VM used without throttling.
    pub share: f64,
    /// The same in CPUs; none means no quota.
    pub quota_cpus: Option<f64>,
    /// What to do about the migration.
    pub step: Step,
    /// Why the share is this.
    pub why: Why,
    /// The downtime if the VM stopped now.
    pub predicted_blackout: Option<Duration>,
    /// The guest's dirty rate at full speed, as far as it is known.
    pub full_dirty_bytes_per_s: Option<f64>,
    /// The ratio in use (the paper's C).
    pub ratio: Option<f64>,
    /// The rate at which the VM would not have to be throttled, and would arrive in time, in guest
    /// bytes per second. None if it never needed more than was delivered.
    pub needed_bytes_per_s: Option<f64>,
    /// Time until the goal is met at the current rates.
    pub time_left: Option<Duration>,
    /// If the deadline can't be met, when the VM will arrive, counted from the migration's
    /// beginning; `Duration::MAX` if no end is in sight.
    pub misses_deadline: Option<Duration>,
    /// Set if there is no progress at the floor, whatever is done about that.
    pub stalled: Option<Stall>,
    /// Work lost to throttling so far, as time of the VM at full speed. An upper bound: an idle
    /// guest loses nothing.
    pub work_lost: Duration,
}

/// The controller of one migration. Samples may be taken at any rate, ideally several in 100 ms.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Throttle {
    clock: Clock,
    sums: Sums,
    course: Course,
    why: Why,
    rates: Rates,
    cpu: CpuUse,
    troughs: Troughs,
    need: Need,
    /// Since when the remainder of a throttled VM is near the budget.
    near_since: Option<f64>,
    /// Since when the deadline seems to be missed.
    late_since: Option<f64>,
    /// Passes in a row that left little enough, without QEMU stopping the VM.
    almost: u32,
    /// Whether it was throttled because the goal would be missed, and not only the deadline.
    missed_alone: bool,
    patience: Patience,
    stalled: bool,
    /// What was decided for good, or to continue.
    step: Step,
}

/// When samples were taken, in seconds since the migration's start.
#[derive(Clone, Debug, Default, PartialEq)]
struct Clock {
    at_s: f64,
    /// Time since the previous sample.
    elapsed_s: f64,
    /// The first sample after the first pass.
    later_s: Option<f64>,
}

/// Sums since the start.
#[derive(Clone, Debug, Default, PartialEq)]
struct Sums {
    /// Bytes delivered.
    delivered: f64,
    /// Seconds times share.
    shared_s: f64,
    /// Seconds of work lost.
    lost_s: f64,
}

/// Whether the VM is throttled, and what is only known while it is, or while it is not.
#[derive(Clone, Debug, PartialEq)]
enum Course {
    Free {
        /// Since when it seems to be necessary to throttle it.
        need_since: Option<f64>,
    },
    Throttled(Throttled),
}

impl Default for Course {
    fn default() -> Self {
        Self::Free { need_since: None }
    }
}

/// A VM that keeps a share of its CPU time.
#[derive(Clone, Debug, PartialEq)]
struct Throttled {
    /// Below 1.
    share: f64,
    /// When the share was chosen, and the delivered rate that it was chosen for.
    chosen_s: f64,
    chosen_for: f64,
    /// Since when it writes so little that it need not be throttled.
    idle_since: Option<f64>,
    /// Readings in a row that ask for a higher share.
    raises: u32,
    /// Whether the dirty rate was read since the last decision.
    fresh: bool,
}

/// The guest's dirty rate, and what it is derived from.
#[derive(Clone, Debug, Default, PartialEq)]
struct Rates {
    trend: Trend,
    reported: Reported,
    /// Whether the trend has given a dirty rate.
    read: bool,
    believed: Option<DirtyRate>,
    believed_s: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct DirtyRate {
    /// At the current share.
    now: f64,
    /// At a share of 1.
    full: f64,
}

/// CPU use: smoothed, and its maximum without a quota.
#[derive(Clone, Debug, Default, PartialEq)]
struct CpuUse {
    smooth: f64,
    most: f64,
}

/// Signals that show when the guest rests, and how long it was waited for that.
#[derive(Clone, Debug, Default, PartialEq)]
struct Troughs {
    cpu: Wave,
    dirty: Wave,
    waited_s: f64,
}
