//! Images at the destination for disks that move: examined, created, removed.
//!
//! A mirror copies all that the guest can read, so a disk whose image has
//! backing files arrives as one image without them: they may exist on no other
//! host, and the copy must not depend on whether they do.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use host::rights;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::other::{self, Kinship};
use super::place::{PathTarget, is_among_devices, open};
use super::promises::{Promised, Promises};
use super::{Allowed, Cleanup, Disk, Format, ImageError, ImageProblem, Moving, QemuImg, challenge};
use crate::command_line::overridden;
use crate::launch::User;
use crate::shape::Image;

/// The unit of disk sizes in QEMU.
const SECTOR: u64 = 512;
/// Most allocated zeros that are read before an image counts as holding data: this
/// many are read in a moment, and terabytes would take too long.
const ZEROS_READ_MAX: usize = 256 << 20;
/// No disk is larger: QEMU's own limit is close to this.
const DISK_BYTES_MAX: u64 = 1 << 62;

/// The description of the disks that move, and a guard that removes the files
/// made for it: keep it until the destination has answered. `id` names
/// the migration, `pid` is QEMU's.
#[must_use]
pub fn moving(disks: &[Disk], pid: Option<u32>, id: &str) -> (Vec<Moving>, Cleanup) {
    let mut cleanup = Cleanup::default();
    let mut all = Vec::new();
    for (nth, disk) in disks.iter().enumerate() {
        let Some(format) = disk.format.clone() else { continue };
        let image = Image {
            driver: disk.protocol.clone(),
            file: disk.file.clone(),
            read_only: false,
            bytes: disk.bytes,
        };
        let name = format!("{id}-moving-{nth}");
        all.push(Moving {
            disk: disk.name.clone(),
            format,
            bytes: disk.bytes,
            allocated_bytes: disk.allocated_bytes,
            challenge: challenge::challenge(&image, pid, &name, &|| Ok(()), &mut cleanup),
        });
    }
    (all, cleanup)
}

/// An image that exists and may be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedImage {
    /// The disk's name.
    pub disk: String,
    /// The image.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// The size that the guest sees.
    pub bytes: u64,
    /// Whether it was created for this move.
    pub created: bool,
    /// The file that was examined or created: device and inode.
    pub(crate) identity: (u64, u64),
    /// The user with whose rights that was done.
    user: Option<User>,
}

impl PreparedImage {
    /// Opens it to be written, with the rights that it was prepared with, and only if its path
    /// still leads to the same file: QEMU's user may have exchanged it meanwhile.
    pub(crate) fn open(&self) -> Result<File, String> {
        let words = |error: io::Error| format!("{}: {error}", self.path.display());
        // Opening a FIFO for both directions doesn't block.
        let open = || OpenOptions::new().read(true).write(true).open(&self.path);
        let file = rights::with(self.user.as_ref(), open).and_then(|opened| opened);
        let file = file.map_err(words)?;
        if identity_of(&file.metadata().map_err(words)?) == self.identity {
            return Ok(file);
        }
        Err(format!("{} has become another file since it was prepared", self.path.display()))
    }
}

/// The images for a VM's disks. Those that were created for it are removed when
/// it is dropped, unless they are kept.
#[derive(Debug, Default)]
pub struct Prepared {
    images: Vec<PreparedImage>,
    created: Vec<Created>,
    /// The room for them.
    promised: Vec<Promised>,
    /// The user with whose rights they are created and removed.
    user: Option<User>,
}

#[derive(Debug)]
struct Created {
    path: PathBuf,
    /// Device and inode: another file of that name must not be removed.
    file: (u64, u64),
}

impl Prepared {
    /// The images, in the order of the disks.
    #[must_use]
    pub fn images(&self) -> &[PreparedImage] {
        &self.images
    }

    /// The files that were created, which have to be removed after a crash.
    pub fn created(&self) -> impl Iterator<Item = &Path> {
        self.created.iter().map(|one| one.path.as_path())
    }

    /// Keeps the created files: from now on they may be the only copy, and they have the room
    /// that they need.
    pub fn keep(&mut self) {
        self.created.clear();
        self.promised.clear();
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        for Created { path, file } in &self.created {
            if let Err(error) = remove_made(path, *file, self.user.as_ref()) {
                tracing::warn!(
                    path = %path.display(),
                    %error,
                    "cannot remove an image that was created"
                );
            }
        }
    }
}

