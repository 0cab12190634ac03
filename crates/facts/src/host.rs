//! What an agent knows of its host. A newer agent may send more fields, an older one fewer: a
//! missing field has its default, which means unknown.

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
    /// The version of the protocol between agents.
    pub wire: u16,
    /// Linux's version.
    pub kernel: String,
    /// The kernel's clock source.
    pub clock_source: Option<String>,
    /// KVM.
    pub kvm: Kvm,
    /// The time stamp counter, according to KVM; none without KVM.
    pub tsc: Option<Tsc>,
    /// The user that QEMUs run as.
    pub qemu_user: QemuUser,
    /// Control groups.
    pub cgroups: Cgroups,
    /// What decides whether the agent can reach QEMUs' memory.
    pub reach: Reach,
    /// The network cards that carry data.
    pub nics: Vec<Nic>,
    /// Memory.
    pub memory: HostMemory,
    /// When the kernel gives shared memory huge pages by itself, such as `never` or `advise`; none
    /// if it is unknown.
    pub shared_huge_pages: Option<String>,
    /// The state directory.
    pub state: State,
    /// Where the agent listens, and who can connect there.
    pub network: Network,
    /// How other users of this host can read passwords in the agent's settings.
    pub exposed: Vec<String>,
    /// Migrations that the agent carries for others; none if it carries none.
    pub carries: Option<Carries>,
    /// QEMU programs: the one in PATH, and those of VMs.
    pub programs: Vec<Program>,
    /// The VMs here.
    pub vms: Vec<VmFacts>,
    /// QEMUs that upgrades of VMs left, with what to do about each.
    pub left_over: Vec<String>,
    /// Names of variables in the environment of QEMUs that the agent starts, of those that decide
    /// which code QEMU loads.
    pub environment: Vec<String>,
    /// The taps that another host asked for, by their names.
    pub taps: Vec<(String, Tap)>,
}

/// The state of a tap device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tap {
    /// It is not known.
    #[default]
    Unknown,
    /// It doesn't exist.
    Missing,
    /// It is down, or its bridge is.
    Down,
    /// It is up, on no bridge, and the host has no address and no route there.
    Alone,
    /// It is up, and on a bridge or routed.
    Connected,
}

/// Whether the agent can use KVM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kvm {
    /// The agent has not checked.
    #[default]
    Unknown,
    /// The agent can use it.
    Usable,
    /// There is no KVM.
    Missing,
    /// It exists, but can't be opened.
    Denied(String),
}

/// The time stamp counter that KVM guests get, unless their QEMU sets another frequency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tsc {
    /// How fast it counts.
    pub khz: u32,
    /// Whether the processor can scale the guest's counter to another frequency.
    pub scales: bool,
}

/// The user that QEMUs run as.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QemuUser {
    /// Whether it is root.
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
    /// The agent's own group.
    pub path: String,
    /// Whether the agent may create groups in it.
    pub delegated: bool,
    /// The controllers that are available there.
    pub controllers: Vec<String>,
    /// Whether the agent's file forbids their use.
    pub forbidden: bool,
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
    /// Its speed; none if it is unknown.
    pub speed_bytes_per_s: Option<u64>,
    /// Whether the operator set that speed.
    pub said: bool,
    /// Its MTU.
    pub mtu: Option<u32>,
    /// Why its properties can't be read.
    pub problem: Option<String>,
}

/// The state directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct State {
    /// Where.
    pub path: String,
    /// Free space there; none if it is unknown.
    pub free_bytes: Option<u64>,
    /// The size of its file system; 0 if it is unknown.
    pub total_bytes: u64,
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
    /// A warning if its certificate expires soon, or other agents refuse it.
    pub certificate: Option<String>,
    /// Whether other agents refuse its certificate now: it has expired, or is not valid yet.
    pub certificate_refused: bool,
}

/// Migrations that others command, such as libvirt, and that the agent carries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Carries {
    /// The directory of its sockets.
    pub directory: String,
    /// The user that QEMUs run as, which may connect besides root; or several, joined by `and`.
    pub qemu_user: Option<String>,
    /// Whether libvirt is installed here.
    pub libvirt: bool,
    /// The manager that moves VMs here, if it is not libvirt.
    pub manager: Option<String>,
    /// Why the agent can't open sockets whose paths others control; none if it can.
    pub refused: Option<String>,
    /// The address of a network at which QEMUs wait for VMs; none if only this host reaches them.
    pub open_address: Option<String>,
    /// Ports at which other hosts reach QEMUs that wait for VMs now.
    pub open_ports: Vec<u16>,
    /// Settings that libvirt's `qemu.conf` lacks, so that other hosts' libvirt would not connect to
    /// their agents. With another manager: why VMs leave here without the agent.
    pub missing: Vec<String>,
}

/// One of QEMU's programs with one accelerator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Program {
    /// The name by which it is started.
    pub name: String,
    /// The accelerator, as in `accel=`.
    pub accelerator: String,
    /// What it can do.
    pub known: Option<Capabilities>,
    /// Why its capabilities are not known.
    pub problem: Option<String>,
}

/// The properties of a VM that decide where it can run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VmFacts {
    /// Its name.
    pub name: String,
    /// The program of its QEMU.
    pub program: String,
    /// The version of the QEMU that runs it.
    pub qemu: (u32, u32, u32),
    /// Its accelerator, as in `accel=`.
    pub accelerator: String,
    /// Its machine type; empty if its QEMU did not report it.
    pub machine: String,
    /// Its CPU model, if its command line names one.
    pub cpu: Option<String>,
    /// Its RAM.
    pub ram_bytes: u64,
    /// RAM that it takes in ordinary pages; none if that isn't known.
    pub pages_bytes: Option<u64>,
    /// Sizes of huge pages that it uses, and the bytes in each size.
    pub huge_bytes: Vec<(u64, u64)>,
    /// RAM that other processes can map, such as a memfd.
    pub shared_bytes: u64,
    /// Whether its guest reports its free pages.
    pub free_page_hint: bool,
    /// Whether its QEMU may crash when the guest resets a network card: an earlier agent moved it
    /// here.
    pub may_crash_at_reset: bool,
    /// Whether its QEMU's program was replaced on disk since it started.
    pub program_replaced: bool,
    /// Whether its QEMU has root's rights.
    pub runs_as_root: bool,
    /// Names of such variables with which its QEMU was started, and that the agent's own QEMUs lack.
    pub environment: Vec<String>,
    /// Why its vCPUs can't be throttled; none if they can.
    pub unthrottled: Option<String>,
    /// The cgroups between which CPU time is divided by weight: one with the agent, and one with
    /// the VM. None if there are no such groups.
    pub cpu_weights: Option<[(String, u64); 2]>,
    /// Why its QEMU can't migrate it, each with the device; empty if nothing is known.
    pub blockers: Vec<String>,
    /// Whether its QEMU loses what its guest writes while it moves.
    pub loses_writes: bool,
    /// The taps of its network cards, without those that a script connects.
    pub taps: Vec<String>,
    /// Why the agent could not access its memory directly.
    pub unreached: Option<String>,
}

impl Facts {
    /// What is known of a program with an accelerator.
    #[must_use]
    pub fn program(&self, name: &str, accelerator: &str) -> Option<&Program> {
        self.programs.iter().find(|one| one.name == name && one.accelerator == accelerator)
    }

    /// What is known of a tap.
    #[must_use]
    pub fn tap(&self, name: &str) -> Tap {
        let found = self.taps.iter().find(|(tap, _)| tap == name);
        found.map(|(_, state)| *state).unwrap_or_default()
    }
}
