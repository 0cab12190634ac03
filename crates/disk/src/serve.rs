//! One NBD connection of the source's QEMU: its requests become writes to a
//! disk.

use nbd::Errno;
use nbd::server::{Connection, RequestKind, ServerError};

use crate::{DiskSource, SourceError};

/// Why a connection can't continue. The mirror that it belongs to has failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The connection itself failed.
    #[error(transparent)]
    Connection(#[from] ServerError),
    /// The disk failed a request. QEMU has been sent an error reply.
    #[error(transparent)]
    Disk(#[from] SourceError),
}

/// Serves a connection until QEMU disconnects. A write is reported to QEMU as complete once its
/// batches have their numbers: from then on the agent is responsible for delivery.
///
/// # Errors
/// If the connection breaks, a write can't be sent to the destination, or a flush fails.
pub fn serve(connection: &mut Connection, disk: &DiskSource) -> Result<(), ServeError> {
    let Connection { requests, replier, .. } = connection;
    while let Some(request) = requests.next_request()? {
        data_threads::point();
        let served = match request.kind {
            RequestKind::Write => {
                disk.write(request.offset, request.bytes, |into| requests.read_payload(into))
            }
            // Discarded ranges may read as anything, so as zeroes, too.
            RequestKind::WriteZeroes | RequestKind::Trim => {
                disk.write_zeroes(request.offset, request.bytes.into())
            }
            RequestKind::Flush => disk.flush(),
        };
        if let Err(error) = served {
            // If the reply can't be sent, QEMU sees the connection end.
            let _ = replier.fail(request.cookie, Errno::IO);
            return Err(error.into());
        }
        replier.ok(request.cookie)?;
    }
    Ok(())
}
