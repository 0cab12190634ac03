//! VMs of one host, as the API shows them.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Start a VM under this agent.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RunRequest {
    /// The VM's name, unique on its host.
    pub name: String,
    /// QEMU and its arguments, as the user typed them.
    pub argv: Vec<String>,
    /// The directory that relative paths in `argv` start from.
    pub cwd: String,
    /// Its sharing domain.
    #[serde(default)]
    pub share_domain: String,
    /// Whether to add a port for the helper in the guest, if the machine type can have one.
    #[serde(default = "by_default")]
    pub guest_port: bool,
    /// Whether to add a balloon device with free-page hinting.
    #[serde(default)]
    pub free_page_hint: bool,
    /// Whether to put all RAM into shared memory that another QEMU on its host can map.
    #[serde(default)]
    pub hand_over: bool,
}

fn by_default() -> bool {
    true
}

/// Adopt a VM that this agent did not start.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct AttachRequest {
    /// The name to give it.
    pub name: String,
    /// Its QMP socket.
    pub qmp: String,
    /// Its sharing domain.
    #[serde(default)]
    pub share_domain: String,
}

/// How to stop a VM: the query of `DELETE /v1/vms/NAME`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct StopHow {
    /// End QEMU at once, without a shutdown of the guest.
    #[serde(default)]
    pub force: bool,
    /// How long the guest may take to shut down before QEMU is ended.
    #[serde(default = "default_stop_timeout_s")]
    #[param(maximum = 3600)]
    pub timeout_s: u64,
}

/// Guests with services to stop take tens of seconds.
fn default_stop_timeout_s() -> u64 {
    60
}

/// What `DELETE /v1/vms/NAME` answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Stopped {
    /// How it ended.
    pub end: StopEnd,
}

/// How a stopped VM ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StopEnd {
    /// The guest shut itself down.
    ShutDown,
    /// QEMU was ended: by `force`, or because the guest did not shut down in time.
    PlugPulled,
    /// QEMU had ended before; the VM's record is removed.
    WasDead,
}

/// An operator's decision about a VM that is in doubt: the body of
/// `POST /v1/vms/NAME/resolve`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolveRequest {
    /// The host that the VM belongs to.
    pub side: ResolveSide,
    /// The operator's confirmation that the VM can't run on the other side (for `here`),
    /// or that it runs there (for `there`).
    pub certain: bool,
}

/// The host that a VM in doubt belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ResolveSide {
    /// This host: the VM continues here.
    Here,
    /// The other host: what is left of the VM here is removed.
    There,
}

/// What a VM is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmStatus {
    /// Its vCPUs run.
    Running,
    /// Its owner, or an error on its disks, stopped it.
    Paused,
    /// It is arriving here, and still runs at its source.
    Arriving,
    /// Its switchover was interrupted, and the other host has not reported the outcome:
    /// `problem` has what to do.
    InDoubt,
    /// Its record can't be read, or doesn't decide what to do with its QEMU, which may run.
    ///
    /// The agent does nothing with it; `problem` has what to do.
    Unreadable,
    /// QEMU has ended.
    Dead,
}

/// How much of a VM's content its host's agent knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KnownContent {
    /// Scans of all of its memory so far.
    pub rounds: u64,
    /// Memory that other VMs can get by name.
    pub named_bytes: u64,
}

/// The state of the helper in a VM's guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum GuestHelper {
    /// It answers.
    Answers {
        /// Its version, such as `0.1.0`, as the guest reports it.
        version: String,
        /// Whether the guest's kernel clears each page that it allocates; none if the helper
        /// does not report it.
        #[serde(default)]
        clears_memory: Option<bool>,
    },
    /// The VM has no port for the helper.
    NoPort {
        /// Why not.
        why: String,
    },
    /// The VM has the port, but nothing answers on it.
    Silent {
        /// Why not.
        why: String,
    },
    /// The helper was not queried.
    NotAsked {
        /// Why not.
        why: String,
    },
}

/// One VM.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct VmSummary {
    /// Its name.
    pub name: String,
    /// What it is doing.
    pub status: VmStatus,
    /// QEMU's process.
    pub pid: u32,
    /// QEMU's version, such as `10.0.2`.
    pub qemu: String,
    /// Whether QEMU's program was replaced on disk since it started, as far as that is known.
    #[serde(default)]
    pub program_replaced: bool,
    /// Guest RAM.
    pub ram_bytes: u64,
    /// Whether it has a balloon device with free-page hinting.
    #[serde(default)]
    pub free_page_hint: bool,
    /// Whether it was adopted, not started by this agent.
    pub attached: bool,
    /// The migration that moves it now.
    pub migration: Option<String>,
    /// What is wrong with it; for a dead VM the end of QEMU's log.
    #[serde(default)]
    pub problem: Option<String>,
    /// A QEMU that an upgrade of it left, and what to do; none if there is none.
    #[serde(default)]
    pub left_over: Option<String>,
    /// Its sharing domain; empty is the cluster's default domain.
    #[serde(default)]
    pub share_domain: String,
    /// What is known of its content: only for a single VM that its host's agent scans.
    #[serde(default)]
    pub content: Option<KnownContent>,
    /// The helper in its guest: only for a single VM.
    #[serde(default)]
    pub helper: Option<GuestHelper>,
    /// The user's command line. Over TCP its secrets are hidden from all but admins.
    pub argv: Vec<String>,
}
