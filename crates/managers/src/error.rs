//! Errors of this crate.

use std::io;

/// Why a manager's migration can't be carried to or from this host.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// The target is of another manager than this host's, whose name is given.
    #[error("the agent there carries migrations of {0}: `manager` under [carry] in its file")]
    OtherManager(&'static str),
    /// Carried migrations may not arrive there, or nothing waits there.
    #[error("{0}")]
    Refused(String),
    /// The QEMU that waits can't be reached.
    #[error("cannot connect to the destination's QEMU at {what}: {source}")]
    Connect {
        /// Where it waits.
        what: String,
        /// The reason.
        source: io::Error,
    },
    /// The VM is not on this node.
    #[error("no pod of this node runs the VM {0}")]
    NoSuchVmi(String),
    /// Not the UID of a VM.
    #[error("`{0}` is no UID of a VM")]
    NoUid(String),
    /// A ghost record of virt-handler is invalid.
    #[error("virt-handler's note {file}: {why}")]
    Record {
        /// The file of the record.
        file: String,
        /// What is wrong with it.
        why: String,
    },
    /// The system refuses an operation.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
}

/// Adds to an error what was tried.
pub(crate) trait Trying<T> {
    /// Names the operation, as in "opening a file".
    fn trying(self, what: &'static str) -> Result<T, ManagerError>;
}

impl<T, E: Into<io::Error>> Trying<T> for Result<T, E> {
    fn trying(self, what: &'static str) -> Result<T, ManagerError> {
        self.map_err(|error| ManagerError::System { what, source: error.into() })
    }
}
