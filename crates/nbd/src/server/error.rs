//! Why a connection of a client fails.

use std::io;
use std::time::Duration;

use crate::ProtocolError;

/// How long a client may take for each message before it has chosen.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// A connection failed. The client is to blame, unless the variant says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The socket failed, or the client did not read for too long.
    #[error("{action} the NBD client: {source}")]
    Socket {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The client sent nothing when it was its turn.
    #[error("the NBD client sent nothing for {} s", PATIENCE.as_secs())]
    Silent,
    /// The client left without a DISCONNECT, as QEMU does when it ends or is killed.
    #[error("the NBD client disconnected")]
    HungUp,
    /// The client violates the protocol.
    #[error("the NBD client breaks the protocol: {0}")]
    Client(#[from] ProtocolError),
    /// An earlier reply could not be sent; no others follow it.
    #[error("the connection to the NBD client is broken")]
    Broken,
}

impl ServerError {
    pub(super) fn reading(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::UnexpectedEof => Self::HungUp,
            // Only before it has chosen: afterwards there is no timeout.
            io::ErrorKind::WouldBlock => Self::Silent,
            _ => Self::Socket { action: "reading from", source },
        }
    }

    pub(super) fn writing(source: io::Error) -> Self {
        Self::Socket { action: "writing to", source }
    }
}
