//! One NBD connection of the source's QEMU: its requests become writes of a
//! disk.

use nbd::Errno;
use nbd::server::{Connection, RequestKind, ServerError};

use crate::{DiskSource, SourceError};

/// Why a connection is of no use any more. The mirror that it belongs to has
/// failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The connection itself.
    #[error(transparent)]
    Connection(#[from] ServerError),
    /// What was written can't be handed on. QEMU has got an error.
    #[error(transparent)]
    Disk(#[from] SourceError),
}

/// Serves a connection until QEMU says goodbye. QEMU hears that a write is done
/// as soon as it has its number: from here on it is ours to deliver.
///
/// # Errors
/// If the connection breaks, or what is written does not reach the destination.
/// A flush that fails is such an error too.
pub fn serve(connection: &mut Connection, disk: &DiskSource) -> Result<(), ServeError> {
    let Connection { requests, replier, .. } = connection;
    while let Some(request) = requests.next_request()? {
        data_threads::point();
        let served = match request.kind {
            RequestKind::Write => {
                disk.write(request.offset, request.bytes, |into| requests.read_payload(into))
            }
            // Zeroes are as good as anything where the guest has discarded.
            RequestKind::WriteZeroes | RequestKind::Trim => {
                disk.write_zeroes(request.offset, request.bytes.into())
            }
            RequestKind::Flush => disk.flush(),
        };
        if let Err(error) = served {
            // If QEMU can't be told, it sees the connection end.
            let _ = replier.fail(request.cookie, Errno::IO);
            return Err(error.into());
        }
        replier.ok(request.cookie)?;
    }
    Ok(())
}
