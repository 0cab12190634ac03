//! Failures that no repetition excuses. The suite repeats a test that fails, as a busy
//! machine can make one fail; but never one that fails like this.

use std::fmt::{Display, Formatter, Result};

/// Prefix of the line that the suite recognizes.
pub const PREFIX: &str = "suite fatal: ";

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Memory or a disk of a guest does not hold what the guest wrote.
    WrongPage,
    /// A VM ran at two hosts.
    RanTwice,
    /// A VM runs nowhere, or its guest is silent.
    VmLost,
    /// A file, a process or a namespace is left of something that has ended.
    LeftBehind,
    /// A thread of an agent panicked.
    Panic,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::WrongPage, Self::RanTwice, Self::VmLost, Self::LeftBehind, Self::Panic];
}

impl Display for Kind {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(match self {
            Self::WrongPage => "a wrong page",
            Self::RanTwice => "a VM ran twice",
            Self::VmLost => "a VM is lost",
            Self::LeftBehind => "something is left behind",
            Self::Panic => "an agent panicked",
        })
    }
}

/// The line that reports such a failure.
#[must_use]
pub fn line(kind: Kind, detail: impl Display) -> String {
    format!("{PREFIX}{kind}: {detail}")
}

/// Fails a test in this way.
///
/// # Panics
/// Always.
#[track_caller]
pub fn fatal(kind: Kind, detail: impl Display) -> ! {
    // The line has to start a line of its own in what the test prints.
    panic!("\n{}", line(kind, detail));
}
