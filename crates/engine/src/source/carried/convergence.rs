//! Throttles a carried VM that does not converge, with the same controller and cgroups as
//! for the agent's own migrations, from counts of passes.
//!
//! QEMU isn't queried. The consequence is up to libvirt, or another program that commands both
//! QEMUs.

use std::sync::Arc;
use std::time::Duration;

use api::Throttle as ThrottleOption;
use host::quota;
use policy::passes::{self, Counted};
use policy::throttle::{Decision, OnStall, Ratio, Settings, Stall, ThrottleInput, Why};

use super::passes::{Passes, Seen};
use super::process::Qemu;
use super::request::CarryRequest;
use crate::report_builder::ReportBuilder;
use crate::source::control::sampler::Shown;
use crate::source::control::throttle::{Brakes, Throttling, Vcpus, settings};

pub(super) struct Convergence {
    passes: Arc<Passes>,
    report_builder: Arc<ReportBuilder>,
    counts: passes::Passes,
    throttling: Throttling,
    /// Throttling is allowed.
    allowed: bool,
    goal: Duration,
    share: f64,
    told_stall: bool,
    began_s: f64,
}

/// Figures of the lanes and the pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flowing {
    pub(super) ram_bytes: u64,
    /// Bytes that QEMU has not yet handed over in its first pass.
    pub(super) pending_bytes: u64,
    /// Bytes in flight.
    pub(super) backlog_bytes: u64,
    pub(super) bodies_per_s: Option<f64>,
    pub(super) first_pass_over: bool,
    /// Lanes may get more of the network, at the expense of other traffic.
    pub(super) wider: bool,
}

/// The current state of convergence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Come {
    pub(super) shown: Shown,
    /// The VM is throttled, or about to be, or gets more of the network, and may converge by that.
    pub(super) helped: bool,
    /// The rate that it needs. None if it never needed more than was delivered, or is stopped.
    pub(super) needed_bytes_per_s: Option<f64>,
    /// None if unknown.
    pub(super) to_come: Option<ToCome>,
}

/// What QEMU still has dirty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ToCome {
    /// Bytes that the current pass has still to send, and bytes dirtied since it began.
    pub(super) bytes: f64,
    /// Duration of the previous pass. The guest writes some pages again and again, so it
    /// dirties more in a short time than that time's share of a longer one.
    pub(super) pass: Duration,
}

impl ToCome {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of RAM")]
    pub(super) fn whole_bytes(self) -> u64 {
        self.bytes as u64
    }
}

impl Convergence {
    pub(super) fn new(
        passes: Arc<Passes>,
        qemu: Result<Qemu, String>,
        notes: Option<quota::Notes>,
        request: &CarryRequest,
        report_builder: Arc<ReportBuilder>,
    ) -> Self {
        let vcpus = qemu.map(|qemu| Vcpus::of_threads(qemu.pid, &qemu.vcpus));
        let brakes = Brakes {
            vcpus: vcpus.inspect_err(|why| tracing::info!(why, "a VM that is carried")),
            notes,
            report_builder: Arc::clone(&report_builder),
        };
        let settings = of_request(request);
        Self {
            goal: settings.goal,
            throttling: Throttling::new(brakes, settings),
            began_s: report_builder.elapsed_s(),
            passes,
            report_builder,
            counts: passes::Passes::default(),
            allowed: request.slowing.throttle != ThrottleOption::Off,
            share: 1.0,
            told_stall: false,
        }
    }

    /// Whether QEMU has started a pass after the first.
    pub(super) fn is_later(&self) -> bool {
        self.passes.seen().pass > 1
    }

    /// Takes a sample and throttles the VM as far as necessary, but no longer once it is
    /// stopped or can't be followed.
    pub(super) fn look(&mut self, flowing: &Flowing) -> Come {
        let at_s = self.report_builder.elapsed_s();
        let seen = self.passes.seen();
        let counted = self.count(at_s, &seen, flowing);
        let left_bytes = flowing.backlog_bytes
            + if flowing.first_pass_over {
                counted.left_bytes.unwrap_or_default()
            } else {
                flowing.pending_bytes
            };
        let mut come = Come {
            shown: Shown {
                pass: seen.pass,
                ram_bytes: flowing.ram_bytes,
                left_bytes,
                dirty_bytes_per_s: counted.dirty.map_or(0.0, |dirty| dirty.bytes_per_s),
                share: 1.0,
                time_left_s: None,
                held: false,
            },
            helped: false,
            needed_bytes_per_s: None,
            to_come: self.to_come(&counted, &seen),
        };
        if self.passes.is_over() {
            self.throttling.lift();
        } else {
            let decision = self.throttling.next(ThrottleInput {
                at: Duration::from_secs_f64(at_s),
                ram_bytes: flowing.ram_bytes,
                left_bytes,
                delivered_bytes_per_s: delivered(&counted, flowing, self.goal),
                dirty_bytes_per_s: counted.dirty.map(|dirty| dirty.bytes_per_s),
                counted_at_share: Some(counted.dirty.map_or(1.0, |dirty| dirty.share)),
                pass: seen.pass,
                first_pass_over: flowing.first_pass_over,
                used_cpus: 0.0,
                wider: flowing.wider,
            });
            come.shown.share = self.throttling.share(&decision);
            let is_for_good = matches!(decision.why, Why::Nothing | Why::Unneeded);
            let can_help = self.allowed && !self.throttling.is_missing();
            let helps = decision.why == Why::Widening || can_help && !is_for_good;
            come.helped = helps && decision.stalled.is_none();
            come.needed_bytes_per_s = decision.needed_bytes_per_s;
            come.shown.time_left_s = decision.time_left.map(|time| time.as_secs_f64());
            self.tell(&decision, come.shown.share);
        }
        self.share = come.shown.share;
        come
    }

