//! What can go wrong between QEMU and us.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// A QMP connection or command failed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// Nobody listens at the socket.
    #[error("cannot connect to QMP at {}: {source}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Somebody listens but doesn't greet.
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
        /// How long we waited.
        waited: Duration,
    },
    /// QEMU can't migrate, or could not: in its own words where it has any.
    #[error("QEMU's migration: {0}")]
    Migration(String),
    /// How QEMU was set can't be noted, so nothing was changed.
    #[error("the note of QEMU's settings, {}, can't be used: {source}", path.display())]
    Note {
        /// Where it is or should be.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What came is not QMP.
    #[error("QMP said what can't be understood: {0}")]
    Garbage(String),
}

impl QmpError {
    /// Whether QEMU (or the connection to it) is gone, rather than unwilling.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Closed | Self::Connect { .. })
    }
}
