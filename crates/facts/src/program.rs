//! What a QEMU program can do on a host.

use serde::{Deserialize, Serialize};

/// What a QEMU program can do with one accelerator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Its version: major, minor, micro.
    pub version: (u32, u32, u32),
    /// The machine types that it knows.
    pub machines: Vec<MachineType>,
    /// The CPU models that it knows.
    pub cpus: Vec<CpuModel>,
    /// Whether its migration has the property `switchover-ack-legacy`.
    #[serde(default)]
    pub legacy_ack: bool,
}

/// A machine type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineType {
    /// Its name, such as `pc-q35-7.2`.
    pub name: String,
    /// Its other name, such as `q35`.
    #[serde(default)]
    pub alias: Option<String>,
    /// Whether it will be removed from QEMU.
    #[serde(default)]
    pub deprecated: bool,
}

/// A CPU model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuModel {
    /// Its name, such as `Haswell-v4`.
    pub name: String,
    /// Features that it has and that this host can't provide with this accelerator.
    #[serde(default, rename = "unavailable-features")]
    pub unavailable: Vec<String>,
}

impl Capabilities {
    /// The version in dotted form.
    #[must_use]
    pub fn version_text(&self) -> String {
        let (major, minor, micro) = self.version;
        format!("{major}.{minor}.{micro}")
    }

    /// Whether it knows a machine type.
    #[must_use]
    pub fn knows_machine(&self, name: &str) -> bool {
        self.machines.iter().any(|one| one.name == name || one.alias.as_deref() == Some(name))
    }

    /// A CPU model that it knows.
    #[must_use]
    pub fn cpu(&self, name: &str) -> Option<&CpuModel> {
        // QEMU also takes the name of the class.
        let short = name.strip_suffix("-cpu").and_then(|rest| Some(rest.rsplit_once('-')?.0));
        let find = |name: &str| self.cpus.iter().find(|model| model.name == name);
        find(name).or_else(|| find(short?))
    }
}
