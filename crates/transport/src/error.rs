//! How a lane, or all of them, can fail.

use std::io;
use std::net::SocketAddr;

use identity::HandshakeError;
use wire::{Reply, WireError};

/// One lane failed. Its batches go to the others.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// No connection.
    #[error("cannot connect to {remote}: {source}; is the agent there running, and the port open?")]
    Connect {
        /// Where to.
        remote: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The NIC's address can't be used.
    #[error("cannot leave by the NIC address {local}: {source}; check --nic")]
    Bind {
        /// The address.
        local: std::net::IpAddr,
        /// Why not.
        source: io::Error,
    },
    /// The two ends don't trust one another, or one speaks plaintext.
    #[error("no connection to the agent at {remote}: {source}")]
    Handshake {
        /// Where to.
        remote: SocketAddr,
        /// Why not.
        source: HandshakeError,
    },
    /// The destination does not take the connection.
    #[error("{remote} does not take the connection: {reply:?}")]
    Turned {
        /// Who.
        remote: SocketAddr,
        /// What it answered.
        reply: Reply,
    },
    /// It broke.
    #[error("the connection to {remote} broke: {source}")]
    Broken {
        /// Which.
        remote: SocketAddr,
        /// How.
        source: io::Error,
    },
    /// The peer breaks the rules.
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// No lane is left.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LanesError {
    /// The source's QEMU ended while its pages were needed once more.
    #[error("the VM ended while it was being moved")]
    SourceGone,
    /// None could be (re)connected for too long.
    #[error("no lane to the destination for {seconds} s; the last one said: {last}")]
    AllDead {
        /// How long.
        seconds: u64,
        /// The last error.
        last: String,
    },
    /// The destination breaks the rules.
    #[error(
        "the destination acknowledged batches that were never sent, or took back what it had acknowledged"
    )]
    Nonsense,
    /// One of their threads panicked.
    #[error("a fault in the agent: its thread {thread} panicked; the agent's log says where")]
    Fault {
        /// Its name.
        thread: String,
    },
    /// The lanes were stopped by their owner.
    #[error("the lanes were stopped")]
    Stopped,
}
