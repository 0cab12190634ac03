//! Proves that both hosts see the same disks.
//!
//! A file of the same name at the destination may be a stale copy, and a VM
//! that runs from it silently loses data. So for each image the source
//! makes a challenge that only a host with the same storage can meet: a file
//! with a nonce next to the image, or the identity that a block device's
//! hardware or volume manager gives it, or, where nothing writes to the image,
//! its content.
//!
//! For disks that move it is the reverse: their images at the destination must
//! be proven to be others than the source's, or the copy would overwrite its own
//! source.

mod block_device;
mod challenge;
mod choose;
mod cleanup;
mod image_error;
mod images;
mod list;
mod network;
mod other;
mod passed_through;
mod place;
mod promises;
mod qemu_img;
mod served;
mod verify;

pub use facts::disks::{Allowed, Challenge, Format, Moving, Proof, Qcow2};

pub(crate) use challenge::NETWORK;
pub use challenge::challenges;
pub use choose::{Choice, ChoiceError, WhichDisks, choose, without_moving};
pub use cleanup::Cleanup;
pub use image_error::{ImageError, ImageProblem};
pub(crate) use images::identity_of;
pub use images::{Prepared, PreparedImage, moving, prepare, remove_made};
pub(crate) use list::guest_id;
pub use list::{Disk, Stays, disks};
pub(crate) use passed_through::device_path;
pub use promises::Promises;
pub use qemu_img::QemuImg;

use crate::command_line::overridden;
use crate::launch::User;

/// Most bytes of an image that are read to compare contents, where nothing else can be compared.
const CONTENT_BYTES_MAX: u64 = 4 << 30;

/// Asked again and again while an image's content is read, which may take minutes: an error, with
/// the reason, ends that.
pub type GoesOn<'g> = &'g dyn Fn() -> Result<(), String>;

/// An image that is not proven to be shared by both hosts. Its text is for the peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{image} can't be proved to be the same at both hosts: {}", reason.for_peer())]
pub struct NotShared {
    /// The image, as it is called at the destination.
    pub image: String,
    /// Why not.
    pub reason: Reason,
}

/// Why an image is not proven to be shared by both hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It is in what the peer sent.
    Known(String),
    /// It tells something of this host, and is for its log alone.
    Local(String),
}

impl Reason {
    fn for_peer(&self) -> &str {
        match self {
            Self::Known(reason) => reason,
            Self::Local(_) => "the log of the agent there has the reason",
        }
    }

    /// The reason, for this host's log.
    #[must_use]
    pub fn for_log(&self) -> &str {
        match self {
            Self::Known(reason) | Self::Local(reason) => reason,
        }
    }
}

/// Checks that this host meets a peer's challenge; `overrides` say what the image is called here.
/// Files are opened with the rights of `user`; none means the agent's own.
///
/// # Errors
/// With the reason if it doesn't.
pub fn verify(
    challenge: &Challenge,
    overrides: &[(String, String)],
    user: Option<&User>,
    goes_on: GoesOn<'_>,
) -> Result<(), NotShared> {
    let image = overridden(&challenge.image, overrides).map_err(|error| NotShared {
        image: challenge.image.clone(),
        reason: Reason::Known(error.to_string()),
    })?;
    let verified = verify::verify(&image, &challenge.proof, user, goes_on);
    verified.map_err(|reason| NotShared { image, reason })
}

#[cfg(test)]
mod tests;
