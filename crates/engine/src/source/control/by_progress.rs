//! Decides by QEMU's own progress, after each sample: the hold, throttling, and when QEMU may stop
//! the VM.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crossbeam_channel::Sender;
use page::PAGE_BYTES;
use policy::chase::{Chase, ChaseInput, Stage};
use policy::hold::{Hold, HoldInput};
use policy::switchover::{
    Allowance, FinishInput, accepted, allowance, budget_bytes, predicted_blackout,
};
use policy::throttle::{Stall, Step, ThrottleInput, Why};
use qemu::outgoing::{Outgoing, Progress};

use super::sampler::ticking::{self, Ticking};
use super::sampler::window::Window;
use super::sampler::{Sampler, Shown};
use super::throttle::Throttling;
use super::whole::{DEVICES_WAIT, Patience};
use crate::source::notice::Notice;

/// This many samples after the first pass follow each other quickly.
const SOON_LOOKS: u32 = 10;
/// Data that is delivered within this time is not waited for before the VM is stopped.
const IN_FLIGHT: Duration = Duration::from_millis(10);
/// The remainder is shrinking while it is at most this fraction of what it was.
const LESS: f64 = 0.9;
/// A held pass begins after this time unless it is held again.
const HOLD: Duration = Duration::from_millis(300);

pub(crate) struct Watched {
    pub(crate) sampler: Sampler,
    pub(crate) qemu: Arc<Outgoing>,
    pub(crate) tap: tap::Stopper,
    /// Memory that the VM has used, with what QEMU itself uses; none if unknown.
    pub(crate) used_bytes: Option<u64>,
    /// Downtime without pages, as last measured.
    pub(crate) fixed: Duration,
    /// The operator's bound on the downtime.
    pub(crate) blackout_max: Option<Duration>,
    /// Whether the VM is stopped for its switchover.
    pub(crate) stands_still: Arc<AtomicBool>,
    pub(crate) throttling: Throttling,
    /// The channel for the notice that the VM does not converge.
    pub(crate) notices: Sender<Notice>,
}

/// Starts the sampler.
pub(crate) fn start(watched: Watched) -> std::io::Result<Ticking> {
    let (guard, passes) = (watched.sampler.lanes.guard(), watched.qemu.passes());
    let mut deciding = Deciding::new(watched);
    // Dropping it, at the thread's end, ends throttling.
    Ticking::start(guard, passes, move || {
        deciding.sample();
        deciding.next()
    })
}

struct Deciding {
    watched: Watched,
    hold: Hold,
    /// QEMU's next pass is held.
    held: bool,
    allowed: Option<Allowance>,
    /// None if QEMU can't be held.
    chase: Option<Chase>,
    /// Quick samples since the first pass, and the remainder at the last of them.
    soon: u32,
    left_bytes: u64,
    dirty_bytes_per_s: f64,
    /// The share of its CPU time that the VM keeps.
    share: f64,
    /// The guest is throttled, or may soon be.
    helped: bool,
    /// The end of a VM that does not converge was decided.
    ended: bool,
    patience: Patience,
}

impl Deciding {
    fn new(watched: Watched) -> Self {
        let chase = watched.qemu.is_held().then(Chase::default);
        Self {
            chase,
            watched,
            hold: Hold::default(),
            held: false,
            allowed: None,
            soon: 0,
            left_bytes: u64::MAX,
            dirty_bytes_per_s: 0.0,
            share: 1.0,
            helped: false,
            ended: false,
            patience: Patience::default(),
        }
    }

    fn sample(&mut self) {
        let Some(window) = self.watched.sampler.look() else { return };
        if self.watched.stands_still.load(Relaxed) {
            self.watched.throttling.lift();
            self.share = 1.0;
        } else {
            self.watched.throttling.permit();
        }
        // A QEMU that is stopping the VM may not answer; no figure is lost.
        if let Ok(qemu) = self.watched.qemu.progress() {
            self.follow_qemu(&qemu, &window);
        }
    }