    fn to_come(&self, counted: &Counted, seen: &Seen) -> Option<ToCome> {
        let dirty = counted.dirty?;
        let now_per_s = dirty.bytes_per_s / dirty.share * self.share;
        let bytes = counted.left_bytes? as f64 + now_per_s * seen.began.elapsed().as_secs_f64();
        Some(ToCome { bytes, pass: counted.took? })
    }

    fn count(&mut self, at_s: f64, seen: &Seen, flowing: &Flowing) -> Counted {
        let ago = seen.began.elapsed();
        let at = Duration::from_secs_f64(at_s);
        // The first pass began before its first page arrived.
        let first = Duration::from_secs_f64(self.began_s);
        self.counts.next(&passes::PassesInput {
            at,
            pass: seen.pass,
            began: if seen.pass > 1 { at.saturating_sub(ago) } else { first },
            bytes_then: seen.bytes_then,
            bytes: seen.bytes,
            share: self.share,
            ram_bytes: flowing.ram_bytes,
        })
    }

    /// Notes what is not done, and why.
    fn tell(&mut self, decision: &Decision, share: f64) {
        let is_needed = matches!(decision.why, Why::Needed | Why::Floor);
        if !self.allowed && is_needed {
            self.report_builder.note(
                "the VM writes faster than its pages are delivered, and was not throttled: \
                 `throttle` is off under [carry] in the agent's file",
            );
        }
        // A VM that can't be throttled at all was noted already.
        let can_be = self.allowed && !self.throttling.is_missing();
        let is_done = can_be && share <= decision.share;
        if let Some(stall) = decision.stalled.filter(|_| is_done)
            && !std::mem::replace(&mut self.told_stall, true)
        {
            self.report_builder.note(stalled(&stall));
        }
    }
}

/// The operator's settings. A VM that may not be throttled is followed as one that keeps all
/// of its CPU time, so the report shows that it would be throttled.
fn of_request(request: &CarryRequest) -> Settings {
    let by_request = settings(request.downtime_ms, &request.slowing, Duration::ZERO);
    let ratio = if by_request.ratio == Ratio::Off { Ratio::Auto } else { by_request.ratio };
    Settings { ratio, on_stall: OnStall::Keep, ..by_request }
}

/// The rate that can be delivered. Where QEMU itself sends less, perhaps because of its
/// bandwidth limit, its passes become no shorter than at that rate. Short passes tell
/// nothing about it.
fn delivered(counted: &Counted, flowing: &Flowing, goal: Duration) -> Option<f64> {
    let by_lanes = flowing.bodies_per_s?;
    let is_much = flowing.first_pass_over
        && counted.left_bytes.is_some_and(|left| left as f64 > by_lanes * goal.as_secs_f64());
    let brought = counted.brought_bytes_per_s.filter(|rate| is_much && *rate >= 1.0);
    Some(brought.map_or(by_lanes, |brought| brought.min(by_lanes)))
}

fn stalled(stall: &Stall) -> String {
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    format!(
        "the VM does not converge: it writes {:.0} MiB/s with {:.0} % of its CPU time, and {:.0} \
         MiB/s are delivered. Allow a longer downtime (virsh migrate-setmaxdowntime), or stop the \
         VM; `throttle-floor` under [carry] in the agent's file bounds throttling",
        mib(stall.dirty_bytes_per_s),
        stall.share * 100.0,
        mib(stall.delivered_bytes_per_s),
    )
}

#[cfg(test)]
mod tests {
    use api::Slowing;

    use super::*;

    #[test]
    fn a_carried_vm_is_never_given_up_and_not_throttled_if_off() {
        let of = |throttle| {
            let slowing = Slowing { throttle, floor: 0.1, ..Slowing::default() };
            let settings = of_request(&CarryRequest { slowing, ..CarryRequest::default() });
            assert_eq!(settings.on_stall, OnStall::Keep);
            (settings.ratio, settings.floor)
        };
        assert_eq!(of(ThrottleOption::Auto), (Ratio::Auto, 0.1));
        assert_eq!(of(ThrottleOption::Ratio(0.6)), (Ratio::Constant(0.6), 0.1));
        assert_eq!(of(ThrottleOption::Off), (Ratio::Auto, 1.0));
    }

    #[test]
    fn a_qemu_slower_than_the_lanes_sets_the_rate() {
        let goal = Duration::from_millis(300);
        let of = |lanes, brought, left_bytes, first_pass_over| {
            let counted =
                Counted { left_bytes, brought_bytes_per_s: brought, ..Counted::default() };
            let flowing = Flowing {
                ram_bytes: 1 << 30,
                pending_bytes: 0,
                backlog_bytes: 0,
                bodies_per_s: lanes,
                first_pass_over,
                wider: false,
            };
            delivered(&counted, &flowing, goal)
        };
        let (lanes, much) = (Some(100e6), Some(200_000_000));
        assert_eq!(of(None, Some(30e6), much, true), None);
        assert_eq!(of(lanes, Some(30e6), much, true), Some(30e6));
        assert_eq!(of(lanes, Some(130e6), much, true), lanes);
        for (brought, left, later) in [
            (None, much, true),
            (Some(30e6), Some(20_000_000), true),
            (Some(30e6), None, true),
            (Some(30e6), much, false),
            // It has sent nothing, and the remainder is a guess.
            (Some(0.0), much, true),
        ] {
            assert_eq!(of(lanes, brought, left, later), lanes, "{brought:?} {left:?} {later}");
        }
    }
}
