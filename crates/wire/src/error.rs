//! Protocol errors of a peer.

use crate::preamble::Versions;

/// A peer sent something outside the protocol, or above its limits.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The connection is not from a Droveway agent at all.
    #[error(
        "the peer does not use Droveway's protocol (its first bytes are {found:02x?}); is the \
         address that of an agent?"
    )]
    NotDroveway {
        /// The bytes received instead of the magic.
        found: [u8; 8],
    },
    /// Another version of the protocol.
    #[error(
        "the peer has {theirs} of Droveway's protocol, this agent {ours}: upgrade the host with \
         the older release; neighbouring releases work together"
    )]
    Version {
        /// The peer's versions.
        theirs: Versions,
        /// This agent's versions.
        ours: Versions,
    },
    /// A count or length above the protocol's limit.
    #[error("the peer sent {what} of {value}, more than the {max} allowed")]
    TooLarge {
        /// What it counts.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The limit.
        max: u64,
    },
    /// A field with an unknown value.
    #[error("the peer sent an unknown {what} ({value})")]
    Unknown {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// Fields that contradict each other.
    #[error("the peer sent a batch that contradicts itself: {0}")]
    Contradiction(&'static str),
    /// A message that is not JSON, or not a known one.
    #[error("the peer sent a message that cannot be understood: {0}")]
    Message(#[from] serde_json::Error),
    /// The connection ended or failed in the middle.
    #[error("the connection to the peer broke: {0}")]
    Io(#[from] std::io::Error),
}
