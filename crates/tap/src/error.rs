//! Why a tap ended before the stream did.

use std::io;

use stream::StreamError;
use stream::multifd::MultifdError;

use crate::output::Stopped;

/// What ends a tap. The source VM can go on after each of them.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The main stream breaks QEMU's rules, or ours.
    #[error("QEMU's stream can't be read: {0}")]
    Stream(#[from] StreamError),
    /// A multifd channel does.
    #[error("a multifd channel of QEMU can't be read: {0}")]
    Multifd(#[from] MultifdError),
    /// A connection ended in the middle of something.
    #[error("QEMU's stream ends in the middle of {what}; QEMU broke off, its log says why")]
    Truncated {
        /// Of what.
        what: &'static str,
    },
    /// QEMU made a connection too many, or one of a kind not asked for.
    #[error("QEMU made a connection that was not expected: {0}")]
    Connection(&'static str),
    /// The stream can't be split, and by its channels it can't be passed on
    /// whole either.
    #[error("the stream can't be split ({0}); migrate with the classic stream")]
    Unsplittable(String),
    /// The system failed us.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The tap was stopped, or nobody takes its output any more.
    #[error("the tap was stopped")]
    Stopped,
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
