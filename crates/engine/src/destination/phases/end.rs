//! Why an arrival ended before the VM was loaded.

use wire::ToDestination;

use crate::link::Received;

/// Why an arrival ended before the VM was loaded.
#[derive(Debug)]
pub(super) enum End {
    /// The source is to receive this.
    Failed(String),
    /// The source ended it, or its connection is lost.
    Over(String),
}

impl End {
    pub(super) fn failed(why: impl std::fmt::Display) -> Self {
        Self::Failed(why.to_string())
    }
}

/// Interprets an unexpected message.
pub(super) fn ended(received: Received<ToDestination>) -> End {
    match received {
        Received::Message(ToDestination::Abort { reason }) => {
            End::Over(format!("the source ended the migration: {reason}"))
        }
        Received::Message(ToDestination::Switchover { said }) => match said.message {
            switchover::ToDestination::Aborted { reason } => {
                End::Over(format!("the source ended the migration: {reason}"))
            }
            switchover::ToDestination::Unknown => {
                End::Over("the VM ended at its source".to_owned())
            }
            switchover::ToDestination::Go { .. } => {
                End::failed("the source released a VM that is not loaded")
            }
        },
        Received::Disconnected(error) => {
            End::Over(format!("lost the connection to the source's agent: {error}"))
        }
        _ => End::failed("the source sent a message out of turn"),
    }
}
