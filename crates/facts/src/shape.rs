//! The configuration of a live VM, as far as a migration depends on it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The configuration of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// The machine type with its version, such as `pc-q35-7.2`.
    pub machine: String,
    /// The model of the vCPUs, such as `qemu64-x86_64-cpu`.
    pub cpu: String,
    /// The CPU features that the guest sees; empty if QEMU doesn't report them.
    #[serde(default)]
    pub cpu_features: Vec<FeatureWord>,
    /// The number of plugged vCPUs.
    pub vcpus: u32,
    /// RAM without memory devices.
    pub ram_bytes: u64,
    /// RAM blocks that are backend objects, sorted by id.
    pub memory: Vec<Memory>,
    /// What virtio-mem devices have unplugged of these. Older releases don't say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unplugged: Vec<Memory>,
    /// Memory devices (DIMMs).
    pub memory_devices: Vec<Device>,
    /// Devices from the command line or from hotplug.
    pub devices: Vec<Device>,
    /// Drives, with the medium in each.
    pub drives: Vec<Drive>,
    /// Block nodes that the user named.
    pub nodes: Vec<Node>,
    /// Files and host devices that hold the VM's disks, each once.
    pub images: Vec<Image>,
    /// QEMU's process, if it runs on this host and is visible.
    #[serde(skip)]
    pub pid: Option<u32>,
}

/// A memory backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Its id, which is the RAM block's name.
    pub id: String,
    /// Its size.
    pub bytes: u64,
}

impl Memory {
    /// The bytes of the backend `id` in a list; 0 if it is not listed.
    #[must_use]
    pub fn bytes_of(list: &[Self], id: &str) -> u64 {
        list.iter().find(|one| one.id == id).map_or(0, |one| one.bytes)
    }
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The user's name for it, if it has one.
    pub id: Option<String>,
    /// Its type, such as `virtio-net-pci`.
    pub kind: String,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.id {
            Some(id) => write!(f, "the {} device `{id}`", self.kind),
            None => write!(f, "a {} device without id", self.kind),
        }
    }
}

/// A drive: what the guest sees as one disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drive {
    /// The drive's or the device's name, the same in every version of QEMU.
    pub name: String,
    /// Whether its medium can be changed.
    pub removable: bool,
    /// Its medium.
    pub medium: Option<Medium>,
}

/// The medium in a drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Medium {
    /// Its format, such as `raw`.
    pub driver: String,
    /// The file, as QEMU names it; then the files behind it, nearest first.
    pub files: Vec<String>,
    /// Whether the guest can't write to it.
    pub read_only: bool,
    /// The size that the guest sees.
    pub bytes: u64,
}

/// A block node with a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Its driver.
    pub driver: String,
    /// What it opens, as QEMU names it.
    pub file: String,
    /// Whether it was opened read-only.
    pub read_only: bool,
}

/// Where the bytes of a disk are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Image {
    /// The protocol: `file`, `host_device`, `nbd`, `rbd`...
    pub driver: String,
    /// The file or URL.
    pub file: String,
    /// Whether nothing writes to it.
    pub read_only: bool,
    /// Its size as QEMU sees it.
    pub bytes: u64,
}

/// The feature bits of one register of a CPUID leaf.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeatureWord {
    /// The leaf.
    #[serde(rename = "cpuid-input-eax")]
    pub leaf: u32,
    /// The subleaf, if the leaf has several.
    #[serde(rename = "cpuid-input-ecx", default, skip_serializing_if = "Option::is_none")]
    pub part: Option<u32>,
    /// The register.
    #[serde(rename = "cpuid-register")]
    pub register: String,
    /// A bit for each feature that is offered.
    #[serde(rename = "features")]
    pub bits: u32,
}
