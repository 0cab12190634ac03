//! Why a client can't be made, or a request fails.

use std::io;
use std::path::PathBuf;

use crate::transmission::Command;
use crate::{Errno, ProtocolError};

/// The client can't be made, or refuses this request: nothing was sent.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server can't be reached.
    #[error("cannot connect to the NBD server at {}: {source}", path.display())]
    Connect {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The socket failed before an export was chosen.
    #[error("the NBD server disconnected, or sent nothing, before it offered an export: {0}")]
    Handshake(io::Error),
    /// A thread can't be started.
    #[error("cannot start a thread for an NBD client: {0}")]
    Local(io::Error),
    /// The server violates the protocol.
    #[error("the NBD server breaks the protocol: {0}")]
    Server(#[from] ProtocolError),
    /// The server refuses the export.
    #[error("the NBD server refuses the export '{name}': {reason}")]
    Refused {
        /// Which.
        name: String,
        /// The server's message.
        reason: String,
    },
    /// The export can't be written or flushed.
    #[error("the NBD export '{name}' {lack}")]
    Unfit {
        /// Which.
        name: String,
        /// What it lacks.
        lack: &'static str,
    },
    /// The range is empty, or not in the export.
    #[error("{bytes} bytes at {offset} do not lie in the NBD export of {export_bytes} bytes")]
    Outside {
        /// Where.
        offset: u64,
        /// How much.
        bytes: u64,
        /// The export's size.
        export_bytes: u64,
    },
    /// The range is not aligned to the server's minimum.
    #[error("{bytes} bytes at {offset} are not aligned to the NBD export's {minimum} bytes")]
    Unaligned {
        /// Where.
        offset: u64,
        /// How much.
        bytes: u64,
        /// The server's minimum.
        minimum: u32,
    },
    /// The connection ended before.
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// Why a request failed, or may have failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The server replied with an error.
    #[error("the destination's disk did not {} {bytes} bytes at {offset}: {errno}", verb(*command))]
    Disk {
        /// The command.
        command: Command,
        /// Where.
        offset: u64,
        /// How much.
        bytes: u32,
        /// The error.
        errno: Errno,
    },
    /// The connection ended; whether the request was done is unknown.
    #[error("the connection to the destination's disk broke: {0}")]
    Broken(String),
    /// The client was stopped by its owner.
    #[error("writing to the destination's disk was stopped")]
    Stopped,
}

fn verb(command: Command) -> &'static str {
    match command {
        Command::WRITE => "write",
        Command::WRITE_ZEROES => "zero",
        _ => "flush",
    }
}

/// How a request ended.
pub type Outcome = Result<(), Failure>;