/// Removes a created file, if the path still leads to it, with the rights that it was
/// created with: in a directory of that user the path may lead to another file at any
/// moment.
///
/// # Errors
/// If it can't be removed.
pub fn remove_made(path: &Path, file: (u64, u64), user: Option<&User>) -> io::Result<()> {
    rights::with(user, || {
        let ours = fs::symlink_metadata(path).is_ok_and(|it| (it.dev(), it.ino()) == file);
        if ours { fs::remove_file(path) } else { Ok(()) }
    })?
}

/// Examines the images that the disks are to move to, and creates missing ones if
/// that is allowed. `overrides` say what they are called here; relative paths start
/// at `cwd`. The source's description is not trusted: nothing is written to an image
/// that exists already, and images are opened and created with the rights of the
/// tool's user. `promises` are those of all disks that arrive at this host.
///
/// # Errors
/// If one can't take its disk. Created images are removed again.
pub fn prepare(
    disks: &[Moving],
    overrides: &[(String, String)],
    cwd: &Path,
    allowed: Allowed,
    tool: &QemuImg,
    promises: &Promises,
) -> Result<Prepared, ImageError> {
    let mut prepared = Prepared::default();
    prepared.user = tool.user().cloned();
    for moving in disks {
        let name = overridden(&moving.challenge.image, overrides).map_err(|error| ImageError {
            disk: moving.disk.clone(),
            image: PathBuf::from(&moving.challenge.image),
            problem: ImageProblem::Name(error),
        })?;
        let path = cwd.join(name);
        let failed =
            |problem| ImageError { disk: moving.disk.clone(), image: path.clone(), problem };
        let (created, identity) =
            prepare_one(moving, &path, allowed, tool, promises, &mut prepared).map_err(failed)?;
        prepared.images.push(PreparedImage {
            disk: moving.disk.clone(),
            path,
            format: moving.format.clone(),
            bytes: moving.bytes,
            created,
            identity,
            user: tool.user().cloned(),
        });
    }
    Ok(prepared)
}

fn prepare_one(
    moving: &Moving,
    path: &Path,
    allowed: Allowed,
    tool: &QemuImg,
    promises: &Promises,
    prepared: &mut Prepared,
) -> Result<(bool, (u64, u64)), ImageProblem> {
    if !path.is_absolute() {
        return Err(ImageProblem::Relative);
    }
    if moving.bytes == 0 || !moving.bytes.is_multiple_of(SECTOR) || moving.bytes > DISK_BYTES_MAX {
        return Err(ImageProblem::Impossible(format!("a disk of {} bytes", moving.bytes)));
    }
    let (found, there) = look(moving, path, tool)?;
    if let Found::Image { identity, .. } = &found
        && let Some(twin) = prepared.images.iter().find(|one| one.identity == *identity)
    {
        return Err(ImageProblem::Twice { other: twin.disk.clone() });
    }
    decide(moving, &found, allowed)?;
    let promise = |taken| promises.promise(path, &there, moving.allocated_bytes, taken);
    match found {
        // It takes nothing from a file system.
        Found::Image { identity, device_bytes: Some(_), .. } => Ok((false, identity)),
        Found::Image { identity, taken, .. } => {
            prepared.promised.push(promise(taken)?);
            Ok((false, identity))
        }
        Found::Nothing => {
            prepared.promised.push(promise(0)?);
            Ok((true, create(moving, path, tool, prepared)?))
        }
    }
}

/// What is at the image's path.
#[derive(Debug)]
enum Found {
    /// Nothing, in a directory that exists.
    Nothing,
    /// An image.
    Image {
        identity: (u64, u64),
        kinship: Kinship,
        bytes: u64,
        has_backing: bool,
        is_empty: bool,
        /// The space that it takes.
        taken: u64,
        /// The size of the block device, if it is one.
        device_bytes: Option<u64>,
    },
}

/// Whether what was found may be used, or an image be created where there is none.
fn decide(moving: &Moving, found: &Found, allowed: Allowed) -> Result<(), ImageProblem> {
    // On a block device. A raw image there is as large as that, and another one may be smaller
    // than what the guest sees; of what only internal snapshots have nothing is copied.
    let needed = match moving.format {
        Format::Raw => 0,
        Format::Qcow2(_) => moving.allocated_bytes.min(moving.bytes),
    };
    match found {
        Found::Nothing if !allowed.create => Err(ImageProblem::Missing),
        Found::Image { kinship: Kinship::Same, .. } => Err(ImageProblem::Same),
        Found::Image { kinship: Kinship::Unsure(reason), .. } => {
            Err(ImageProblem::Unsure { reason: reason.clone() })
        }
        Found::Image { has_backing: true, .. } => Err(ImageProblem::Backing),
        Found::Image { bytes, .. } if *bytes != moving.bytes => {
            Err(ImageProblem::Size { here: *bytes, wanted: moving.bytes })
        }
        Found::Image { is_empty: false, .. } if !allowed.overwrite => Err(ImageProblem::NotEmpty),
        Found::Image { device_bytes: Some(bytes), .. } if needed > *bytes => {
            Err(ImageProblem::NoRoom { needed, available: *bytes, promised: 0 })
        }
        Found::Nothing | Found::Image { .. } => Ok(()),
    }
}