    /// The time until the next sample: a VM with little left is stopped as soon as the pool's
    /// content is delivered.
    fn next(&mut self) -> Duration {
        let is_first_pass = !self.watched.sampler.state.first_pass_over.load(Relaxed);
        match self.chase.map(Chase::stage) {
            Some(Stage::Draining) => ticking::SOON,
            Some(Stage::Chasing) if !is_first_pass && self.soon < SOON_LOOKS => {
                self.soon += 1;
                ticking::SOON
            }
            _ => ticking::USUAL,
        }
    }

    fn follow_qemu(&mut self, qemu: &Progress, window: &Window) {
        let sampler = &self.watched.sampler;
        if qemu.dirty_sync_count >= 2 && sampler.end_first_pass() {
            // By QEMU's own count, because some of it may still be in flight to the tap.
            let handed_over = (qemu.normal_pages + qemu.fill_pages) * PAGE_BYTES as u64;
            let free_bytes = qemu.total_bytes.saturating_sub(handed_over);
            sampler.report_builder.update(|report| report.free_bytes = free_bytes);
        }
        self.dirty_bytes_per_s = qemu.dirty_bytes_per_s as f64;
        let left_bytes = qemu.remaining_bytes + sampler.delivered().backlog_bytes;
        let to_send_bytes = self.to_send_bytes(left_bytes);
        self.hold(window.elapsed);
        self.throttle(qemu, to_send_bytes);
        let stage = self.chase(left_bytes, window.elapsed);
        if stage != Stage::Chasing {
            self.allow();
        }
        if stage == Stage::Over && self.ends_naming() {
            self.watched.tap.let_stop();
        }
        self.note_devices(left_bytes, window.elapsed);
        let Watched { sampler, fixed, .. } = &self.watched;
        if let Some(rate) = sampler.state.bodies_per_s() {
            let blackout = predicted_blackout(left_bytes, rate, *fixed);
            sampler.report_builder.update(|report| {
                report.predicted_downtime_ms = Some(blackout.as_secs_f64() * 1e3);
                report.passes = qemu.dirty_sync_count;
            });
        }
        self.show(qemu, window, left_bytes, to_send_bytes);
    }

    /// What is left without the memory that the VM has never used: it takes next to no time.
    fn to_send_bytes(&self, left_bytes: u64) -> u64 {
        let Watched { sampler: Sampler { state, .. }, used_bytes, .. } = &self.watched;
        if state.first_pass_over.load(Relaxed) {
            return left_bytes;
        }
        let (taken_bytes, _) = state.taken();
        let backlog_bytes = self.watched.sampler.delivered().backlog_bytes;
        used_part(left_bytes, *used_bytes, taken_bytes, backlog_bytes)
    }

    /// Holds QEMU's next pass while the destination awaits content from other providers.
    fn hold(&mut self, elapsed: Duration) {
        let Sampler { state, .. } = &self.watched.sampler;
        if !state.first_pass_over.load(Relaxed) {
            return;
        }
        let held = self.hold.next(HoldInput {
            pending_bytes: self.watched.sampler.delivered().awaited_bytes,
            elapsed,
            age: state.pass_age(),
            dirty_bytes_per_s: Some(self.dirty_bytes_per_s).filter(|rate| *rate > 0.0),
            delivered_bytes_per_s: state.bodies_per_s(),
        });
        state.hold(held.then_some(HOLD));
        self.held = held;
    }

