//! The error numbers that NBD knows: a few of Linux's, with its values.

use std::fmt;

/// What is wrong with a request, as it goes over the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(pub u32);

impl Errno {
    /// Not allowed.
    pub const NOT_PERMITTED: Self = Self(1);
    /// The storage failed.
    pub const IO: Self = Self(5);
    /// Out of memory.
    pub const NO_MEMORY: Self = Self(12);
    /// The request is invalid.
    pub const INVALID: Self = Self(22);
    /// Outside of the disk, or the storage is full.
    pub const NO_SPACE: Self = Self(28);
    /// The value is too large.
    pub const OVERFLOW: Self = Self(75);
    /// The server doesn't support the request.
    pub const NOT_SUPPORTED: Self = Self(95);
    /// The server is about to end.
    pub const SHUTDOWN: Self = Self(108);
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NOT_PERMITTED => f.write_str("not permitted"),
            Self::IO => f.write_str("an input/output error"),
            Self::NO_MEMORY => f.write_str("out of memory"),
            Self::INVALID => f.write_str("an invalid request"),
            Self::NO_SPACE => f.write_str("no space left"),
            Self::OVERFLOW => f.write_str("a value too large"),
            Self::NOT_SUPPORTED => f.write_str("not supported"),
            Self::SHUTDOWN => f.write_str("shutting down"),
            Self(other) => write!(f, "error {other}"),
        }
    }
}
