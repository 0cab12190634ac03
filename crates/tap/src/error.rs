//! Why a tap ended before the stream did.

use std::io;

use stream::StreamError;
use stream::multifd::MultifdError;

use crate::output::Stopped;

/// An error that ends a tap. The source VM can continue after each of them.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The main stream breaks QEMU's rules, or the tap's limits.
    #[error("QEMU's stream can't be read: {0}")]
    Stream(#[from] StreamError),
    /// A multifd channel breaks QEMU's rules, or the tap's limits.
    #[error("a multifd channel of QEMU can't be read: {0}")]
    Multifd(#[from] MultifdError),
    /// A connection ended in the middle of a record.
    #[error("QEMU's stream ends in the middle of {what}; QEMU aborted the migration, see its log")]
    Truncated {
        /// What it ended in.
        what: &'static str,
    },
    /// QEMU made one connection too many, or one of an unexpected kind.
    #[error("QEMU made a connection that was not expected: {0}")]
    Connection(&'static str),
    /// QEMU ended the main channel without making all its connections.
    #[error(
        "QEMU made {connected} connections and ended the migration; it has fewer multifd channels \
         than requested"
    )]
    ChannelsMissing {
        /// Connections that it made, including the main channel.
        connected: usize,
    },
    /// The main channel and the multifd channels disagree about where epochs
    /// end, so it is unknown which of two versions of a page is newer.
    #[error(
        "QEMU's multifd channel {channel} ended {ended} rounds, with its last page in round \
         {last_page}, and the main channel ended {main}: this QEMU marks rounds in a way that is \
         not known; migrate with the classic stream"
    )]
    Rounds {
        /// The multifd channel.
        channel: u8,
        /// SYNCs on it.
        ended: u32,
        /// SYNCs before the last page on it.
        last_page: u32,
        /// Rounds on the main channel.
        main: u32,
    },
    /// The stream can't be split, and a multifd stream can't be passed through
    /// whole either.
    #[error("the stream can't be split ({0}); migrate with the classic stream")]
    Unsplittable(String),
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// The action that failed.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The tap was stopped, or its output accepts no more.
    #[error("the tap was stopped")]
    Stopped,
}

impl TapError {
    /// Whether QEMU's stream can't be split, so that the next one can't either. An error of a
    /// connection shows nothing of the kind: QEMU may have been ordered to cancel.
    #[must_use]
    pub fn is_of_stream(&self) -> bool {
        match self {
            Self::Stream(error) => !matches!(error, StreamError::EndedEarly { .. }),
            Self::Multifd(_)
            | Self::Connection(_)
            | Self::Rounds { .. }
            | Self::Unsplittable(_) => true,
            Self::Truncated { .. }
            | Self::ChannelsMissing { .. }
            | Self::Io { .. }
            | Self::Stopped => false,
        }
    }
}

impl From<Stopped> for TapError {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

impl From<page::PoolClosed> for TapError {
    fn from(_: page::PoolClosed) -> Self {
        Self::Stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_that_was_cancelled_is_told_from_a_stream_that_can_not_be_split() {
        let cancelled = StreamError::EndedEarly { place: "in a section" };
        for (error, expected) in [
            (TapError::from(MultifdError::DeviceState), true),
            (StreamError::Late(stream::Unsplittable::SectionId { section: 9 }).into(), true),
            (TapError::Unsplittable("why".to_owned()), true),
            (cancelled.into(), false),
            (TapError::Truncated { what: "a multifd packet" }, false),
            (TapError::Io { what: "reading", source: io::ErrorKind::Other.into() }, false),
            (Stopped.into(), false),
        ] {
            assert_eq!(error.is_of_stream(), expected, "{error}");
        }
    }
}
