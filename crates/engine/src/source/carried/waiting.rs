//! How long a QEMU that waits for the destination's word is kept waiting.
//!
//! QEMU would stop the VM by itself once what is dirty takes no longer than its downtime
//! limit, at the rate at which its sockets took bytes of late: more than arrived. So it gets
//! the word when what is left fits the downtime goal at the rate at which it arrives.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use policy::chase::{Chase, Look, Stage};
use policy::switchover::budget_bytes;

use super::convergence::ToCome;
use super::passes::Sweeps;
use crate::source::control::sampler::ticking;
use crate::source::control::stream_state::StreamState;

/// So many looks after the first pass come soon after one another.
const SOON_LOOKS: u32 = 10;
/// What was delivered in this time says what can be relied on.
const LATELY: Duration = Duration::from_secs(2);
/// So many sweeps after the first pass that bring next to nothing say that the guest
/// dirties little.
const SWEEPS_LEAST: u64 = 2;
/// As a multiple of the downtime goal: longer passes don't say what is dirty.
const PASS_LONG: u32 = 2;

#[derive(Debug, Default)]
pub(super) struct Waiting {
    chase: Chase,
    looks: u32,
    /// What time was before each look, and the rates then.
    rates: VecDeque<(Duration, Rates)>,
    /// How many sweeps were over with the first pass, and when; none before.
    since: Option<(u64, Instant)>,
}

/// What was delivered a second.
#[derive(Clone, Copy, Debug)]
struct Rates {
    /// Bodies of pages; none if that is not known.
    bodies: Option<f64>,
    /// What lanes wrote.
    wire: f64,
}

/// What is known at a look.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    /// Dirty or in flight.
    pub(super) bytes: u64,
    /// How long the last pass took by which this is known.
    pub(super) pass: Duration,
    /// What downtime takes without pages.
    pub(super) fixed: Duration,
    /// The guest is throttled, or about to be.
    pub(super) helped: bool,
    /// Since the last look.
    pub(super) elapsed: Duration,
    /// What lanes wrote meanwhile, per second.
    pub(super) wire_bytes_per_s: f64,
}

impl Waiting {
    /// What QEMU has dirty, after the first pass: by what its passes `counted`, or else
    /// because they bring little. None if it can't be told yet.
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
        let look = Look {
            left: if fits { u64::MAX } else { left.bytes },
            budget,
            pool: state.pool.out_bytes() as u64,
            bound: state.bound_bytes(),
            helped: left.helped,
        };
        self.chase = self.chase.next(look, left.elapsed);
        self.chase.stage() == Stage::Over
    }

    /// How long it has been kept waiting since the first pass.
    pub(super) fn time(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |(_, at)| at.elapsed())
    }

    /// When to look again.
    pub(super) fn next(&self) -> Duration {
        if self.looks < SOON_LOOKS { ticking::SOON } else { ticking::USUAL }
    }

    /// Bodies a second: as slow as they were of late, and not more than bytes were written.
    /// What is sent last may shrink less than what was sent before.
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
    use crate::source::control::stream_state::Traits;

    const MB: u64 = 1_000_000;

    fn state() -> StreamState {
        let pools = Resources::new(128 << 20).leaving(false).unwrap();
        let traits =
            Traits { told_bandwidth: false, told_limit: false, held: false, sectioned: false };
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

    /// The look at which it ends, of those with so many megabytes left.
    fn ends(helped: bool, mb: impl IntoIterator<Item = u64>) -> Option<usize> {
        let (state, mut waiting) = (state(), Waiting::default());
        state.set_bodies_per_s(100e6);
        let look = |mb| waiting.is_over(&state, Left { helped, ..left(mb) });
        mb.into_iter().position(look)
    }

    #[test]
    fn it_ends_when_what_is_left_fits_or_becomes_no_less() {
        assert_eq!(ends(false, [0]), Some(0));
        // 200 ms are 20 MB.
        assert_eq!(ends(false, [90, 60, 30, 21, 19]), Some(4));
        let given_up = ends(false, [60; 100]).unwrap();
        assert!((25..=40).contains(&given_up), "{given_up}");
        assert_eq!(ends(true, [60; 1000]), None, "the guest is throttled: it will");
    }

    #[test]
    fn long_passes_do_not_say_what_is_dirty() {
        let (state, mut waiting) = (state(), Waiting::default());
        state.set_bodies_per_s(100e6);
        let long = Left { pass: Duration::from_millis(700), ..left(5) };
        assert!(!waiting.is_over(&state, long));
        assert!(waiting.is_over(&state, left(5)));
    }

    /// Three looks, after which 15 MB fit or don't.
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
    fn what_was_delivered_of_late_is_relied_on() {
        assert!(fits([90e6; 3], [90e6; 3], 1));
        assert!(!fits([90e6, 50e6, 90e6], [90e6; 3], 1), "slower a second ago");
        assert!(fits([90e6, 50e6, 90e6], [90e6; 3], 3), "and before that");
        assert!(!fits([90e6; 3], [50e6; 3], 1), "it shrank");
        assert!(fits([90e6; 3], [90e6, 90e6, 0.0], 1), "nothing was left to be written");
    }

    #[test]
    fn what_passes_count_is_to_come_and_else_what_sweeps_bring() {
        let mut waiting = Waiting::default();
        let mut to_come = |over, last_bytes, counted| {
            let sweeps = Sweeps { over, last_bytes, running_bytes: 3 };
            waiting.dirty(sweeps, counted).map(|to_come| to_come.bytes)
        };
        // The sweep that runs when the first pass ends brings what was dirtied in that.
        assert_eq!(to_come(1, 900, None), None);
        assert_eq!(to_come(2, 90, None), None);
        assert_eq!(to_come(3, 8, None), Some(8.0));
        assert_eq!(to_come(9, 0, None), Some(3.0));
        let counted = ToCome { bytes: 70.5, pass: Duration::from_secs(2) };
        assert_eq!(to_come(9, 0, Some(counted)), Some(70.5));
    }
}
