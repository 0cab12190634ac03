//! What guests are started with: a QEMU, a kernel, an initramfs.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::accelerator::Accelerator;
use super::qemus;
use super::version::Version;

/// The first QEMU whose own migration is correct under TCG.
pub(super) const QEMU_CORRECT_UNDER_TCG: Version = Version { major: 9, minor: 0, patch: 0 };

/// All that guests need.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kit {
    /// A QEMU that migrates correctly with `accelerator`.
    pub qemu: PathBuf,
    /// Its version.
    pub qemu_version: Version,
    /// The distribution's QEMU; often the same.
    pub qemu_system: PathBuf,
    /// Its version.
    pub qemu_system_version: Version,
    /// The guests' kernel.
    pub kernel: PathBuf,
    /// The guests' initramfs.
    pub initrd: PathBuf,
    /// The kernel of guests without an operating system.
    pub bare_kernel: PathBuf,
    /// KVM where it can boot Linux, else TCG.
    pub accelerator: Accelerator,
}

impl Kit {
    /// Whether a QEMU loses writes of its guest while that is moved.
    #[must_use]
    pub fn loses_writes(&self, qemu: &Qemu) -> bool {
        self.accelerator == Accelerator::Tcg && qemu.version < QEMU_CORRECT_UNDER_TCG
    }

    /// The QEMU that migrates correctly.
    #[must_use]
    pub fn own_qemu(&self) -> Qemu {
        Qemu { program: self.qemu.clone(), version: self.qemu_version }
    }
}

impl fmt::Display for Kit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let qemu = self.qemu.display();
        let system = self.qemu_system.display();
        writeln!(f, "QEMU_{}={qemu}", self.qemu_version.major)?;
        if self.qemu_system_version.major != self.qemu_version.major {
            writeln!(f, "QEMU_{}={system}", self.qemu_system_version.major)?;
        }
        writeln!(f, "QEMU={qemu}")?;
        writeln!(f, "KERNEL={}", self.kernel.display())?;
        writeln!(f, "INITRD={}", self.initrd.display())?;
        writeln!(f, "BARE_KERNEL={}", self.bare_kernel.display())?;
        write!(f, "ACCEL={}", self.accelerator)
    }
}

/// A QEMU, and its version.
#[derive(Clone, Debug)]
pub struct Qemu {
    /// The program that starts it.
    pub program: PathBuf,
    /// Its version.
    pub version: Version,
}

impl Qemu {
    /// The environment variable, `NAME=VALUE`, without which another start of a running QEMU of
    /// this kind lacks devices that are modules; none for the distribution's.
    #[must_use]
    pub fn environment(&self) -> Option<String> {
        qemus::environment(&self.program)
    }

    /// Its own newest machine type, which `q35` stands for.
    #[must_use]
    pub fn machine(&self) -> String {
        format!("pc-q35-{}.{}", self.version.major, self.version.minor)
    }

    /// The same of i440fx, the older chipset.
    #[must_use]
    pub(crate) fn i440fx(&self) -> String {
        format!("pc-i440fx-{}.{}", self.version.major, self.version.minor)
    }
}
