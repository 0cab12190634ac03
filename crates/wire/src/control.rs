//! The control connection: messages, and the residue between them.
//!
//! ```text
//! 0 length u32 (of what follows the kind)   4 kind u8   5 content
//! ```

use std::io::{Read, Write};

use content::Domain;
use data_threads::SchedParams;
use facts::disks::{Allowed, Challenge, Moving};
use facts::shape::Shape;
use policy::pace::DestinationUse;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use switchover::{Envelope, MigrationId};

use crate::carry::{Carry, Carrying, Channels};
use crate::error::WireError;
use crate::examine::{Answer, Question};
use crate::part::Part;
use crate::read::le32;

/// Longest message. A shape of a VM with hundreds of devices is some 100 KiB.
const MESSAGE_BYTES_MAX: u64 = 2 << 20;
/// Most values in a message, and so what it takes when it is read: a number is
/// two bytes in JSON and 32 in memory, a field of an object over 100. A shape of
/// a VM with hundreds of devices has some thousands.
const MESSAGE_VALUES_MAX: u64 = 1 << 17;
/// Longest piece of residue in a frame. The head of a VM (its block list) is
/// some KiB, with a thousand blocks below 1 MiB; the tail is cut into pieces.
const RESIDUE_BYTES_MAX: u64 = 4 << 20;

/// What the source asks the destination to prepare for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Prepare {
    /// The migration's id, for both ends' logs and reports.
    pub migration: String,
    /// What both sides' journals call it: no other migration ever has it.
    pub switchover: MigrationId,
    /// The port that the agent that asks listens at, on the host that its
    /// connection comes from.
    pub agent_port: u16,
    /// The agent that asks.
    pub from: String,
    /// The VM's name.
    pub vm: String,
    /// QEMU and its arguments, as the user typed them.
    pub argv: Vec<String>,
    /// The directory its relative paths are meant from.
    pub cwd: String,
    /// Texts to replace in `argv`.
    pub overrides: Vec<(String, String)>,
    /// The source QEMU's version.
    pub qemu: String,
    /// What the live VM is made of.
    pub shape: Part<Shape>,
    /// How the destination can see that storage is shared.
    pub disks: Part<Vec<Challenge>>,
    /// The operator's word that it is.
    pub shared_disks: bool,
    /// Disks that move; lanes number them in this order.
    pub moving: Part<Vec<Moving>>,
    /// What the operator allows for their images.
    pub allowed: Part<Allowed>,
    /// QMP socket of a QEMU that somebody else started there.
    pub incoming_qmp: Option<String>,
    /// The operator's word that less memory than its RAM is enough.
    #[serde(default)]
    pub overcommit: bool,
    /// For the destination's data threads.
    #[serde(default)]
    pub terms: SchedParams,
    /// Pages may come by name.
    #[serde(default)]
    pub sharing: Option<SharingOrder>,
    /// Pages may be read from the VM's own disks.
    #[serde(default)]
    pub storage: Option<StorageOrder>,
    /// The sharing domain that the VM belongs to from now on.
    #[serde(default)]
    pub share_domain: Domain,
    /// The VM has a port for the helper in the guest besides what `argv` says.
    #[serde(default)]
    pub guest_port: bool,
    /// What is compared before the VM is loaded.
    #[serde(default)]
    pub audit: AuditOrder,
    /// The hashes that the audit may be made by, beside XXH3.
    #[serde(default)]
    pub hashes: Vec<String>,
}

/// How the pages that arrived are compared with those that QEMU handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AuditOrder {
    /// Not at all.
    #[default]
    Off,
    /// By what was placed.
    On,
    /// Also by what RAM holds.
    Deep,
}

/// With whom content may be shared, and how it is named.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharingOrder {
    /// The domain that the VM belongs to.
    pub domain: Domain,
    /// What shows that both ends make names with the same key.
    pub print: String,
    /// Content may come from other hosts of the destination's rack.
    #[serde(default)]
    pub rack: bool,
    /// Nobody asked for it by name: what the destination is not configured for is
    /// no news.
    #[serde(default)]
    pub auto: bool,
    /// It is not worth its while unless there is anything to find.
    #[serde(default)]
    pub if_any: bool,
    /// If there is nothing yet, the source may be told to begin later on.
    #[serde(default)]
    pub may_sleep: bool,
}

