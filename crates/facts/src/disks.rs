//! A VM's disks as the source describes them: those that both hosts see, and those that move.

use serde::{Deserialize, Serialize};

/// What the destination must prove about one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// The image, as an absolute path or as QEMU names it.
    pub image: String,
    /// How it can prove it.
    pub proof: Proof,
}

/// How a host proves that its image is the same as the source's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum Proof {
    /// A file next to the image holds this.
    Nonce {
        /// The image's own file name.
        image: String,
        /// The file's name.
        file: String,
        /// What it holds.
        nonce: String,
        /// The image's length.
        bytes: u64,
        /// The BLAKE3 hash of an image that nothing writes to, in hex: where the file isn't found,
        /// a copy with this content will do.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        content: Option<String>,
    },
    /// The image has this content, and nothing writes to it.
    Content {
        /// Its length.
        bytes: u64,
        /// Its BLAKE3 hash, in hex.
        hash: String,
    },
    /// A block device with this identity.
    Identity {
        /// The identity, from sysfs.
        identity: String,
    },
    /// A network service, whose name is the same on every host.
    Network {
        /// The id of the Ceph cluster that the source's configuration names.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cluster: Option<String>,
    },
    /// There is no proof.
    Impossible {
        /// Why.
        reason: String,
    },
}

/// A disk that moves, as the source describes it to the destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moving {
    /// Its name.
    pub disk: String,
    /// The image's format.
    pub format: Format,
    /// The size that the guest sees.
    pub bytes: u64,
    /// Bytes that the image and its backing files occupy at the source.
    pub allocated_bytes: u64,
    /// The image, and the proof by which another host recognizes it.
    pub challenge: Challenge,
}

/// What an operator allows at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allowed {
    /// Creating images that don't exist.
    pub create: bool,
    /// Overwriting images that hold data.
    pub overwrite: bool,
}

/// The formats of images that can be created and exported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// As the guest sees it.
    Raw,
    /// QEMU's own.
    Qcow2(Qcow2),
}

impl Format {
    /// QEMU's name for it.
    #[must_use]
    pub fn driver(&self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2(_) => "qcow2",
        }
    }
}

/// The properties of a qcow2 image that its copy must have too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Qcow2 {
    /// The size of its clusters.
    pub cluster_bytes: u64,
    /// Its version: `0.10` or `1.1`.
    pub compat: String,
    /// Whether reference counts may be rebuilt after a crash.
    pub lazy_refcounts: bool,
    /// The width of reference counts.
    pub refcount_bits: u64,
    /// Whether clusters have subclusters.
    pub extended_l2: bool,
}

impl Default for Qcow2 {
    fn default() -> Self {
        Self {
            cluster_bytes: 64 << 10,
            compat: "1.1".to_owned(),
            lazy_refcounts: false,
            refcount_bits: 16,
            extended_l2: false,
        }
    }
}
