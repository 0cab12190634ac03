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
mod content;
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
pub use challenge::{ElsewhereError, challenges, check_names};
pub use choose::{Choice, ChoiceError, WhichDisks, choose, without_moving};
pub use cleanup::Cleanup;
pub use content::GoesOn;
pub use image_error::{ImageError, ImageProblem};
pub(crate) use images::identity_of;
pub use images::{Prepared, PreparedImage, moving, prepare, remove_made};
pub(crate) use list::guest_id;
pub use list::{Disk, Stays, disks};
pub(crate) use passed_through::device_path;
pub use promises::Promises;
pub use qemu_img::QemuImg;
pub use verify::{NotShared, Reason, verify};

#[cfg(test)]
mod tests;
