//! What a move of a guest with much page cache came to.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::count;

/// Where a course is cut into pieces.
const STEP: Duration = Duration::from_millis(100);
/// A guest reads as before if it does so for that long.
const FULL_FOR: Duration = Duration::from_millis(500);
/// From here on it is all that it was.
const FULL: f64 = 0.95;

/// What is counted where a VM's disk is on a storage host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheFigures {
    /// Crossed the destination's link to the storage host, both ways, from the command
    /// to the VM running there.
    pub san_bytes: u64,
    /// What the guest's kernel had in its page cache just before, and not newer there
    /// than on disk.
    pub restorable_bytes: u64,
    /// Pages that came from storage, by the mover's report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored_bytes: Option<u64>,
    /// What was read there for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_read_bytes: Option<u64>,
    /// How many of the machine's cores were busy while the VM moved, with all that
    /// happens on it.
    pub cores_busy: f64,
    /// Pages of files that the guest read and wrote per second before.
    pub touched_before_per_s: f64,
    /// While it moved.
    pub touched_per_s: f64,
    /// Pages that it would have read and written by then, and did not: from the
    /// command to some seconds after it ran at the destination.
    pub pages_lost: f64,
    /// From the VM running at the destination to its reading as much as before, where
    /// that is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_to_full_s: Option<f64>,
    /// Pages of files that the guest looked at afterwards.
    pub file_pages: u64,
    /// Of these, those that were wrong, and such that it read before.
    pub file_pages_wrong: u64,
    /// What the mover did not do, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Seconds since the command, and pages per second from then on, where that is
    /// measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub course: Vec<(f64, f64)>,
}

/// What a guest has read and written, as it was heard.
pub(super) struct Course {
    /// Pages so far, at instants.
    pub(super) counts: Vec<(Instant, u64)>,
    /// It is undisturbed from here,
    pub(super) alone: Instant,
    /// to here, when it begins to move.
    pub(super) began: Instant,
    /// When it runs at the destination.
    pub(super) ran: Instant,
    /// What is known ends here.
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

    /// None if it never does.
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
    fn they_stand_among_the_other_figures_of_a_run() {
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
    fn what_a_guest_lost_and_when_it_is_back_are_seen() {
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
