//! The server to which the source's QEMU mirrors a disk.
//!
//! The caller accepts connections and [`negotiate`]s each; then one thread
//! takes [`Requests`] and any thread answers through the [`Replier`].
//!
//! **Nothing is read.** The tap passes on what comes; it has no disk. So a
//! READ gets "not permitted". And the minimum block size is one byte: whoever
//! writes less than a minimum block reads what surrounds it first, and with a
//! minimum of one byte nothing is ever less.
//!
//! **What is offered.** WRITE_ZEROES, so that holes don't come as bytes; TRIM,
//! since a guest that discards while QEMU mirrors synchronously would
//! otherwise leave its old data at the destination; FLUSH. Not FUA: without
//! it QEMU sends a FLUSH after such a write, so that durability has one way
//! instead of two. Not FAST_ZERO: only the far end knows what is fast there.
//! Not MULTI_CONN: requests keep their order.

mod negotiate;
mod replier;
mod requests;

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::handshake::{BlockSizes, PAYLOAD_BYTES_MAX};
use crate::{ExportFlags, ProtocolError};

pub(crate) use negotiate::choose;
pub use replier::Replier;
pub use requests::{Request, RequestKind, Requests};
pub(crate) use requests::{RequestReader, Step};

/// How long a client may keep us waiting before it has chosen.
const PATIENCE: Duration = Duration::from_secs(10);

const FLAGS: ExportFlags = ExportFlags(
    ExportFlags::HAS_FLAGS.0
        | ExportFlags::FLUSH.0
        | ExportFlags::TRIM.0
        | ExportFlags::WRITE_ZEROES.0,
);

const BLOCK_SIZES: BlockSizes =
    BlockSizes { minimum: 1, preferred: 64 << 10, maximum: PAYLOAD_BYTES_MAX };

/// A disk that clients may write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// What clients call it; at most 4,096 bytes.
    pub name: String,
    /// Its size. QEMU mirrors only to a disk of just the size of its own.
    pub bytes: u64,
}

/// A client that has chosen.
#[derive(Debug)]
pub struct Connection {
    /// Which export, counted in the list that was offered.
    pub export: usize,
    /// What it asks for.
    pub requests: Requests,
    /// Where its answers go.
    pub replier: Replier,
}

/// A connection failed. The client is to blame, unless it says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The socket failed, or nothing came for too long.
    #[error("{action} the NBD client: {source}")]
    Socket {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// It did nothing when it was its turn.
    #[error("the NBD client said nothing for {} s", PATIENCE.as_secs())]
    Silent,
    /// It left without saying so. QEMU does this when it ends or is killed.
    #[error("the NBD client hung up")]
    HungUp,
    /// It breaks the rules.
    #[error("the NBD client breaks the protocol: {0}")]
    Client(#[from] ProtocolError),
    /// An answer could not be sent before; nothing follows it.
    #[error("the connection to the NBD client is broken")]
    Broken,
}

impl ServerError {
    fn reading(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::UnexpectedEof => Self::HungUp,
            // Only while it has not chosen.
            io::ErrorKind::WouldBlock => Self::Silent,
            _ => Self::Socket { action: "reading from", source },
        }
    }

    fn writing(source: io::Error) -> Self {
        Self::Socket { action: "writing to", source }
    }
}

/// Lets the client choose one of the exports. `None` if it only looked.
///
/// # Errors
/// If it breaks the rules, leaves, or does nothing for ten seconds.
pub fn negotiate(
    socket: UnixStream,
    exports: &[Export],
) -> Result<Option<Connection>, ServerError> {
    set_patience(&socket, Some(PATIENCE))?;
    let Some(export) = choose(&socket, &socket, exports)? else { return Ok(None) };
    set_patience(&socket, None)?;
    let bytes = exports.get(export).map_or(0, |export| export.bytes);
    let replier = Replier::new(socket.try_clone().map_err(ServerError::reading)?);
    let requests = Requests::new(socket, bytes, replier.clone());
    Ok(Some(Connection { export, requests, replier }))
}

fn set_patience(socket: &UnixStream, patience: Option<Duration>) -> Result<(), ServerError> {
    socket.set_read_timeout(patience).map_err(ServerError::reading)?;
    socket.set_write_timeout(patience).map_err(ServerError::writing)
}

#[cfg(test)]
mod tests;
