//! A migration that somebody else commands, such as libvirt, and two agents carry.
//!
//! ```text
//! source                                  destination
//! QEMU connects
//!        carry (where to) ------------->  connects to the QEMU there
//!        <------------- carrying (whose)
//!        whole ... <----------> back ...  relayed: whoever speaks first
//! or     relay-begins, relay-ends ----->  relayed by lanes, as blocks of a disk
//!        <----------- disk-room, back ...
//! or     channels, blocks, head ------->  opens them, and lanes
//!        tail ... <------------- back ... the destination QEMU's own answers
//!        placed ----------------------->  audits, feeds the tail
//! ```
//!
//! Neither end decides anything: SHUT, in `back`, is the commit, and the end of the
//! connection the only abort.

use data_threads::SchedParams;
use serde::{Deserialize, Serialize};

use crate::control::{AuditOrder, SharingOrder};
use crate::part::Part;

/// Where the destination's QEMU waits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// At this port of its host's address for migrations.
    Port(u16),
    /// At this socket.
    Path(String),
    /// In the pod of a VM of KubeVirt's.
    Vmi {
        /// The VM's UID.
        uid: String,
        /// KubeVirt's number for what comes.
        port: u16,
    },
}

/// What the destination is to carry.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Carry {
    /// The migration's id, for both ends' logs.
    pub migration: String,
    /// The agent that asks.
    pub from: String,
    /// Where to.
    pub target: Part<Target>,
    /// For the destination's data threads.
    #[serde(default)]
    pub terms: SchedParams,
    /// What is compared before the VM is loaded, if the stream is split.
    #[serde(default)]
    pub audit: AuditOrder,
    /// As in [`Prepare`](crate::Prepare).
    #[serde(default)]
    pub hashes: Vec<String>,
    /// Pages may come by name, if the stream is split.
    #[serde(default)]
    pub sharing: Option<SharingOrder>,
}

/// The destination is connected to its QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carrying {
    /// What lanes identify themselves with, in hex.
    pub token: String,
    /// The VM's name, if its QEMU was told one.
    #[serde(default)]
    pub vm: Option<String>,
    /// Its UUID.
    #[serde(default)]
    pub uuid: Option<String>,
    /// Features not used at the destination, and why.
    #[serde(default)]
    pub notes: Vec<String>,
    /// The hash that the audit is made by; none: XXH3.
    #[serde(default)]
    pub hash: Option<String>,
    /// Pages may come by name, as was ordered.
    #[serde(default)]
    pub sharing: bool,
    /// What is relayed may come by lanes.
    #[serde(default)]
    pub relays_by_lanes: bool,
    /// Nothing goes by name before the destination says [`ToSource::Share`].
    ///
    /// [`ToSource::Share`]: crate::ToSource::Share
    #[serde(default)]
    pub sleeps: bool,
    /// As in [`Prepared`](crate::Prepared).
    #[serde(default)]
    pub deltas: bool,
    /// It may be told to wait for content from elsewhere, and what lanes could send of
    /// that.
    #[serde(default)]
    pub waits: bool,
}

/// The multifd channels that the destination is to open to its QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channels {
    /// The first message of each as the source's QEMU wrote it, in hex, in the order in
    /// which it connected.
    pub first: Vec<String>,
    /// QEMU waits for a SYNC at the end of each RAM section.
    pub sync_by_section: bool,
}