/// Returns what is at the path, and the image or the directory there.
fn look(moving: &Moving, path: &Path, tool: &QemuImg) -> Result<(Found, File), ImageProblem> {
    // First of all: examining the source's own image would only report that it
    // is in use.
    let kinship = other::compare(path, &moving.challenge.proof);
    let image = match rights::with(tool.user(), || open(path))?? {
        PathTarget::Image(image) => image,
        PathTarget::Nothing(folder) => return Ok((Found::Nothing, folder)),
    };
    let file = image.metadata()?;
    let is_device = file.file_type().is_block_device();
    if !is_device && !file.is_file() {
        return Err(ImageProblem::Odd);
    }
    if !is_device && is_among_devices(&file)? {
        return Err(ImageProblem::InMemory);
    }
    if kinship == Kinship::Same {
        return Err(ImageProblem::Same);
    }
    let driver = match (&moving.format, is_device) {
        (Format::Raw, true) => "host_device",
        (format, _) => format.driver(),
    };
    let info = tool.info(driver, &image)?;
    let has_backing = info.get("backing-filename").is_some();
    let found = Found::Image {
        identity: identity_of(&file),
        kinship,
        bytes: info["virtual-size"].as_u64().unwrap_or(0),
        has_backing,
        is_empty: match moving.format {
            Format::Raw => holds_zeros(&image)?,
            // Backing files must not be opened: the image may name any file.
            Format::Qcow2(_) => !has_backing && tool.is_empty(driver, &image)?,
        },
        taken: file.blocks().saturating_mul(SECTOR),
        device_bytes: if is_device { Some(size_of_device(&image)?) } else { None },
    };
    Ok((found, image))
}

/// A block device's file has no length of its own.
fn size_of_device(device: &File) -> Result<u64, ImageProblem> {
    let end = rustix::fs::seek(device, SeekFrom::End(0));
    end.map_err(|errno| ImageProblem::Io(errno.into()))
}

/// Whether a raw image reads as zeros, as far as can be found out quickly: a
/// block device has no holes, and even a new image has a few allocated zeros at
/// its start.
fn holds_zeros(file: &File) -> Result<bool, ImageProblem> {
    let errno = |errno: Errno| ImageProblem::Io(errno.into());
    let mut left = ZEROS_READ_MAX;
    let mut at = 0;
    let mut buffer = vec![0; 1 << 20];
    loop {
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data,
            // Nothing but a hole from there on.
            Err(Errno::NXIO) => return Ok(true),
            // A block device, or a file system, that can't tell.
            Err(Errno::INVAL) => at,
            Err(error) => return Err(errno(error)),
        };
        let count = file.read_at(&mut buffer, at)?;
        if count == 0 {
            return Ok(true);
        }
        if buffer.iter().take(count).any(|byte| *byte != 0) || left < buffer.len() {
            return Ok(false);
        }
        left -= buffer.len();
        at = at.saturating_add(count as u64);
    }
}

/// The device and inode of an image.
pub(crate) fn identity_of(file: &Metadata) -> (u64, u64) {
    // All nodes of a block device are the same device.
    let is_device = file.file_type().is_block_device();
    if is_device { (file.rdev(), 0) } else { (file.dev(), file.ino()) }
}

fn create(
    moving: &Moving,
    path: &Path,
    tool: &QemuImg,
    prepared: &mut Prepared,
) -> Result<(u64, u64), ImageProblem> {
    // The tool itself would overwrite a file created meanwhile.
    let made = rights::with(tool.user(), || File::create_new(path))?;
    let image = made.map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => {
            ImageProblem::Closed { what: "make files in its directory" }
        }
        _ => error.into(),
    })?;
    let file = identity_of(&image.metadata()?);
    prepared.created.push(Created { path: path.to_owned(), file });
    tool.create(&moving.format, &image, moving.bytes).map(|()| file)
}

#[cfg(test)]
mod tests;
