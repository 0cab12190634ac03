//! Sends a question to another agent, on a connection of its own.

use std::time::{Duration, Instant};

use transport::{Endpoint, LaneError, connect};
use wire::examine::{Answer, Question};
use wire::{Frame, Kind, Reply, ToDestination, ToSource, WireError, read_frame, read_message};

use crate::host::{Local, Peer, lane_endpoint};

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Examined {
    /// The answer.
    pub answer: Answer,
    /// The round trip, without connecting.
    pub took: Duration,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ExamineError {
    /// The agent isn't there, or doesn't accept the connection.
    #[error(transparent)]
    Connect(#[from] LaneError),
    /// The connection broke, or the peer violated the protocol.
    #[error(transparent)]
    Broken(#[from] WireError),
    /// The peer closed the connection.
    #[error("it closes the connection: its version may not support this query")]
    HungUp,
    /// The peer refuses to answer.
    #[error("it refuses: {0}")]
    Refused(String),
    /// The peer sent another message.
    #[error("it sent another answer than expected")]
    OutOfTurn,
}

impl ExamineError {
    /// Whether the agent may take a connection in a moment.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Connect(error) if error.may_pass())
    }

    /// Whether the agent answers that it is busy.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Connect(LaneError::Turned { reply: Reply::Busy, .. }))
    }
}

/// Asks the agent of the host `peer` at `endpoint`.
///
/// # Errors
/// If there is no answer `within` that time.
pub fn examine(
    local: &Local,
    peer: &str,
    endpoint: Endpoint,
    question: Question,
    within: Duration,
) -> Result<Examined, ExamineError> {
    tracing::debug!(peer, route = %endpoint, "querying");
    let mut stream = connect(endpoint, peer, &local.security, Kind::Control)?;
    stream.set_write_timeout(Some(within)).map_err(WireError::from)?;
    let asked = Instant::now();
    stream.set_read_deadline(Some(asked + within)).map_err(WireError::from)?;
    Frame::message(&ToDestination::Examine { question: question.into() })?.write_to(&mut stream)?;
    let frame = read_frame(&mut stream)?.ok_or(ExamineError::HungUp)?;
    let took = asked.elapsed();
    let Frame::Message(json) = frame else { return Err(ExamineError::OutOfTurn) };
    match read_message(&json)? {
        ToSource::Examined { answer } => Ok(Examined { answer, took }),
        ToSource::Refused { reason } => Err(ExamineError::Refused(reason)),
        _ => Err(ExamineError::OutOfTurn),
    }
}

/// The pairs of addresses that lanes to `peer` use, each once.
#[must_use]
pub fn paths(local: &Local, peer: &Peer) -> Vec<Endpoint> {
    let count = local.nics.len().max(peer.nics.len()).max(1);
    (0..count).map(|nth| lane_endpoint(local, peer, nth)).collect()
}
