//! Protocol errors, for which the peer is always to blame.

/// The peer violates the NBD protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// It doesn't start with its magic number.
    #[error("{what} starts with {found:#x}: this is not an NBD peer, or the stream is out of step")]
    Magic {
        /// What was expected.
        what: &'static str,
        /// What was received.
        found: u64,
    },
    /// It is too short or too long.
    #[error("{what} has a wrong length: {bytes} bytes")]
    Length {
        /// What.
        what: &'static str,
        /// Its length.
        bytes: u64,
    },
    /// A text that isn't UTF-8.
    #[error("{what} is not UTF-8")]
    Text {
        /// What.
        what: &'static str,
    },
    /// It is well-formed, but its content is invalid, or not allowed now.
    #[error("{0}")]
    Unexpected(String),
}
