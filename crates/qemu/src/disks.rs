//! Do both hosts see the same disks? Shown, not believed.
//!
//! A file of the same name at the destination may be a stale copy, and a VM
//! that runs from it destroys its data quietly. So for each image the source
//! makes a challenge that only a host with the same storage can meet: a file
//! with a nonce beside the image, or the identity that a block device's
//! hardware or volume manager gives it, or, where nothing writes to the image,
//! its content.
//!
//! Disks that move instead are the other way round: their images at the
//! destination must be shown to be others than the source's, or the copy would
//! overwrite what it is made from.

mod block_device;
mod challenge;
mod choose;
mod cleanup;
mod image_error;
mod images;
mod list;
mod other;
mod qemu_img;
mod verify;

pub(crate) use challenge::NETWORK;
pub use challenge::challenges;
pub use choose::{Choice, ChoiceError, WhichDisks, choose, without_moving};
pub use cleanup::Cleanup;
pub use image_error::{ImageError, ImageProblem};
pub use images::{Allowed, Moving, Prepared, PreparedImage, moving, prepare, remove_made};
pub(crate) use list::guest_id;
pub use list::{Disk, Format, Qcow2, Stays, disks};
pub use qemu_img::QemuImg;

use serde::{Deserialize, Serialize};

/// Most bytes of an image that are read to compare contents. Reading at both
/// ends at once, a disk of 200 MB/s takes 20 s for it.
const CONTENT_BYTES_MAX: u64 = 4 << 30;

/// What the destination has to show for one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// The image, as an absolute path or as QEMU names it.
    pub image: String,
    /// How it can be shown.
    pub proof: Proof,
}

/// How it can be shown that an image is the same at both hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum Proof {
    /// A file beside the image holds this.
    Nonce {
        /// The image's own file name.
        image: String,
        /// The file's name.
        file: String,
        /// What it holds.
        nonce: String,
        /// The image's length.
        bytes: u64,
    },
    /// The image has this content, and nothing writes to it.
    Content {
        /// Its length.
        bytes: u64,
        /// Its BLAKE3 hash, in hex.
        hash: String,
    },
    /// The block device has this identity.
    Identity {
        /// As sysfs tells it.
        identity: String,
    },
    /// Its name is the same wherever it is opened: a network service.
    Network,
    /// It can't be shown.
    Impossible {
        /// Why.
        reason: String,
    },
}

/// An image that the two hosts were not shown to share.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{image} is not shown to be the same at both hosts: {reason}")]
pub struct NotShared {
    /// The image, as it is called at the destination.
    pub image: String,
    /// Why not.
    pub reason: String,
}

impl Challenge {
    /// Whether this host meets it; `overrides` say what the image is called
    /// here. The challenge comes from a peer.
    ///
    /// # Errors
    /// With the reason if it doesn't.
    pub fn verify(&self, overrides: &[(String, String)]) -> Result<(), NotShared> {
        let image = crate::command_line::overridden(&self.image, overrides);
        verify::verify(&image, &self.proof).map_err(|reason| NotShared { image, reason })
    }
}

#[cfg(test)]
mod tests;
