//! Errors of QMP.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a QMP connection or command failed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket can't be connected to.
    #[error("cannot connect to QMP at {}: {source}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A server accepts the connection but doesn't greet.
    #[error(
        "no greeting from QMP at {}: QEMU serves one client at a time on a socket, \
         so another program may be connected to it; give QEMU one more -qmp socket",
        path.display()
    )]
    NoGreeting {
        /// The socket.
        path: PathBuf,
    },
    /// QEMU answered with an error.
    #[error("QEMU refused {command}: {desc}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's class of error.
        class: String,
        /// QEMU's text.
        desc: String,
    },
    /// The connection ended.
    #[error("QEMU closed its QMP connection: the process ended or was stopped")]
    Closed,
    /// No answer in time.
    #[error("QEMU did not answer {command} within {} s", waited.as_secs_f32())]
    Timeout {
        /// The command.
        command: String,
        /// How long that was.
        waited: Duration,
    },
    /// QEMU can't migrate, or failed to; with its own message if it has one.
    #[error("QEMU's migration: {0}")]
    Migration(String),
    /// QEMU's previous settings can't be saved or read, so nothing was changed.
    #[error("the note of QEMU's settings, {}, can't be used: {source}", path.display())]
    Note {
        /// Where it is or should be.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The data received is not QMP.
    #[error("QMP sent an invalid message: {0}")]
    Garbage(String),
}

impl QmpError {
    /// Whether QEMU (or the connection to it) is gone, rather than that it refused.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Closed | Self::Connect { .. })
    }
}
