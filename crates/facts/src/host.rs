//! What an agent sees of its host. A newer agent may tell more, and an older
//! one less: what is missing has its default, which means that it isn't known.

use serde::{Deserialize, Serialize};

use crate::memory::HostMemory;
use crate::program::Capabilities;

/// One host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    /// Its name.
    pub host: String,
    /// Droveway's version.
    pub droveway: String,
    /// The version of what agents say to each other.
    pub wire: u16,
    /// Linux's version.
    pub kernel: String,
    /// What the kernel takes the time from.
    pub clock_source: Option<String>,
    /// KVM.
    pub kvm: Kvm,
    /// What KVM says of the time stamp counter; none without KVM.
    pub tsc: Option<Tsc>,
    /// Who QEMUs run as.
    pub qemu_user: QemuUser,
    /// Control groups.
    pub cgroups: Cgroups,
    /// Whether QEMUs' memory can be reached.
    pub reach: Reach,
    /// The network cards that carry data.
    pub nics: Vec<Nic>,
    /// Memory.
    pub memory: HostMemory,
    /// The state directory.
    pub state: State,
    /// Where it listens, and how open that is.
    pub network: Network,
    /// What it carries for others; none if it doesn't.
    pub carries: Option<Carries>,
    /// QEMU's programs: that of PATH, and those of VMs.
    pub programs: Vec<Program>,
    /// The VMs here.
    pub vms: Vec<VmFacts>,
}

/// Whether the agent can use KVM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kvm {
    /// Nobody looked.
    #[default]
    Unknown,
    /// It can.
    Usable,
    /// There is none.
    Missing,
    /// There is, and it can't be opened.
    Denied(String),
}

/// The time stamp counter that guests of KVM have, unless their QEMU asks for another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tsc {
    /// How fast it counts.
    pub khz: u32,
    /// Whether the processor can let a guest's count at another speed.
    pub scales: bool,
}

/// Who QEMUs run as.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QemuUser {
    /// Whether that is root.
    pub root: bool,
    /// Whether the operator chose it.
    pub chosen: bool,
}

/// Control groups.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cgroups {
    /// 1 or 2; none if there are none.
    pub version: Option<u8>,
    /// The agent's own.
    pub path: String,
    /// Whether the agent may make groups in it.
    pub delegated: bool,
    /// What they can control there.
    pub controllers: Vec<String>,
}

/// What decides whether the agent can reach another process's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reach {
    /// It has `CAP_SYS_PTRACE`.
    pub ptrace: bool,
    /// Yama's `ptrace_scope`; none without Yama.
    pub yama: Option<u8>,
}

/// A network card that carries data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nic {
    /// Its address.
    pub address: String,
    /// Its name.
    pub name: String,
    /// What it can carry; none if nobody knows.
    pub speed_bytes_per_s: Option<u64>,
    /// Whether the operator said so.
    pub said: bool,
    /// Its longest packet.
    pub mtu: Option<u32>,
    /// Why it can't be looked at.
    pub problem: Option<String>,
}

/// The state directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct State {
    /// Where.
    pub path: String,
    /// What is free there; none if it can't be seen.
    pub free_bytes: Option<u64>,
}

/// Where the agent listens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Network {
    /// Its address and port.
    pub listen: String,
    /// Whether only this host reaches that.
    pub loopback: bool,
    /// `--insecure-plaintext`.
    pub plaintext: bool,
    /// That its certificate ends soon, or has ended.
    pub certificate: Option<String>,
}

/// Migrations that others command, such as libvirt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Carries {
    /// The directory of its sockets.
    pub directory: String,
    /// The user that QEMUs run as, who may connect besides root.
    pub qemu_user: Option<String>,
    /// Whether there is libvirt here.
    pub libvirt: bool,
    /// Who moves VMs here, if not libvirt.
    pub manager: Option<String>,
    /// What its `qemu.conf` doesn't say, so that other hosts' libvirt would not come to
    /// their agents.
    pub missing: Vec<String>,
}

/// One of QEMU's programs with one accelerator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Program {
    /// As it is called.
    pub name: String,
    /// As `accel=` takes it.
    pub accelerator: String,
    /// What it can do.
    pub known: Option<Capabilities>,
    /// Why that isn't known.
    pub problem: Option<String>,
}

/// A VM, as far as it decides where it can run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VmFacts {
    /// Its name.
    pub name: String,
    /// The program of its QEMU.
    pub program: String,
    /// The version of the QEMU that runs it.
    pub qemu: (u32, u32, u32),
    /// As `accel=` takes it.
    pub accelerator: String,
    /// Its machine type; empty if its QEMU did not say.
    pub machine: String,
    /// Its CPU model, if its command line names one.
    pub cpu: Option<String>,
    /// Its RAM.
    pub ram_bytes: u64,
    /// What it takes of ordinary memory; none if that isn't known.
    #[serde(default)]
    pub pages_bytes: Option<u64>,
    /// Sizes of huge pages that it takes, and the bytes of each.
    #[serde(default)]
    pub huge_bytes: Vec<(u64, u64)>,
    /// Of its RAM, what other processes may map, such as a memfd.
    #[serde(default)]
    pub shared_bytes: u64,
    /// Whether its guest says which of it is free.
    #[serde(default)]
    pub free_page_hint: bool,
    /// Why pages could not be written to or read from its memory directly.
    pub unreached: Option<String>,
}

impl Facts {
    /// What is known of a program with an accelerator.
    #[must_use]
    pub fn program(&self, name: &str, accelerator: &str) -> Option<&Program> {
        self.programs.iter().find(|one| one.name == name && one.accelerator == accelerator)
    }
}
