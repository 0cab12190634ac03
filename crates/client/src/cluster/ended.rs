//! An ended migration, as a row of the history.

use api::{GangReport, MoveReport, MoveState, Outcome, Report};
use report::{Tone, full_stop};

/// A migration that has ended, or a VM of a gang that has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ended {
    /// Its id. Empty for a VM of a gang that never started to move.
    pub id: String,
    /// The agent that has its report, if there is a direct connection to it.
    pub agent: Option<usize>,
    /// The VM.
    pub vm: String,
    /// Its host before.
    pub from: String,
    /// Its destination.
    pub to: String,
    /// When it ended. For a VM of a gang, the end of the gang.
    pub ended_unix_s: u64,
    /// How long it took, if that is known.
    pub total_s: Option<f64>,
    /// The downtime; none if the VM did not move, or it is not known.
    pub downtime_ms: Option<f64>,
    /// What crossed the network, if that is known.
    pub wire_bytes: Option<u64>,
    /// How it ended.
    pub result: EndedAs,
    /// The gang that it was part of.
    pub gang: Option<String>,
}

/// How a migration ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum EndedAs {
    /// The VM is at the destination.
    Done,
    /// The VM stayed, for this reason.
    Failed(String),
    /// The VM may be at either host, for this reason.
    InDoubt(String),
    /// It was cancelled.
    #[default]
    Cancelled,
}

impl EndedAs {
    /// In a few words.
    #[must_use]
    pub fn described(&self) -> (&'static str, Tone) {
        match self {
            Self::Done => ("moved", Tone::Good),
            Self::Failed(_) => ("failed", Tone::Bad),
            Self::InDoubt(_) => ("in doubt", Tone::Bad),
            Self::Cancelled => ("cancelled", Tone::Calm),
        }
    }
}

impl Ended {
    pub(super) fn of_report(report: &Report, agent: usize) -> Self {
        Self {
            id: report.id.clone(),
            agent: Some(agent),
            vm: report.vm.clone(),
            from: report.from.clone(),
            to: report.to.clone(),
            ended_unix_s: end_unix_s(report.started_unix_s, report.total_s),
            total_s: Some(report.total_s),
            downtime_ms: report.downtime_ms,
            wire_bytes: Some(report.wire_bytes),
            result: match &report.outcome {
                Outcome::Done => EndedAs::Done,
                Outcome::Failed(why) if report.in_doubt => EndedAs::InDoubt(full_stop(why)),
                Outcome::Failed(why) => EndedAs::Failed(full_stop(why)),
                Outcome::Cancelled => EndedAs::Cancelled,
            },
            gang: None,
        }
    }

    pub(super) fn of_gang(gang: &GangReport) -> impl Iterator<Item = Self> {
        gang.moves.iter().filter_map(|one| Self::of_move(gang, one))
    }

    /// A move of a gang; none if it has not ended. Of a gang that was interrupted, moves continue.
    fn of_move(gang: &GangReport, one: &MoveReport) -> Option<Self> {
        let figures = one.figures.as_ref();
        let reason = || full_stop(one.reason.as_deref().unwrap_or("no reason is known"));
        let result = match one.state {
            MoveState::Waiting | MoveState::Moving => return None,
            MoveState::Done => EndedAs::Done,
            MoveState::Failed if one.in_doubt => EndedAs::InDoubt(reason()),
            MoveState::Failed => EndedAs::Failed(reason()),
            MoveState::Cancelled => EndedAs::Cancelled,
        };
        Some(Self {
            id: one.migration.clone().unwrap_or_default(),
            agent: None,
            vm: one.vm.clone(),
            from: one.from.clone(),
            to: one.to.clone(),
            ended_unix_s: end_unix_s(gang.started_unix_s, gang.total_s),
            total_s: figures.map(|figures| figures.total_s),
            downtime_ms: figures.and_then(|figures| figures.downtime_ms),
            wire_bytes: figures.map(|figures| figures.wire_bytes),
            result,
            gang: Some(gang.id.clone()),
        })
    }
}

fn end_unix_s(started_unix_s: u64, total_s: f64) -> u64 {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
    let total = total_s.round() as u64;
    started_unix_s.saturating_add(total)
}