    /// Throttles the guest as far as necessary, and ends a migration that can't converge.
    fn throttle(&mut self, qemu: &Progress, left_bytes: u64) {
        let Watched { sampler, throttling, notices, blackout_max, .. } = &mut self.watched;
        let Sampler { state, report_builder, .. } = &*sampler;
        let at = Duration::from_secs_f64(report_builder.elapsed_s());
        let over = state.first_pass_over.load(Relaxed) && state.disks_ready.load(Relaxed);
        let decision = throttling.next(ThrottleInput {
            at,
            ram_bytes: qemu.total_bytes,
            // The guest is not throttled for pages that other providers send.
            left_bytes: left_bytes - sampler.delivered().awaited_bytes,
            delivered_bytes_per_s: state.bodies_per_s(),
            dirty_bytes_per_s: Some(self.dirty_bytes_per_s).filter(|rate| *rate > 0.0),
            counted_at_share: None,
            pass: qemu.dirty_sync_count,
            // A held QEMU yields no information.
            first_pass_over: over && !self.held,
            used_cpus: 0.0,
            wider: state.bandwidth.is_wider(),
        });
        sampler.need(decision.needed_bytes_per_s);
        self.share = throttling.share(&decision);
        self.helped = decision.why.helps(left_bytes, state.bodies_per_s());
        // A pass that ends at once shows the guest's dirty rate.
        let unknown = decision.full_dirty_bytes_per_s.is_none() || decision.why == Why::Looking;
        state.set_learning(self.helped && unknown);
        if self.ended {
            return;
        }
        match decision.step {
            Step::Go => {}
            Step::Finish => {
                let blackout = decision.predicted_blackout.unwrap_or_default();
                match (accepted(blackout, *blackout_max), *blackout_max) {
                    (None, Some(max)) => {
                        let _ = notices.send(Notice::Stalled(too_long(blackout, max)));
                    }
                    (longer, _) => {
                        state.accept(longer.unwrap_or(blackout));
                        report_builder
                            .note("the VM does not converge: a longer downtime was accepted");
                    }
                }
                self.ended = true;
            }
            Step::GiveUp(stall) => {
                let goal = state.goal();
                let _ = notices.send(Notice::Stalled(stalled(&stall, goal)));
                self.ended = true;
            }
        }
    }

    /// Chases the guest with QEMU's passes, if QEMU can be held meanwhile.
    fn chase(&mut self, left: u64, elapsed: Duration) -> Stage {
        let Watched { sampler, fixed, .. } = &self.watched;
        let Sampler { state, by_name, .. } = sampler;
        let Some(chase) = &mut self.chase else { return Stage::Over };
        if sampler.delivered().awaited_bytes > 0 {
            // The VM would be stopped while the destination waits for that content.
            return Stage::Chasing;
        }
        if !state.disks_ready.load(Relaxed) || !state.first_pass_over.load(Relaxed) {
            return Stage::Chasing;
        }
        if by_name.as_ref().is_some_and(|by_name| by_name.is_querying()) {
            // The destination may have to wait for that content, too.
            return Stage::Chasing;
        }
        let before = std::mem::replace(&mut self.left_bytes, left);
        let waits = state.bodies_per_s().is_some_and(|rate| {
            let is_much = left as f64 > rate * IN_FLIGHT.as_secs_f64();
            is_much && left as f64 <= before as f64 * LESS
        });
        if waits && self.soon < SOON_LOOKS {
            // What the first pass still has in flight would add to the downtime.
            return Stage::Chasing;
        }
        *chase = chase.next(
            ChaseInput {
                left,
                budget: state.bodies_per_s().map(|rate| budget_bytes(rate, state.goal(), *fixed)),
                pool: state.pool.out_bytes() as u64,
                bound: state.bound_bytes(),
                helped: self.helped && !self.ended,
            },
            elapsed,
        );
        let stage = chase.stage();
        if stage != Stage::Chasing {
            state.end_chase();
            state.adjust_pool();
        }
        stage
    }

    /// Whether the VM may be stopped as far as pages by name are concerned: none is named any more,
    /// and the destination awaits none. A QEMU that can't be held stops it in any case.
    fn ends_naming(&self) -> bool {
        let by_name = self.watched.sampler.by_name.as_ref().filter(|_| self.chase.is_some());
        by_name.is_none_or(|by_name| by_name.end_naming())
    }

    /// Sets QEMU's threshold, once there is one.
    fn allow(&mut self) {
        let Watched { sampler: Sampler { state, .. }, qemu, fixed, .. } = &self.watched;
        let allowed = allowance(FinishInput {
            first_pass_over: state.first_pass_over.load(Relaxed),
            bodies_per_s: state.bodies_per_s(),
            goal: state.goal(),
            fixed: *fixed,
            backlog_bytes: state.limit_bytes(),
            exact: qemu.takes_bandwidth(),
        });
        if let Some(allowed) = allowed
            && self.allowed.is_none_or(|before| differs(before, allowed))
            && qemu.allow(allowed.bytes_per_s, allowed.downtime_ms).is_ok()
        {
            self.allowed = Some(allowed);
        }
    }