/// Which disks pages may be read from, and how these are named.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageOrder {
    /// QEMU's paths of the devices; places number them in this order.
    pub devices: Vec<String>,
    /// A secret that names are made with unless content is shared, in hex.
    pub secret: String,
    /// The most bytes per second that are read; none: no bound.
    #[serde(default)]
    pub bytes_per_s: Option<u64>,
}

impl std::fmt::Debug for StorageOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { devices, bytes_per_s, .. } = self;
        f.debug_struct("StorageOrder")
            .field("devices", devices)
            .field("bytes_per_s", bytes_per_s)
            .finish_non_exhaustive()
    }
}

/// What has become of pages of a batch that were to come later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Late {
    /// The batch.
    pub ticket: u32,
    /// Those that are wanted from the source after all, by their place in it. All
    /// others that were to come later are placed.
    pub wanted: Vec<u8>,
    /// They are not: all others still wait.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
}

/// The destination's answer, when it is ready.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Prepared {
    /// What lanes identify themselves with, in hex.
    pub token: String,
    /// The destination QEMU's version.
    pub qemu: String,
    /// Features not used at the destination, and why.
    pub notes: Vec<String>,
    /// Why pages are not read from storage, or not well.
    #[serde(default)]
    pub storage_notes: Vec<String>,
    /// Pages may come by name, as was ordered.
    #[serde(default)]
    pub sharing: bool,
    /// Whether pages are read from each of the disks of the order.
    #[serde(default)]
    pub storage: Vec<bool>,
    /// The hash that the audit is made by; none: XXH3.
    #[serde(default)]
    pub hash: Option<String>,
    /// Pages may come as deltas.
    #[serde(default)]
    pub deltas: bool,
}

/// A RAM block as QEMU announced it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announced {
    /// QEMU's name for it.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

/// From the source.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub enum ToDestination {
    /// Get ready.
    Prepare(Box<Prepare>),
    /// Somebody else moves a VM; instead of an order to prepare.
    Carry(Box<Carry>),
    /// QEMU's channels beside the main one, before the RAM blocks of a VM that is
    /// carried.
    Channels(Channels),
    /// Pages of a VM that is carried can be read from its disks; before its channels and
    /// RAM blocks, and only if the destination waits for content. It answers with
    /// [`ToSource::StorageRead`].
    Storage(StorageOrder),
    /// What the one who connected says is relayed by lanes: as blocks of disk 0 that
    /// follow one another without gaps, once the destination has said what room it has.
    RelayBegins,
    /// It has said all.
    RelayEnds {
        /// So many bytes.
        bytes: u64,
    },
    /// Every batch of a VM that is carried is placed, and RAM has ended.
    Placed {
        /// As in [`ToDestination::Complete`].
        audit: Vec<u64>,
    },
    /// No VM comes; instead of an order to prepare.
    Examine {
        /// What is asked.
        question: Part<Question>,
    },
    /// The RAM blocks; a [`Frame::Head`] follows.
    Blocks {
        /// In the order their numbers on the lanes mean.
        blocks: Vec<Announced>,
        /// QEMU's number for the section `ram`.
        ram_section: u32,
        /// Whether sections end in footers.
        footers: bool,
    },
    /// Make durable what was delivered for a disk.
    FlushDisk {
        /// Comes back with the answer.
        ticket: u64,
        /// Its number.
        disk: u16,
    },
    /// The source could send so many of the pages that the destination waits for
    /// itself, all that it ever could counted.
    Spare {
        /// Never less than before.
        pages: u64,
    },
    /// Other terms for the destination's data threads from now on.
    Terms(SchedParams),
    /// Every batch is placed and the whole residue was sent: load it.
    Complete {
        /// Bytes of tail (or of the whole stream) sent, as a check.
        residue_bytes: u64,
        /// All pages of each RAM block in one number, for the audit (`audit::Ledger`);
        /// empty if there is none.
        #[serde(default)]
        audit: Vec<u64>,
    },
    /// Ranges, by their blocks, whose entries the source wants to see.
    AuditRanges {
        /// Each answered by [`ToSource::AuditEntries`].
        ranges: Vec<(u16, u32)>,
    },
    /// What differs need not be the same: it was never handed over.
    AuditAccepted,
    /// Of the switchover, from `prepared` on.
    Switchover {
        /// What the source is in.
        said: Envelope<switchover::ToDestination>,
    },
    /// It stays at the source, which has not even begun.
    Abort {
        /// Why, for the log.
        reason: String,
    },
}

