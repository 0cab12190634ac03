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
    /// The directory that relative paths in `argv` are meant from.
    pub cwd: String,
    /// Its sharing domain.
    #[serde(default)]
    pub share_domain: String,
    /// Whether it gets a port for the helper in the guest, if its machine can have
    /// one.
    #[serde(default = "by_default")]
    pub guest_port: bool,
    /// Whether it gets a balloon by which its guest says which memory is free.
    #[serde(default)]
    pub free_page_hint: bool,
}

fn by_default() -> bool {
    true
}

/// Adopt a VM that somebody else started.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct AttachRequest {
    /// The name it gets here.
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
    /// Pull the plug at once.
    #[serde(default)]
    pub force: bool,
    /// How long the guest may take to shut down before the plug is pulled.
    #[serde(default = "default_stop_timeout_s")]
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
    /// It was told to, or did not in time: QEMU was ended.
    PlugPulled,
    /// QEMU was gone already; its record is removed.
    WasDead,
}

/// An operator's decision about a VM that is in doubt: the body of
/// `POST /v1/vms/NAME/resolve`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolveRequest {
    /// Whose it is.
    pub side: ResolveSide,
    /// The operator's word that the VM can't run on the other side (for `here`),
    /// or that it runs there (for `there`).
    pub certain: bool,
}

/// Whose a VM is that is in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ResolveSide {
    /// It goes on here.
    Here,
    /// It is the other host's, and what is left of it here goes.
    There,
}

/// What a VM is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmStatus {
    /// Its vCPUs run.
    Running,
    /// Its owner (or an error on its disks) stopped it.
    Paused,
    /// It is arriving here; it runs at its source.
    Arriving,
    /// Its switchover was cut off, and the other host has not said what became
    /// of it: `problem` says what to do.
    InDoubt,
    /// What the agent keeps of it can't be read, or doesn't say what is to become of
    /// its QEMU, which may run: `problem` says what to do. Nothing is done with it.
    Unreadable,
    /// QEMU is gone.
    Dead,
}

/// How much its host's agent knows of what a VM contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KnownContent {
    /// How many times all of its memory was looked at.
    pub rounds: u64,
    /// Memory that others can have by name.
    pub named_bytes: u64,
}

/// Whether a VM has the helper in its guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum GuestHelper {
    /// It answers.
    Answers {
        /// Its version, such as `0.1.0`: the guest's word.
        version: String,
        /// Whether the guest's kernel clears each page that it allocates; none if it does
        /// not say.
        #[serde(default)]
        clears_memory: Option<bool>,
    },
    /// The VM has no port at which it could be asked.
    NoPort {
        /// Why not.
        why: String,
    },
    /// There is a port, and nobody answers there.
    Silent {
        /// Why not.
        why: String,
    },
    /// It was not asked.
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
    /// Guest RAM.
    pub ram_bytes: u64,
    /// Whether it has a balloon by which its guest says which memory is free.
    #[serde(default)]
    pub free_page_hint: bool,
    /// Whether it was started elsewhere and adopted.
    pub attached: bool,
    /// The migration that moves it now.
    pub migration: Option<String>,
    /// What is wrong with it; for a dead VM the end of QEMU's log.
    #[serde(default)]
    pub problem: Option<String>,
    /// Its sharing domain; empty is the cluster's own.
    #[serde(default)]
    pub share_domain: String,
    /// What is known of its content, where one VM is asked for and its host's agent
    /// looks at it.
    #[serde(default)]
    pub content: Option<KnownContent>,
    /// The helper in its guest, where one VM is asked for.
    #[serde(default)]
    pub helper: Option<GuestHelper>,
    /// The user's command line.
    pub argv: Vec<String>,
}
