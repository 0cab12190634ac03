//! Figures of a run whose guest has much page cache.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::count;

/// Length of a piece of a course.
const STEP: Duration = Duration::from_millis(100);
/// The rate must stay at [`FULL`] for this long to count as full again.
const FULL_FOR: Duration = Duration::from_millis(500);
/// Share of the earlier rate that counts as full.
const FULL: f64 = 0.95;

/// Figures of a VM whose disk is on a storage host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheFigures {
    /// Bytes on the destination's link to the storage host, in both directions, from the command
    /// until the VM runs there.
    pub san_bytes: u64,
    /// The guest's page cache just before, without dirty pages.
    pub restorable_bytes: u64,
    /// Content of pages that came from storage, by the mover's report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored_bytes: Option<u64>,
    /// Bytes that were read from storage for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_read_bytes: Option<u64>,
    /// How many of the machine's cores were busy while the VM moved, with everything that ran on
    /// the machine.
    pub cores_busy: f64,
    /// File pages that the guest read and wrote per second before.
    pub touched_before_per_s: f64,
    /// The same while it moved.
    pub touched_per_s: f64,
    /// File pages that the guest would have read and written at its earlier rate, and didn't, from
    /// the command until some seconds after it ran at the destination.
    pub pages_lost: f64,
    /// Time from the VM running at the destination until it reads as much as before, where that is
    /// measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_to_full_s: Option<f64>,
    /// File pages that the guest checked afterwards.
    pub file_pages: u64,
    /// How many of these were wrong, with those found wrong by earlier reads.
    pub file_pages_wrong: u64,
    /// What the mover did not do, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Seconds since the command, and pages per second from then on, where that is measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub course: Vec<(f64, f64)>,
}

/// Pages that a guest has read and written over time, as its beats report them.
pub(super) struct Course {
    /// Totals at instants.
    pub(super) counts: Vec<(Instant, u64)>,
    /// The guest is undisturbed from here …
    pub(super) alone: Instant,
    /// … until here, when it begins to move.
    pub(super) began: Instant,
    /// When it runs at the destination.
    pub(super) ran: Instant,
    /// End of the record.
    pub(super) end: Instant,
}

impl Course {
    fn per_s(&self, from: Instant, to: Instant) -> f64 {
        let seconds = to.saturating_duration_since(from).as_secs_f64();
        count::between(&self.counts, from, to) / seconds.max(1e-3)
    }

    pub(super) fn before_per_s(&self) -> f64 {
        self.per_s(self.alone, self.began)
    }

    pub(super) fn meanwhile_per_s(&self) -> f64 {
        self.per_s(self.began, self.ran)
    }

    pub(super) fn pages_lost(&self) -> f64 {
        let expected = self.before_per_s() * (self.end - self.began).as_secs_f64();
        expected - count::between(&self.counts, self.began, self.end)
    }

    /// None if it never reads as much as before.
    pub(super) fn back_to_full_s(&self) -> Option<f64> {
        let full = self.before_per_s() * FULL;
        let mut at = self.ran;
        while at + FULL_FOR <= self.end {
            if self.per_s(at, at + FULL_FOR) >= full {
                return Some((at - self.ran).as_secs_f64());
            }
            at += STEP / 2;
        }
        None
    }

    pub(super) fn pieces(&self) -> Vec<(f64, f64)> {
        let mut pieces = Vec::new();
        let mut at = self.alone;
        while at + STEP <= self.end {
            let since = at.saturating_duration_since(self.began).as_secs_f64()
                - self.began.saturating_duration_since(at).as_secs_f64();
            pieces.push((since, self.per_s(at, at + STEP)));
            at += STEP;
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gang::figures::GangFigures;
    use crate::result::Run;

    #[test]
    fn figures_serialize_among_the_others_of_a_run() {
        let cache =
            CacheFigures { san_bytes: 7, restored_bytes: Some(5), ..CacheFigures::default() };
        let gang = GangFigures { core_bytes: 9, ..GangFigures::default() };
        for run in [
            Run { ok: true, cache: Some(cache.clone()), ..Run::default() },
            Run { ok: true, gang: Some(gang), ..Run::default() },
            Run::default(),
        ] {
            let json = serde_json::to_value(&run).unwrap();
            assert_eq!(json.get("san_bytes").is_some(), run.cache.is_some());
            assert_eq!(serde_json::from_value::<Run>(json).unwrap(), run);
        }
    }

    /// 100 pages a second, with a pause of 2 s and then half of it for a second.
    #[test]
    fn pages_lost_and_time_back_to_full_are_computed() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let pages = |ms: u64| match ms {
            0..=4000 => ms / 10,
            4001..=6000 => 400,
            6001..=7000 => 400 + (ms - 6000) / 20,
            _ => 450 + (ms - 7000) / 10,
        };
        let counts = (0..=200).map(|nth| (at(nth * 50), pages(nth * 50))).collect();
        let course =
            Course { counts, alone: at(0), began: at(2000), ran: at(6000), end: at(10_000) };
        assert!((course.before_per_s() - 100.0).abs() < 1.0);
        assert!((course.meanwhile_per_s() - 50.0).abs() < 1.0);
        assert!((course.pages_lost() - 250.0).abs() < 2.0, "{}", course.pages_lost());
        let back_s = course.back_to_full_s().unwrap();
        assert!((0.9..=1.0).contains(&back_s), "{back_s}");
        assert_eq!(course.pieces().len(), 100);
        assert!((course.pieces()[0].0 + 2.0).abs() < 1e-6);
        let never = Course { end: at(6400), ..course };
        assert_eq!(never.back_to_full_s(), None);
    }
}
