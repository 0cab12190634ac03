//! The server to which the source's QEMU mirrors a disk.
//!
//! The caller accepts connections and [`negotiate`]s each; then one thread
//! reads [`Requests`] and any thread answers them through the [`Replier`].
//!
//! **Reads are refused.** The source agent forwards writes and has no disk, so a
//! READ gets "not permitted". The minimum block size is therefore one byte: a
//! client that writes less than a minimum block first reads the rest of the block.
//!
//! **Offered.** WRITE_ZEROES, so that holes aren't sent as bytes; TRIM,
//! since a guest that discards while QEMU mirrors synchronously would
//! otherwise leave its old data at the destination; FLUSH. Not FUA: without
//! it QEMU sends a FLUSH after such a write, so that there is one path to durability
//! instead of two. Not FAST_ZERO: only the destination knows what is fast there.
//! Not MULTI_CONN: requests keep their order.

mod error;
mod negotiate;
mod replier;
mod requests;

use std::os::unix::net::UnixStream;
use std::time::Duration;

use error::PATIENCE;
pub use error::ServerError;
pub(crate) use negotiate::choose;
pub use replier::Replier;
pub use requests::{Request, RequestKind, Requests};
pub(crate) use requests::{RequestReader, Step};

/// A disk that clients may write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// What clients call it; at most 4,096 bytes.
    pub name: String,
    /// Its size. QEMU mirrors only to a disk of exactly the size of its own.
    pub bytes: u64,
}

/// A client that has chosen an export.
#[derive(Debug)]
pub struct Connection {
    /// The export's index in the list that was offered.
    pub export: usize,
    /// Its requests.
    pub requests: Requests,
    /// Sends the replies.
    pub replier: Replier,
}

/// Lets the client choose one of the exports. `None` if it ends the negotiation instead.
///
/// # Errors
/// If it violates the protocol, hangs up, or is silent for ten seconds.
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