    /// Notes that QEMU waits for more than memory.
    fn note_devices(&mut self, left_bytes: u64, elapsed: Duration) {
        let Watched { sampler, stands_still, .. } = &self.watched;
        let waits = sampler.state.whole.written().is_some() && !stands_still.load(Relaxed);
        if self.patience.is_over(self.allowed.filter(|_| waits), left_bytes, elapsed) {
            sampler.report_builder.note(DEVICES_WAIT);
        }
    }

    fn show(&self, qemu: &Progress, window: &Window, left_bytes: u64, to_send_bytes: u64) {
        let Watched { sampler, .. } = &self.watched;
        let gain = sampler.state.bodies_per_s().map(|rate| rate - self.dirty_bytes_per_s);
        let gain = gain.filter(|gain| *gain > 0.0);
        sampler.show(
            window,
            &Shown {
                pass: qemu.dirty_sync_count,
                ram_bytes: qemu.total_bytes,
                left_bytes,
                dirty_bytes_per_s: self.dirty_bytes_per_s,
                share: self.share,
                time_left_s: gain.map(|gain| to_send_bytes as f64 / gain),
                held: sampler.state.bound_bytes() < sampler.state.pool_bytes,
            },
        );
    }
}

/// The reason for giving up a VM that does not converge, with the figures to decide by.
fn stalled(stall: &Stall, goal: Duration) -> String {
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    format!(
        "the VM writes {:.0} MiB/s with {:.0} % of its CPU time, {:.0} MiB/s are delivered, and \
         {:.0} MiB are left: downtime would be {} ms, and {} ms are allowed. Throttle it further \
         (--throttle-floor), allow a longer downtime (--downtime-ms, or --on-stall stop), or give \
         the migration more of the network",
        mib(stall.dirty_bytes_per_s),
        stall.share * 100.0,
        mib(stall.delivered_bytes_per_s),
        mib(stall.left_bytes as f64),
        stall.predicted_blackout.as_millis(),
        goal.as_millis(),
    )
}

/// The reason why a VM that does not converge is not stopped either.
fn too_long(blackout: Duration, max: Duration) -> String {
    format!(
        "the VM does not converge, and if it were stopped now downtime would be {} ms, or a little \
         more; its move would be taken back after {} s (--blackout-max)",
        blackout.as_millis(),
        max.as_secs(),
    )
}

/// Of `left_bytes` in the first pass, those that count: a VM that has used `used_bytes`, of which
/// `taken_bytes` left QEMU already, has no more to send than the rest and what is in flight.
fn used_part(left: u64, used: Option<u64>, taken: u64, backlog: u64) -> u64 {
    used.map_or(left, |used| left.min(used.saturating_sub(taken).saturating_add(backlog)))
}

/// Whether the difference, a twentieth, is worth another command to QEMU.
fn differs(before: Allowance, now: Allowance) -> bool {
    let far = |a: u64, b: u64| a.abs_diff(b) * 20 > a;
    far(before.bytes_per_s, now.bytes_per_s) || far(before.downtime_ms, now.downtime_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_the_vm_never_used_is_not_left_to_be_sent() {
        const GIB: u64 = 1 << 30;
        for (left, used, taken, backlog, expected) in [
            (60 * GIB, Some(4 * GIB), GIB, 0, 3 * GIB),
            (60 * GIB, Some(4 * GIB), 2 * GIB, GIB, 3 * GIB),
            (2 * GIB, Some(4 * GIB), GIB, 0, 2 * GIB),
            // It uses more meanwhile.
            (9 * GIB, Some(4 * GIB), 5 * GIB, GIB, GIB),
            (60 * GIB, None, GIB, 0, 60 * GIB),
        ] {
            assert_eq!(used_part(left, used, taken, backlog), expected, "{left} {taken} {backlog}");
        }
    }
}
