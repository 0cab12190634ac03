//! Messages, for a network that keeps all of them.

use switchover::journal::Side;
use switchover::{Envelope, ToDestination, ToSource};

use crate::world::id;

/// A message without its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Said {
    Go,
    Aborted,
    SourceUnknown,
    Loaded,
    Running,
    Refused,
    Lost,
    DestinationUnknown,
}

impl Said {
    pub(crate) const ALL: [Self; 8] = [
        Self::Go,
        Self::Aborted,
        Self::SourceUnknown,
        Self::Loaded,
        Self::Running,
        Self::Refused,
        Self::Lost,
        Self::DestinationUnknown,
    ];

    pub(crate) fn bit(self) -> u8 {
        1 << self as u8
    }

    /// Its receiver.
    pub(crate) fn to(self) -> Side {
        match self {
            Self::Go | Self::Aborted | Self::SourceUnknown => Side::Destination,
            _ => Side::Source,
        }
    }

    pub(crate) fn by_source(said: &ToDestination) -> Self {
        match said {
            ToDestination::Go { .. } => Self::Go,
            ToDestination::Aborted { .. } => Self::Aborted,
            ToDestination::Unknown => Self::SourceUnknown,
        }
    }

    pub(crate) fn by_destination(said: &ToSource) -> Self {
        match said {
            ToSource::Loaded => Self::Loaded,
            ToSource::Running => Self::Running,
            ToSource::Refused { .. } => Self::Refused,
            ToSource::Lost { .. } => Self::Lost,
            ToSource::Unknown => Self::DestinationUnknown,
        }
    }

    pub(crate) fn to_destination(self, run: bool) -> Envelope<ToDestination> {
        let message = match self {
            Self::Go => ToDestination::Go { run },
            Self::Aborted => ToDestination::Aborted { reason: "said".into() },
            _ => ToDestination::Unknown,
        };
        Envelope { migration: id(), message }
    }

    pub(crate) fn to_source(self) -> Envelope<ToSource> {
        let message = match self {
            Self::Loaded => ToSource::Loaded,
            Self::Running => ToSource::Running,
            Self::Refused => ToSource::Refused { reason: "said".into() },
            Self::Lost => ToSource::Lost { reason: "said".into() },
            _ => ToSource::Unknown,
        };
        Envelope { migration: id(), message }
    }
}
