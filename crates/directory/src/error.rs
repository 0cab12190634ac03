//! Why a directory does not answer. None of it is in the way of a migration:
//! what can't be asked for goes as if nobody had it.

/// No answer, and whose fault that is. Many may be told the same, so it can be
/// copied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DirectoryError {
    /// The directory, or the network, is slow.
    #[error("the directory at {at} has not answered in time")]
    Late {
        /// Which directory.
        at: String,
    },
    /// The directory is gone, or the network.
    #[error("the directory at {at} can't be reached: {why}")]
    Unreachable {
        /// Which directory.
        at: String,
        /// What the system says.
        why: String,
    },
    /// The directory breaks the rules.
    #[error("the directory at {at} answers what makes no sense: {why}")]
    Nonsense {
        /// Which directory.
        at: String,
        /// Which rule.
        why: String,
    },
    /// The directory does not do it.
    #[error("the directory at {at} refuses: {why}")]
    Refused {
        /// Which directory.
        at: String,
        /// What it says.
        why: String,
    },
    /// Somebody makes up hosts.
    #[error("the directory knows {max} hosts, and takes no more of them")]
    HostsMax {
        /// How many there may be.
        max: usize,
    },
    /// The operator's mistake.
    #[error("the directory's settings are of no use: {0}")]
    Settings(String),
}