/// From the destination.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub enum ToSource {
    /// QEMU waits; lanes may come.
    Prepared(Prepared),
    /// What is to be carried goes to a QEMU.
    Carrying(Carrying),
    /// What was asked; the connection ends with it.
    Examined {
        /// The answer.
        answer: Answer,
    },
    /// It can't or won't take the VM.
    Refused {
        /// Why, for the operator.
        reason: String,
    },
    /// How pages are placed, known once the block list is.
    Placement {
        /// Blocks written to directly.
        mapped: Vec<String>,
        /// Blocks written through the residue.
        inline: Vec<String>,
    },
    /// A disk is durable, or can't be made so.
    DiskFlushed {
        /// As it was asked.
        ticket: u64,
        /// Why not.
        error: Option<String>,
    },
    /// The destination's disks have room for more.
    DiskRoom {
        /// So many batches of disk blocks may be sent, all disks' together, and
        /// all that were ever sent counted once. Never less than before.
        batches: u64,
    },
    /// Pages that came by name, and were not there yet.
    Late {
        /// Some batches at a time.
        batches: Vec<Late>,
    },
    /// A block is not as it was handed over: the digests of its ranges.
    AuditDigests {
        /// The block.
        block: u16,
        /// The first range.
        first: u32,
        /// One for each.
        digests: Vec<u64>,
        /// More of them follow, of this block or another.
        more: bool,
    },
    /// What was placed in a range, as it was asked for.
    AuditEntries {
        /// The block.
        block: u16,
        /// The range.
        range: u32,
        /// One for each page (`audit::Entry`).
        entries: Vec<u64>,
    },
    /// RAM doesn't hold what was placed there.
    AuditReread {
        /// In so many pages.
        pages: u64,
        /// Of these blocks, and these pages of theirs, among others.
        examples: Vec<(u16, u32)>,
    },
    /// Nothing differs.
    Audited {
        /// Pages that were read back from RAM.
        reread_pages: u64,
    },
    /// What crosses the destination's NICs: once a second.
    NicUse(DestinationUse),
    /// A feature that is not used there, and why.
    Note {
        /// For the operator.
        text: String,
    },
    /// Of the switchover, from `prepared` on.
    Switchover {
        /// What the destination is in.
        said: Envelope<switchover::ToSource>,
    },
    /// Others that may have the same content are here, or come: from now on pages go by
    /// name.
    Share,
    /// Which disks of a VM that is carried are read.
    StorageRead {
        /// As in [`Prepared`].
        disks: Vec<bool>,
        /// Why others are not.
        notes: Vec<String>,
    },
    /// What the migration took at the destination: said after `running`.
    Cost(Cost),
}

/// What a migration took at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// CPU seconds that its agent's threads spent.
    pub cpu_s: f64,
    /// Most bytes ever buffered.
    pub pool_high_water_bytes: u64,
    /// Pages that came from other hosts of its rack.
    #[serde(default)]
    pub peer_bytes: u64,
    /// Pages that the source sent though somebody else brought the same.
    #[serde(default)]
    pub again_bytes: u64,
    /// Pages that were read from the VM's disks.
    #[serde(default)]
    pub stored_bytes: u64,
    /// What was read from storage for that.
    #[serde(default)]
    pub storage_read_bytes: u64,
    /// How long the VM had run by the time `running` was said.
    pub ran_ms: f64,
}

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A message as JSON.
    Message(Vec<u8>),
    /// The residue's head.
    Head(Vec<u8>),
    /// A piece of the residue's tail.
    Tail(Vec<u8>),
    /// A piece of a stream that could not be split. Empty: the end of one that is
    /// relayed.
    Whole(Vec<u8>),
    /// From the destination: what its QEMU, or disk server, said. Empty: it has closed.
    Back(Vec<u8>),
}

