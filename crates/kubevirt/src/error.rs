//! What goes wrong.

use takeover::TakeoverError;

/// Something of KubeVirt's on this node is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum KubevirtError {
    /// The VM is not on this node.
    #[error("no pod of this node runs the VM {0}")]
    NoSuchVmi(String),
    /// Not the UID of a VM.
    #[error("`{0}` is no UID of a VM")]
    NoUid(String),
    /// A note of virt-handler's makes no sense.
    #[error("virt-handler's note {file}: {why}")]
    Record {
        /// Which.
        file: String,
        /// What is wrong with it.
        why: String,
    },
    /// The system refuses.
    #[error(transparent)]
    System(#[from] TakeoverError),
}
