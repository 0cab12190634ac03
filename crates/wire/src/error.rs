//! What a peer can get wrong.

use crate::preamble::Versions;

/// A peer said something that is not in the protocol, or too much of it.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The connection is not from a Droveway agent at all.
    #[error(
        "the peer does not speak Droveway's protocol (its first bytes are {found:02x?}); is the address that of an agent?"
    )]
    NotDroveway {
        /// What came instead of the magic.
        found: [u8; 8],
    },
    /// Another version of the protocol.
    #[error(
        "the peer speaks {theirs} of Droveway's protocol, this agent {ours}: upgrade the host \
         with the older release, which speaks that of the release before and after it"
    )]
    Version {
        /// Theirs.
        theirs: Versions,
        /// Ours.
        ours: Versions,
    },
    /// A count or length above what the protocol allows.
    #[error("the peer sent {what} of {value}, more than the {max} allowed")]
    TooLarge {
        /// Of what.
        what: &'static str,
        /// How much.
        value: u64,
        /// How much is allowed.
        max: u64,
    },
    /// A field with a value that means nothing.
    #[error("the peer sent an unknown {what} ({value})")]
    Unknown {
        /// Which field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// Fields that contradict each other.
    #[error("the peer sent a batch that contradicts itself: {0}")]
    Contradiction(&'static str),
    /// A message that is no JSON, or not one that is known.
    #[error("the peer sent a message that cannot be understood: {0}")]
    Message(#[from] serde_json::Error),
    /// The connection ended or failed in the middle.
    #[error("the connection to the peer broke: {0}")]
    Io(#[from] std::io::Error),
}
