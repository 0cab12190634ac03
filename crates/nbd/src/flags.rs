//! What an export can do, as its server announces it.

use std::ops::BitOr;

/// A set of an export's abilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportFlags(pub u16);

impl ExportFlags {
    /// Always set: the other flags are valid.
    pub const HAS_FLAGS: Self = Self(1);
    /// Nothing can be written.
    pub const READ_ONLY: Self = Self(1 << 1);
    /// FLUSH is served.
    pub const FLUSH: Self = Self(1 << 2);
    /// TRIM is served.
    pub const TRIM: Self = Self(1 << 5);
    /// WRITE_ZEROES is served.
    pub const WRITE_ZEROES: Self = Self(1 << 6);

    /// Whether all of `others` are in it.
    #[must_use]
    pub const fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }
}

impl BitOr for ExportFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}
