//! Whether a gang begins more moves.

use api::{GangOutcome, GangReport};

use super::gang::outcome;

/// Whether a gang begins more moves.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum GangCourse {
    /// VMs move as they are admitted.
    Continues,
    /// VMs that have not moved stay.
    CalledOff {
        /// The reason of those VMs.
        why: String,
        /// The operator has cancelled it, at once or later.
        was_cancelled: bool,
    },
    /// The agent ends: migrations continue at their hosts.
    Left {
        /// Why it had been called off before. None: it had not.
        called_off: Option<String>,
    },
}

impl GangCourse {
    pub(super) fn continues(&self) -> bool {
        *self == Self::Continues
    }

    /// Why VMs that have not moved stay. None: they are not to stay.
    pub(super) fn called_off(&self) -> Option<&str> {
        match self {
            Self::Continues => None,
            Self::CalledOff { why, .. } => Some(why),
            Self::Left { called_off } => called_off.as_deref(),
        }
    }

    /// Begins no more moves, unless that was decided before. Returns whether it was not.
    pub(super) fn call_off(&mut self, why: &str) -> bool {
        let continued = self.continues();
        if continued {
            *self = Self::CalledOff { why: why.to_owned(), was_cancelled: false };
        }
        continued
    }

    /// The operator has cancelled the gang. It may have been called off before.
    pub(super) fn note_cancelled(&mut self) {
        if let Self::CalledOff { was_cancelled, .. } = self {
            *was_cancelled = true;
        }
    }

    /// Begins no more moves, because the agent ends.
    pub(super) fn leave(&mut self) {
        *self = Self::Left { called_off: self.called_off().map(str::to_owned) };
    }

    /// How a gang with this report has ended.
    pub(super) fn outcome(&self, report: &GangReport) -> GangOutcome {
        match self {
            Self::Continues => outcome(report, false),
            Self::CalledOff { was_cancelled, .. } => outcome(report, *was_cancelled),
            Self::Left { .. } => GangOutcome::Interrupted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_stays_and_a_later_cancellation_is_noted() {
        let mut course = GangCourse::Continues;
        assert!(course.call_off("a failed"));
        assert!(!course.call_off("it was cancelled"));
        course.note_cancelled();
        let why = "a failed".to_owned();
        assert_eq!(course, GangCourse::CalledOff { why, was_cancelled: true });
        course.leave();
        course.leave();
        assert_eq!(course.called_off(), Some("a failed"));
    }

    #[test]
    fn a_gang_that_was_left_is_not_called_off() {
        let mut course = GangCourse::Continues;
        course.leave();
        assert!(!course.call_off("it was cancelled"));
        course.note_cancelled();
        assert_eq!(course, GangCourse::Left { called_off: None });
        assert!(!course.continues());
    }
}
