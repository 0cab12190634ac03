//! The version of a QEMU, or of a libvirt.

use std::fmt;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::error::{LabError, Result};
use crate::program;

/// A version of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// Changes once a year.
    pub major: u32,
    /// Changes with each release.
    pub minor: u32,
    /// Changes with each fix.
    pub patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Asks a QEMU for its version.
pub(super) fn of(qemu: &Path) -> Result<Version> {
    let text = program::output(Command::new(qemu).arg("--version"))?;
    parse(&text).ok_or(LabError::Text { what: "QEMU's version", text })
}

fn parse(text: &str) -> Option<Version> {
    Version::parse(text.split_once("version ")?.1.split_whitespace().next()?)
}

impl Version {
    /// Parses `9.0.0`, or `8.2`.
    pub(super) fn parse(number: &str) -> Option<Self> {
        let mut parts = number.split('.').map(|part| part.parse().ok());
        let mut next = || parts.next().flatten();
        Some(Self { major: next()?, minor: next()?, patch: next().unwrap_or(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::{Version, parse};

    #[test]
    fn reads_what_qemu_prints() {
        let cases = [
            ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)", Some((7, 2, 22))),
            ("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright", Some((10, 0, 2))),
            ("QEMU emulator version 8.2\n", Some((8, 2, 0))),
            ("qemu", None),
        ];
        for (text, expected) in cases {
            let expected = expected.map(|(major, minor, patch)| Version { major, minor, patch });
            assert_eq!(parse(text), expected, "{text}");
        }
    }
}
