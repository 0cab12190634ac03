//! What the other end can do wrong. It is always the peer that is to blame.

/// The other end does not speak NBD as we agreed with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// Other bytes than those that begin such a thing.
    #[error("{what} begins with {found:#x}: this is no NBD peer, or it lost its place")]
    Magic {
        /// What was expected.
        what: &'static str,
        /// What came.
        found: u64,
    },
    /// It ends too early, or goes on for too long.
    #[error("{what} has a wrong length: {bytes} bytes")]
    Length {
        /// What.
        what: &'static str,
        /// Its length.
        bytes: u64,
    },
    /// A text that isn't UTF-8.
    #[error("{what} is not UTF-8")]
    Text {
        /// What.
        what: &'static str,
    },
    /// Right in form, wrong in what it says or when.
    #[error("{0}")]
    Unexpected(String),
}
