//! Why a directory does not answer. No such error stops a migration: content that can't be
//! queried is sent as if no host had it.

/// Why there is no answer, and who is to blame. Several callers may get the same error, so it is
/// `Clone`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DirectoryError {
    /// The directory, or the network, is slow.
    #[error("the directory at {at} has not answered in time")]
    Late {
        /// Which directory.
        at: String,
    },
    /// The directory or the network is down.
    #[error("the directory at {at} can't be reached: {why}")]
    Unreachable {
        /// Which directory.
        at: String,
        /// The system's error.
        why: String,
    },
    /// The directory breaks the protocol.
    #[error("the directory at {at} sent an invalid reply: {why}")]
    Nonsense {
        /// Which directory.
        at: String,
        /// Which rule it breaks.
        why: String,
    },
    /// The directory refuses the request.
    #[error("the directory at {at} refuses: {why}")]
    Refused {
        /// Which directory.
        at: String,
        /// Its reason.
        why: String,
    },
    /// A peer makes up hosts.
    #[error("the directory has {max} hosts, which is its limit")]
    HostsMax {
        /// The limit.
        max: usize,
    },
    /// The operator's mistake.
    #[error("the directory's settings are invalid: {0}")]
    Settings(String),
}
