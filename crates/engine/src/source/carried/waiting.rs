//! How long QEMU is kept waiting for the permission to stop the VM.
//!
//! QEMU by itself would stop the VM once the dirty rest takes no longer than its downtime
//! limit, at the rate at which its sockets recently accepted bytes, which is more than
//! arrived. So it gets the permission when what is left fits the downtime goal at the rate
//! at which it arrives.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use policy::chase::{Chase, ChaseInput, Stage};
use policy::switchover::budget_bytes;

use super::convergence::ToCome;
use super::passes::Sweeps;
use crate::source::control::sampler::ticking;
use crate::source::control::stream_state::StreamState;

/// This many samples after the first pass follow each other quickly.
const SOON_LOOKS: u32 = 10;
/// The period whose delivered rates can be relied on.
const LATELY: Duration = Duration::from_secs(2);
/// This many sweeps after the first pass with next to nothing show that the guest dirties
/// little.
const SWEEPS_LEAST: u64 = 2;
/// A multiple of the downtime goal: longer passes don't show what is dirty.
const PASS_LONG: u32 = 2;

#[derive(Debug, Default)]
pub(super) struct Waiting {
    chase: Chase,
    looks: u32,
    /// The time before each sample, and the rates then.
    rates: VecDeque<(Duration, Rates)>,
    /// The sweeps completed when the first pass ended, and when that was; none before.
    since: Option<(u64, Instant)>,
}

/// Delivered rates, per second.
#[derive(Clone, Copy, Debug)]
struct Rates {
    /// Bodies of pages; none if unknown.
    bodies: Option<f64>,
    /// Bytes that lanes wrote.
    wire: f64,
}

/// The figures of one sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    /// Bytes dirty or in flight.
    pub(super) bytes: u64,
    /// Duration of the last pass that these bytes are based on.
    pub(super) pass: Duration,
    /// The part of the downtime that is needed without pages.
    pub(super) fixed: Duration,
    /// The guest is throttled, or about to be.
    pub(super) helped: bool,
    /// Time since the last sample.
    pub(super) elapsed: Duration,
    /// Bytes per second that lanes wrote meanwhile.
    pub(super) wire_bytes_per_s: f64,
}

impl Waiting {
    /// What QEMU has dirty after the first pass: as its passes `counted`, or else from
    /// sweeps that are small. None if it is unknown yet.
    pub(super) fn dirty(&mut self, sweeps: Sweeps, counted: Option<ToCome>) -> Option<ToCome> {
        let (then, _) = *self.since.get_or_insert_with(|| (sweeps.over, Instant::now()));
        let bytes = sweeps.last_bytes.max(sweeps.running_bytes) as f64;
        let is_known = sweeps.over >= then + SWEEPS_LEAST;
        counted.or(is_known.then_some(ToCome { bytes, pass: Duration::ZERO }))
    }

    /// Whether QEMU may stop the VM.
    pub(super) fn is_over(&mut self, state: &StreamState, left: Left) -> bool {
        self.looks = self.looks.saturating_add(1);
        let rates = Rates { bodies: state.bodies_per_s(), wire: left.wire_bytes_per_s };
        self.rates.push_back((left.elapsed, rates));
        let budget = self.reliable().map(|rate| budget_bytes(rate, state.goal(), left.fixed));
        let is_short = left.pass <= state.goal() * PASS_LONG;
        let fits = budget.is_some_and(|budget| left.bytes <= budget);
        if fits && is_short {
            return true;
        }
        let input = ChaseInput {
            left: if fits { u64::MAX } else { left.bytes },
            budget,
            pool: state.pool.out_bytes() as u64,
            bound: state.bound_bytes(),
            helped: left.helped,
        };
        self.chase = self.chase.next(input, left.elapsed);
        self.chase.stage() == Stage::Over
    }