/// What stands before a frame's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    kind: u8,
    content_bytes: u32,
}

impl FrameHeader {
    /// Its length on the wire.
    pub const BYTES: usize = 5;

    /// From a peer's bytes.
    ///
    /// # Errors
    /// If the kind is unknown or the length above the kind's cap.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, WireError> {
        let header = Self { content_bytes: le32(bytes, 0), kind: bytes[4] };
        let (what, max) = match header.kind {
            0 => ("a message", MESSAGE_BYTES_MAX),
            1..=4 => ("a piece of residue", RESIDUE_BYTES_MAX),
            other => {
                return Err(WireError::Unknown { what: "kind of frame", value: u64::from(other) });
            }
        };
        let value = u64::from(header.content_bytes);
        if value > max {
            return Err(WireError::TooLarge { what, value, max });
        }
        Ok(header)
    }
}

impl Frame {
    /// A message as a frame.
    ///
    /// # Errors
    /// If it can't be put as JSON or is too long, which is our own doing.
    pub fn message<M: Serialize>(message: &M) -> Result<Self, WireError> {
        Ok(Self::Message(serde_json::to_vec(message)?))
    }

    fn parts(&self) -> (u8, &[u8]) {
        match self {
            Self::Message(content) => (0, content),
            Self::Head(content) => (1, content),
            Self::Tail(content) => (2, content),
            Self::Whole(content) => (3, content),
            Self::Back(content) => (4, content),
        }
    }

    /// Writes it in one piece.
    ///
    /// # Errors
    /// If it is longer than a peer would take, or the writer fails.
    pub fn write_to(&self, out: &mut impl Write) -> Result<(), WireError> {
        let (kind, content) = self.parts();
        write_frame(kind, content, out)
    }

    /// Writes `bytes` that came back as frames, without a copy.
    ///
    /// # Errors
    /// If the writer fails.
    pub fn write_back(bytes: &[u8], out: &mut impl Write) -> Result<(), WireError> {
        bytes.chunks(1 << 20).try_for_each(|piece| write_frame(4, piece, out))
    }

    /// Writes `residue` as tail (or `whole` stream) frames, without a copy.
    ///
    /// # Errors
    /// If the writer fails.
    pub fn write_residue(
        whole: bool,
        residue: &[u8],
        out: &mut impl Write,
    ) -> Result<(), WireError> {
        for piece in residue.chunks(1 << 20) {
            write_frame(if whole { 3 } else { 2 }, piece, out)?;
        }
        Ok(())
    }
}

fn write_frame(kind: u8, content: &[u8], out: &mut impl Write) -> Result<(), WireError> {
    let content_bytes = u32::try_from(content.len()).unwrap_or(u32::MAX);
    let mut header = [0; FrameHeader::BYTES];
    header[..4].copy_from_slice(&content_bytes.to_le_bytes());
    header[4] = kind;
    FrameHeader::parse(&header)?;
    out.write_all(&header)?;
    out.write_all(content)?;
    Ok(out.flush()?)
}

/// Reads what a message's frame holds.
///
/// # Errors
/// If it is not such a message, or has more in it than any has.
pub fn read_message<M: DeserializeOwned>(json: &[u8]) -> Result<M, WireError> {
    // Before any value but the first stands one of these; some are in texts.
    let marks = json.iter().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count() as u64;
    if marks > MESSAGE_VALUES_MAX {
        let what = "a message with a number of values";
        return Err(WireError::TooLarge { what, value: marks, max: MESSAGE_VALUES_MAX });
    }
    Ok(serde_json::from_slice(json)?)
}

