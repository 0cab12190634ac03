//! Errors of one lane, or of all lanes.

use std::io;
use std::net::SocketAddr;

use identity::HandshakeError;
use wire::{Reply, WireError};

/// An error of one lane. Its batches go to the others.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// Connecting failed.
    #[error("cannot connect to {remote}: {source}; {}", advice(source))]
    Connect {
        /// The destination's address.
        remote: SocketAddr,
        /// The reason.
        source: io::Error,
    },
    /// The NIC's address can't be used.
    #[error("cannot connect from the NIC address {local}: {source}; check --nic")]
    Bind {
        /// The address.
        local: std::net::IpAddr,
        /// The reason.
        source: io::Error,
    },
    /// The two ends don't trust one another, or one speaks plaintext.
    #[error("no connection to the agent at {remote}: {source}")]
    Handshake {
        /// The destination's address.
        remote: SocketAddr,
        /// The reason.
        source: HandshakeError,
    },
    /// The destination refuses the connection.
    #[error("{remote} rejected the connection: {reply}")]
    Turned {
        /// The destination's address.
        remote: SocketAddr,
        /// Its answer.
        reply: Reply,
    },
    /// The connection broke.
    #[error("the connection to {remote} broke: {source}")]
    Broken {
        /// The destination's address.
        remote: SocketAddr,
        /// The reason.
        source: io::Error,
    },
    /// The connection broke, and none of the batches sent on it was acknowledged.
    #[error(
        "the connection to {remote} broke before anything sent on it had arrived: {source}; if \
         that repeats, check whether full packets arrive: the MTUs on that path may differ"
    )]
    InVain {
        /// The destination's address.
        remote: SocketAddr,
        /// The reason.
        source: io::Error,
    },
    /// The peer violates the protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl LaneError {
    /// Whether the peer may take a connection in a moment: it is busy or starts again, or the
    /// network failed.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Broken { .. } | Self::InVain { .. } => true,
            Self::Turned { reply, .. } => *reply == Reply::Busy,
            Self::Handshake { source, .. } => matches!(
                source,
                HandshakeError::Io(_) | HandshakeError::TooSlow | HandshakeError::Unanswered
            ),
            Self::Bind { .. } | Self::Wire(_) => false,
        }
    }
}

/// What to do if connecting fails.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            "no agent listens there: start it, or correct the address in the peers file"
        }
        _ => "is that host up, and does the firewall allow the connection?",
    }
}

/// An error of all lanes.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LanesError {
    /// The source's QEMU ended while its pages had to be reread.
    #[error("the VM ended while it was being moved")]
    SourceExited,
    /// No lane could be (re)connected for too long.
    #[error("no lane to the destination for {seconds} s; the last error: {last}")]
    AllDead {
        /// For how long.
        seconds: u64,
        /// The last error.
        last: String,
    },
    /// The destination violates the protocol.
    #[error(
        "the destination acknowledged batches that were never sent, or took back what it had \
         acknowledged"
    )]
    Nonsense,
    /// A lane's thread panicked.
    #[error("a fault in the agent: its thread {thread} panicked; see the agent's log")]
    Fault {
        /// The thread's name.
        thread: String,
    },
    /// The lanes were stopped by their owner.
    #[error("the lanes were stopped")]
    Stopped,
}
