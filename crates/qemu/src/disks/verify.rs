//! The destination's side: does this host meet the challenge?
//!
//! The peer chooses paths and proofs, and could find out about any file by that. So files are opened
//! with the rights of QEMU's user, none in a system directory, and the peer doesn't receive why one
//! doesn't meet its challenge: the agent's log has that.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use host::rights;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};

use super::challenge::PREFIX;
use super::content::{GoesOn, content_of, open_plain};
use super::{Challenge, Proof, block_device, network};
use crate::command_line::overridden;
use crate::launch::User;

/// A nonce's file holds 32 bytes; one more is enough to see that it differs.
const NONCE_READ: u64 = 33;
/// Only their block devices can be a VM's images.
const SYSTEM: [&str; 3] = ["/proc", "/sys", "/dev"];

/// What an image's path leads to, opened once, so that it can't become another file meanwhile.
struct Found {
    /// Opened only to be examined: opening a pipe would block, and opening a device has effects.
    file: File,
    /// Its path without links.
    real: PathBuf,
}

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
    let verified = meets(&image, &challenge.proof, user, goes_on);
    verified.map_err(|reason| NotShared { image, reason })
}

fn meets(
    image: &str,
    proof: &Proof,
    user: Option<&User>,
    goes_on: GoesOn<'_>,
) -> Result<(), Reason> {
    let path = Path::new(image);
    let local = match proof {
        Proof::Nonce { file, .. } if !file.starts_with(PREFIX) || file.contains('/') => {
            return Err(Reason::Known("the source's challenge can't be understood".to_owned()));
        }
        Proof::Nonce { image: name, file, nonce, bytes, content } => {
            let found = as_user(user, || beside(path, name, file, nonce, *bytes));
            found.or_else(|why| match content {
                Some(hash) => same_content(path, *bytes, hash, user, goes_on),
                None => Err(why),
            })
        }
        Proof::Content { bytes, hash } => same_content(path, *bytes, hash, user, goes_on),
        Proof::Identity { identity } => as_user(user, || same_device(path, identity)),
        Proof::Network { cluster } => {
            network::is_elsewhere(image).map_err(Reason::Known)?;
            as_user(user, || network::same_cluster(image, cluster.as_deref()))
        }
        Proof::Impossible { reason } => return Err(Reason::Known(reason.clone())),
    };
    local.map_err(Reason::Local)
}

fn as_user<T: Send>(
    user: Option<&User>,
    work: impl FnOnce() -> Result<T, String> + Send,
) -> Result<T, String> {
    rights::with(user, work).map_err(|error| error.to_string())?
}

impl Found {
    fn open(path: &Path) -> Result<Self, String> {
        // Links in /proc lead to what processes have open.
        let resolve = ResolveFlags::NO_MAGICLINKS;
        let file =
            rustix::fs::openat2(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve);
        let file = File::from(file.map_err(|errno| errno.to_string())?);
        let words = |error: std::io::Error| error.to_string();
        let real = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let found = Self { file, real: real.map_err(words)? };
        let kind = found.file.metadata().map_err(words)?.file_type();
        if SYSTEM.iter().any(|system| found.real.starts_with(system)) && !kind.is_block_device() {
            return Err(format!("{} is no block device, and no image", found.real.display()));
        }
        Ok(found)
    }

    /// The length of a file.
    fn plain_bytes(&self) -> Result<u64, String> {
        let file = self.file.metadata().map_err(|error| error.to_string())?;
        if file.is_file() { Ok(file.len()) } else { Err("it is not a file here".to_owned()) }
    }

    /// Opens a file to read it.
    fn to_read(&self) -> Result<File, String> {
        let opened = File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        opened.map_err(|error| error.to_string())
    }
}

fn beside(path: &Path, image: &str, file: &str, nonce: &str, bytes: u64) -> Result<(), String> {
    let found = Found::open(path)?;
    let real = &found.real;
    if real.file_name().and_then(|name| name.to_str()) != Some(image) {
        return Err(format!("here it is {}, there it is called {image}", real.display()));
    }
    let length = found.plain_bytes()?;
    let folder = real.parent().ok_or("it is in no directory")?;
    let mut text = String::new();
    let read = open_plain(&folder.join(file))
        .and_then(|opened| opened.take(NONCE_READ).read_to_string(&mut text));
    if read.is_err() || text != nonce {
        return Err(format!(
            "{} here is another directory than at the source, so the image is a copy",
            folder.display()
        ));
    }
    // The VM runs: a qcow2 image may have grown since the source read its length.
    if length < bytes {
        return Err(format!("it has {length} bytes here and {bytes} at the source"));
    }
    Ok(())
}

fn same_content(
    path: &Path,
    bytes: u64,
    hash: &str,
    user: Option<&User>,
    goes_on: GoesOn<'_>,
) -> Result<(), String> {
    let file = as_user(user, || {
        let found = Found::open(path)?;
        // The cheap test first: it also bounds what a peer can make this host read.
        if found.plain_bytes()? != bytes {
            return Err("it has another length here".to_owned());
        }
        found.to_read()
    })?;
    let (_, here) = content_of(file, goes_on)?;
    if here == hash { Ok(()) } else { Err("it has other content here".to_owned()) }
}

fn same_device(path: &Path, identity: &str) -> Result<(), String> {
    let file = Found::open(path)?.file.metadata().map_err(|error| error.to_string())?;
    if !file.file_type().is_block_device() {
        return Err("it is a block device at the source and none here".to_owned());
    }
    let here = block_device::identity(file.rdev())?;
    if here != identity {
        return Err(format!("here it is the device {here}, at the source {identity}"));
    }
    if block_device::is_local_name(&here) {
        return Err(format!("other hosts may have another disk with its name, {here}"));
    }
    Ok(())
}