/// Reads one frame. `None` if the peer closed the connection between frames.
///
/// # Errors
/// If the connection breaks or the peer breaks the rules.
pub fn read_frame(from: &mut impl Read) -> Result<Option<Frame>, WireError> {
    let mut header = [0; FrameHeader::BYTES];
    let first = from.read(&mut header)?;
    if first == 0 {
        return Ok(None);
    }
    from.read_exact(&mut header[first..])?;
    let header = FrameHeader::parse(&header)?;
    let mut content = vec![0; header.content_bytes as usize];
    from.read_exact(&mut content)?;
    Ok(Some(match header.kind {
        0 => Frame::Message(content),
        1 => Frame::Head(content),
        2 => Frame::Tail(content),
        3 => Frame::Whole(content),
        _ => Frame::Back(content),
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::carry::Target;

    #[test]
    fn messages_come_back_as_they_went() {
        let said = ToDestination::Complete { residue_bytes: 77, audit: vec![u64::MAX, 0] };
        let mut bytes = Vec::new();
        Frame::message(&said).unwrap().write_to(&mut bytes).unwrap();
        Frame::write_residue(false, &[5; 1_500_000], &mut bytes).unwrap();
        let mut rest = bytes.as_slice();
        let Some(Frame::Message(json)) = read_frame(&mut rest).unwrap() else { panic!() };
        let heard: ToDestination = read_message(&json).unwrap();
        let ToDestination::Complete { residue_bytes: 77, audit } = heard else {
            panic!("{heard:?}")
        };
        assert_eq!(audit, [u64::MAX, 0]);
        let mut tail = 0;
        while let Some(frame) = read_frame(&mut rest).unwrap() {
            let Frame::Tail(piece) = frame else { panic!("{frame:?}") };
            tail += piece.len();
        }
        assert_eq!(tail, 1_500_000);
    }

    #[test]
    fn what_is_carried_goes_both_ways() {
        let said = ToDestination::Carry(Box::new(Carry {
            migration: "1".to_owned(),
            from: "a".to_owned(),
            target: Target::Port(49152).into(),
            terms: SchedParams::default(),
            audit: AuditOrder::On,
            hashes: vec!["aes".to_owned()],
            sharing: None,
        }));
        let mut bytes = Vec::new();
        Frame::message(&said).unwrap().write_to(&mut bytes).unwrap();
        Frame::write_back(&[7; 1_500_000], &mut bytes).unwrap();
        Frame::Back(Vec::new()).write_to(&mut bytes).unwrap();
        let mut rest = bytes.as_slice();
        let Some(Frame::Message(json)) = read_frame(&mut rest).unwrap() else { panic!() };
        let ToDestination::Carry(carry) = read_message(&json).unwrap() else { panic!() };
        assert_eq!(carry.target.read(), Ok(&Target::Port(49152)));
        let mut came = Vec::new();
        while let Some(Frame::Back(piece)) = read_frame(&mut rest).unwrap() {
            came.push(piece.len());
        }
        assert_eq!(came, [1 << 20, 1_500_000 - (1 << 20), 0]);
        // Where to is what another version may say in other words.
        let json = r#"{"say":"carry","migration":"1","from":"a","target":{"vsock":[2,3]}}"#;
        let ToDestination::Carry(carry) = read_message(json.as_bytes()).unwrap() else { panic!() };
        assert!(carry.target.read().is_err());
    }

    #[test]
    fn what_a_vm_is_made_of_is_on_the_wire_as_it_always_was() {
        let shape = r#"{"machine":"pc-q35-7.2","cpu":"max","cpu_features":[{"cpuid-input-eax":7,"cpuid-register":"EBX","features":9}],"vcpus":2,"ram_bytes":5,"memory":[{"id":"m","bytes":5}],"memory_devices":[],"devices":[{"id":null,"kind":"virtio-net-pci"}],"drives":[{"name":"d0","removable":false,"medium":{"driver":"qcow2","files":["/a"],"read_only":false,"bytes":9}}],"nodes":[{"name":"n","driver":"raw","file":"/a","read_only":true}],"images":[{"driver":"file","file":"/a","read_only":false,"bytes":9}]}"#;
        let disks = r#"[{"image":"/a","proof":{"by":"nonce","image":"a","file":"f","nonce":"n","bytes":9}},{"image":"/b","proof":{"by":"network"}}]"#;
        let moving = r#"[{"disk":"d0","format":{"qcow2":{"cluster_bytes":65536,"compat":"1.1","lazy_refcounts":false,"refcount_bits":16,"extended_l2":false}},"bytes":9,"allocated_bytes":5,"challenge":{"image":"/a","proof":{"by":"identity","identity":"i"}}},{"disk":"d1","format":"raw","bytes":9,"allocated_bytes":5,"challenge":{"image":"/a","proof":{"by":"content","bytes":9,"hash":"h"}}}]"#;
        let said = format!(
            r#"{{"say":"prepare","migration":"1","switchover":"7f3a","agent_port":7800,"from":"a","vm":"web1","argv":["qemu"],"cwd":"/","overrides":[],"qemu":"10.0.2","shape":{shape},"disks":{disks},"shared_disks":false,"moving":{moving},"allowed":{{"create":true,"overwrite":false}},"incoming_qmp":null"#
        );
        let heard = read_message::<ToDestination>(format!("{said}}}").as_bytes()).unwrap();
        let ToDestination::Prepare(order) = &heard else { panic!("{heard:?}") };
        assert!(order.shape.read().is_ok() && order.disks.read().is_ok(), "{order:?}");
        assert!(order.moving.read().is_ok() && order.allowed.read().is_ok(), "{order:?}");
        let again = serde_json::to_string(&heard).unwrap();
        assert!(again.starts_with(&said), "{again}");
    }

    #[test]
    fn what_another_version_says_of_a_vm_costs_that_part_alone() {
        let said = r#"{"say":"prepare","migration":"1","switchover":"7f3a","agent_port":7800,"from":"a","vm":"web1","argv":["qemu"],"cwd":"/","overrides":[],"qemu":"10.0.2","shape":{"machine":[]},"disks":7,"shared_disks":false,"moving":[],"allowed":{"create":true,"overwrite":true,"more":1},"incoming_qmp":null}"#;
        let heard = read_message::<ToDestination>(said.as_bytes()).unwrap();
        let ToDestination::Prepare(order) = heard else { panic!("{heard:?}") };
        assert!(order.shape.read().is_err() && order.disks.read().is_err());
        assert!(order.moving.read().unwrap().is_empty() && order.allowed.read().unwrap().overwrite);
        let examine = r#"{"say":"examine","question":{"ask":"facts","programs":"all"}}"#;
        let heard = read_message::<ToDestination>(examine.as_bytes()).unwrap();
        assert!(matches!(heard, ToDestination::Examine { question: Part::Odd(_) }), "{heard:?}");
    }

    #[test]
    fn a_length_above_the_cap_is_refused_before_anything_is_allocated() {
        let error = read_frame(&mut [0xff, 0xff, 0xff, 0xff, 2].as_slice()).unwrap_err();
        assert!(matches!(error, WireError::TooLarge { .. }), "{error}");
    }

    /// What is short on the wire must not be large in memory.
    #[test]
    fn a_message_of_very_many_values_is_refused() {
        let numbers = |count: usize| format!("[0{}]", ",0".repeat(count - 1)).into_bytes();
        let few: Vec<u8> = read_message(&numbers(1000)).unwrap();
        assert_eq!(few.len(), 1000);
        let error = read_message::<serde_json::Value>(&numbers(1 << 18)).unwrap_err();
        assert!(matches!(error, WireError::TooLarge { .. }), "{error}");
        let deep = "[".repeat(1 << 16).into_bytes();
        let error = read_message::<serde_json::Value>(&deep).unwrap_err();
        assert!(matches!(error, WireError::Message(_)), "{error}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_frames_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut rest = bytes.as_slice();
            while let Ok(Some(_)) = read_frame(&mut rest) {}
        }
    }
}
