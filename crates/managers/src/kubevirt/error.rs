//! Errors of this crate.

use crate::takeover::TakeoverError;

/// A problem with KubeVirt on this node.
#[derive(Debug, thiserror::Error)]
pub enum KubevirtError {
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
    /// The system refuses.
    #[error(transparent)]
    System(#[from] TakeoverError),
}
