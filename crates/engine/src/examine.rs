//! Asking another agent something, on a connection of its own.

use std::time::{Duration, Instant};

use transport::{Endpoint, LaneError, connect};
use wire::examine::{Answer, Question};
use wire::{Frame, Kind, ToDestination, ToSource, WireError, read_frame, read_message};

use crate::host::{Local, Peer, lane_endpoint};

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Examined {
    /// What it is.
    pub answer: Answer,
    /// How long it took, without the making of the connection.
    pub took: Duration,
}

/// There is none.
#[derive(Debug, thiserror::Error)]
pub enum ExamineError {
    /// The agent isn't there, or doesn't take the connection.
    #[error(transparent)]
    Connect(#[from] LaneError),
    /// The connection broke, or the peer breaks the rules.
    #[error(transparent)]
    Broken(#[from] WireError),
    /// It closed the connection.
    #[error("it hangs up: it may be of a version that can't be asked")]
    HungUp,
    /// It said something else.
    #[error("it answers something else")]
    OutOfTurn,
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
    tracing::debug!(peer, way = %endpoint, "asking");
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
        _ => Err(ExamineError::OutOfTurn),
    }
}

/// The ways that lanes to `peer` take, each once.
#[must_use]
pub fn ways(local: &Local, peer: &Peer) -> Vec<Endpoint> {
    let count = local.nics.len().max(peer.nics.len()).max(1);
    (0..count).map(|nth| lane_endpoint(local, peer, nth)).collect()
}
