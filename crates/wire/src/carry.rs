//! A migration that another manager commands, such as libvirt, and that two agents carry.
//!
//! ```text
//! source                                  destination
//! QEMU connects
//!        carry (where to) ------------->  connects to the QEMU there
//!        <------------- carrying (which VM)
//!        whole ... <----------> back ...  relayed: either end may speak first
//! or     relay-begins, relay-ends ----->  relayed by lanes, as blocks of a disk
//!        <----------- disk-room, back ...
//! or     channels, blocks, head ------->  opens them, and lanes
//!        tail ... <------------- back ... the destination QEMU's own answers
//!        placed ----------------------->  audits, feeds the tail
//! ```
//!
//! Neither agent decides anything: SHUT, in `back`, is the commit, and the end of the connection is
//! the only abort.

use data_threads::SchedParams;
use serde::{Deserialize, Serialize};

use crate::control::{AuditOrder, SharingOrder};
use crate::part::Part;

/// Where the destination's QEMU listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// At this port of its host's migration address.
    Port(u16),
    /// At this socket.
    Path(String),
    /// In the pod of a KubeVirt VM.
    Vmi {
        /// The VM's UID.
        uid: String,
        /// KubeVirt's number for what the socket carries.
        port: u16,
    },
}

/// The order to carry a migration.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Carry {
    /// The migration's id, for both ends' logs.
    pub migration: String,
    /// The source agent's name.
    pub from: String,
    /// Where the destination's QEMU listens.
    pub target: Part<Target>,
    /// How the destination's data threads are scheduled.
    #[serde(default)]
    pub terms: SchedParams,
    /// What is compared before the VM is loaded, if the stream is split.
    #[serde(default)]
    pub audit: AuditOrder,
    /// See [`Prepare`](crate::Prepare).
    #[serde(default)]
    pub hashes: Vec<String>,
    /// Pages may be sent by name, if the stream is split.
    pub sharing: Option<SharingOrder>,
}

/// The destination is connected to its QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carrying {
    /// The token that identifies lanes, in hex.
    pub token: String,
    /// The VM's name, if its QEMU has one.
    pub vm: Option<String>,
    /// Its UUID.
    pub uuid: Option<String>,
    /// Features not used at the destination, and why.
    #[serde(default)]
    pub notes: Vec<String>,
    /// The hash of the audit; none means XXH3.
    pub hash: Option<String>,
    /// Pages may be sent by name, as ordered.
    #[serde(default)]
    pub sharing: bool,
    /// A relayed stream may be sent by lanes.
    #[serde(default)]
    pub relays_by_lanes: bool,
    /// Nothing may be sent by name before the destination sends [`ToSource::Share`].
    ///
    /// [`ToSource::Share`]: crate::ToSource::Share
    #[serde(default)]
    pub sleeps: bool,
    /// See [`Prepared`](crate::Prepared).
    #[serde(default)]
    pub deltas: bool,
    /// See [`Prepared`](crate::Prepared).
    #[serde(default)]
    pub names_with_bodies: bool,
    /// It may be ordered to wait for content from other providers, and how much of that the lanes
    /// could send.
    #[serde(default)]
    pub waits: bool,
}

/// The multifd channels that the destination is to open to its QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channels {
    /// The first message of each as the source's QEMU wrote it, in hex, in the order in which QEMU
    /// connected them.
    pub first: Vec<String>,
    /// Whether QEMU expects a SYNC at the end of each RAM section.
    pub sync_by_section: bool,
}
