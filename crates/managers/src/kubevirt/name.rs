//! VMs, and the sockets that are named after them.

use std::fmt;
use std::str::FromStr;

use crate::ManagerError;

/// Usually a UUID of 36 characters, but KubeVirt accepts any UID that Kubernetes assigns.
const UID_BYTES_MAX: usize = 63;

/// The UID of a VM (of a `VirtualMachineInstance`): its file names are made of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Vmi(String);

impl fmt::Display for Vmi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Vmi {
    type Err = ManagerError;

    fn from_str(text: &str) -> Result<Self, ManagerError> {
        let is_good = |letter: u8| letter.is_ascii_alphanumeric() || letter == b'-';
        if text.is_empty() || text.len() > UID_BYTES_MAX || !text.bytes().all(is_good) {
            return Err(ManagerError::NoUid(text.chars().take(UID_BYTES_MAX).collect()));
        }
        Ok(Self(text.to_owned()))
    }
}

/// What a socket carries. KubeVirt names it by the port that libvirt would use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Port {
    /// The VM's RAM and devices.
    Memory,
    /// Its disks.
    Disks,
}

impl Port {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Memory, Self::Disks];

    /// Its number.
    #[must_use]
    pub const fn number(self) -> u16 {
        match self {
            Self::Memory => 49152,
            Self::Disks => 49153,
        }
    }

    /// The port with this number.
    #[must_use]
    pub fn of(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|port| port.number() == number)
    }
}

/// A socket through which a VM leaves or arrives.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SocketName {
    /// The VM.
    pub(crate) vmi: Vmi,
    /// What it carries.
    pub(crate) port: Port,
}

impl fmt::Display for SocketName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-source.sock", self.vmi, self.port.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_named_as_by_kubevirt() {
        let vmi: Vmi = "8a9c-1".parse().unwrap();
        let name = |port| SocketName { vmi: vmi.clone(), port }.to_string();
        assert_eq!(name(Port::Memory), "8a9c-1-49152-source.sock");
        assert_eq!(name(Port::Disks), "8a9c-1-49153-source.sock");
        assert_eq!(Port::of(49153), Some(Port::Disks));
        assert_eq!(Port::of(22), None);
    }

    #[test]
    fn a_uid_is_no_path() {
        for wrong in ["", "..", "a/b", "a.b", "ä", &"a".repeat(64)] {
            assert!(wrong.parse::<Vmi>().is_err(), "{wrong}");
        }
    }
}
