//! One VM in simulated time: its phase, and the queue for its lane.

use std::collections::VecDeque;

use policy::gang::is_landing;

use super::links::Way;
use super::pace::Pace;
use super::trace::TracedVm;

/// A VM that still doesn't fit after so many passes is stopped all the same.
pub(super) const PASSES_MAX: u32 = 30;

/// The phase of a VM's move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    Waiting,
    Preparing {
        until_s: f64,
        /// CPU time until its QEMU has started.
        work_s: f64,
    },
    /// It sends its memory, or what it has written since the last pass.
    Passing {
        began_s: f64,
        pass: u32,
    },
    /// It is stopped, and the rest is sent.
    Stopped,
    Loading {
        until_s: f64,
    },
    Over,
}

/// Bytes that wait for their lane.
pub(super) struct Parcel {
    pub(super) left_bytes: f64,
    /// Content of a page, unless it was only written again.
    pub(super) content: Option<u64>,
}

pub(super) struct Vm {
    pub(super) name: String,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) way: Way,
    pub(super) phase: Phase,
    /// The next grain that QEMU hands over.
    pub(super) next: usize,
    pub(super) queue: VecDeque<Parcel>,
    pub(super) queued_bytes: f64,
    /// Grains that arrive from other targets or by other VMs.
    pub(super) pending: u64,
    pub(super) sent_bytes: f64,
    pub(super) rate: f64,
    pub(super) landing: bool,
}

impl Vm {
    pub(super) fn push(&mut self, bytes: f64, content: Option<u64>) {
        self.queued_bytes += bytes;
        self.queue.push_back(Parcel { left_bytes: bytes, content });
    }

    /// Buffers hold whole pages, even if these are few bytes on the wire.
    pub(super) fn queued_grains(&self) -> usize {
        self.queue.iter().filter(|parcel| parcel.content.is_some()).count()
    }

    /// Continues the move. Returns whether others may begin because of that.
    pub(super) fn go_on(
        &mut self,
        traced: &TracedVm,
        now_s: f64,
        pace: &Pace,
        grain_bytes: f64,
    ) -> bool {
        match self.phase {
            Phase::Waiting | Phase::Over => false,
            Phase::Preparing { until_s, work_s } => {
                if until_s <= now_s && work_s <= 0.0 {
                    self.phase = Phase::Passing { began_s: now_s, pass: 1 };
                }
                false
            }
            Phase::Passing { began_s, pass } => {
                let is_swept = self.next == traced.contents.len() && self.queue.is_empty();
                if is_swept && self.pending == 0 {
                    self.next_pass(traced, now_s, began_s, pass, pace);
                }
                let left_bytes =
                    (traced.contents.len() - self.next) as f64 * grain_bytes + self.queued_bytes;
                let lands = is_landing(false, (self.rate > 0.0).then(|| left_bytes / self.rate));
                let news = lands && !self.landing;
                self.landing |= lands;
                news
            }
            Phase::Stopped => {
                if self.queue.is_empty() {
                    self.phase = Phase::Loading { until_s: now_s + pace.switchover_s };
                }
                false
            }
            Phase::Loading { until_s } => {
                let is_over = until_s <= now_s;
                if is_over {
                    self.phase = Phase::Over;
                }
                is_over
            }
        }
    }

    /// Queues what was written meanwhile, for one more pass or as the last.
    fn next_pass(&mut self, traced: &TracedVm, now_s: f64, began_s: f64, pass: u32, pace: &Pace) {
        let passed_s = now_s - began_s;
        let written = traced.dirty_bytes_per_s as f64 * passed_s;
        let dirty = written.min(traced.working_set_bytes as f64);
        let fits = dirty <= self.rate * pace.goal_s || pass >= PASSES_MAX;
        if dirty > 0.0 {
            self.push(dirty, None);
        }
        self.phase =
            if fits { Phase::Stopped } else { Phase::Passing { began_s: now_s, pass: pass + 1 } };
    }
}

/// Takes up to `bytes` off a line. Returns the bytes taken, and the contents that are complete.
pub(super) fn take(line: &mut VecDeque<Parcel>, mut bytes: f64) -> (f64, Vec<u64>) {
    let (mut taken, mut through) = (0.0, Vec::new());
    while let Some(first) = line.front_mut() {
        if bytes < first.left_bytes {
            first.left_bytes -= bytes;
            return (taken + bytes, through);
        }
        bytes -= first.left_bytes;
        taken += first.left_bytes;
        through.extend(first.content);
        line.pop_front();
    }
    (taken, through)
}