    /// How long QEMU has been kept waiting since the first pass.
    pub(super) fn time(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |(_, at)| at.elapsed())
    }

    /// The time until the next sample.
    pub(super) fn next(&self) -> Duration {
        if self.looks < SOON_LOOKS { ticking::SOON } else { ticking::USUAL }
    }

    /// The reliable rate of bodies per second: the slowest recent one, but no more than
    /// bytes were written, because the last pages may compress less than those before.
    fn reliable(&mut self) -> Option<f64> {
        let mut since: Duration = self.rates.iter().map(|(elapsed, _)| *elapsed).sum();
        while since > LATELY
            && let Some((elapsed, _)) = self.rates.pop_front()
        {
            since -= elapsed;
        }
        let rates = || self.rates.iter().map(|(_, rates)| *rates);
        let slowest = rates().filter_map(|rates| rates.bodies).reduce(f64::min)?;
        Some(slowest.min(rates().map(|rates| rates.wire).fold(0.0, f64::max)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::Resources;
    use crate::source::control::stream_state::{HIDDEN_BYTES, Traits};

    const MB: u64 = 1_000_000;

    fn state() -> StreamState {
        let pools = Resources::new(128 << 20, Vec::new()).leaving(false).unwrap();
        let traits = Traits { hidden_bytes: HIDDEN_BYTES, told_limit: false, held: false };
        StreamState::new(&pools, Duration::from_millis(300), traits)
    }

    fn left(mb: u64) -> Left {
        Left {
            bytes: mb * MB,
            pass: Duration::from_millis(600),
            fixed: Duration::from_millis(100),
            helped: false,
            elapsed: Duration::from_millis(50),
            wire_bytes_per_s: 110e6,
        }
    }

    /// The sample at which it ends, given the megabytes left at each.
    fn ends(helped: bool, mb: impl IntoIterator<Item = u64>) -> Option<usize> {
        let (state, mut waiting) = (state(), Waiting::default());
        state.set_bodies_per_s(100e6);
        let look = |mb| waiting.is_over(&state, Left { helped, ..left(mb) });
        mb.into_iter().position(look)
    }

    #[test]
    fn waiting_ends_when_the_rest_fits_or_stops_shrinking() {
        assert_eq!(ends(false, [0]), Some(0));
        // 200 ms are 20 MB.
        assert_eq!(ends(false, [90, 60, 30, 21, 19]), Some(4));
        let given_up = ends(false, [60; 100]).unwrap();
        assert!((25..=40).contains(&given_up), "{given_up}");
        assert_eq!(ends(true, [60; 1000]), None, "the guest is throttled: it will");
    }

    #[test]
    fn long_passes_do_not_tell_what_is_dirty() {
        let (state, mut waiting) = (state(), Waiting::default());
        state.set_bodies_per_s(100e6);
        let long = Left { pass: Duration::from_millis(700), ..left(5) };
        assert!(!waiting.is_over(&state, long));
        assert!(waiting.is_over(&state, left(5)));
    }

    /// Three samples, after which 15 MB fit or don't.
    fn fits(bodies: [f64; 3], wire: [f64; 3], seconds: u64) -> bool {
        let (state, mut waiting) = (state(), Waiting::default());
        let elapsed = Duration::from_secs(seconds);
        let look = |(bodies, wire)| {
            state.set_bodies_per_s(bodies);
            let left = Left { elapsed, wire_bytes_per_s: wire, helped: true, ..left(15) };
            waiting.is_over(&state, left)
        };
        bodies.into_iter().zip(wire).map(look).last().unwrap()
    }

    #[test]
    fn recent_rates_are_relied_on() {
        assert!(fits([90e6; 3], [90e6; 3], 1));
        assert!(!fits([90e6, 50e6, 90e6], [90e6; 3], 1), "slower a second ago");
        assert!(fits([90e6, 50e6, 90e6], [90e6; 3], 3), "and before that");
        assert!(!fits([90e6; 3], [50e6; 3], 1), "it shrank");
        assert!(fits([90e6; 3], [90e6, 90e6, 0.0], 1), "nothing was left to be written");
    }

    #[test]
    fn counts_of_passes_take_precedence_over_sweeps() {
        let mut waiting = Waiting::default();
        let mut to_come = |over, last_bytes, counted| {
            let sweeps = Sweeps { over, last_bytes, running_bytes: 3 };
            waiting.dirty(sweeps, counted).map(|to_come| to_come.bytes)
        };
        // The sweep that is running when the first pass ends sends what was dirtied during
        // that pass.
        assert_eq!(to_come(1, 900, None), None);
        assert_eq!(to_come(2, 90, None), None);
        assert_eq!(to_come(3, 8, None), Some(8.0));
        assert_eq!(to_come(9, 0, None), Some(3.0));
        let counted = ToCome { bytes: 70.5, pass: Duration::from_secs(2) };
        assert_eq!(to_come(9, 0, Some(counted)), Some(70.5));
    }
}
