//! Images at the destination for disks that move: looked at, made, removed.
//!
//! A mirror copies all that the guest can read, so a disk whose image has
//! backing files arrives as one image without: the files behind it may be on
//! no other host, and the copy must not depend on whether they are.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::other::{self, Kinship};
use super::{Challenge, Cleanup, Disk, Format, ImageError, ImageProblem, QemuImg, challenge};
use crate::command_line::overridden;
use crate::shape::Image;

/// QEMU counts disks in these.
const SECTOR: u64 = 512;
/// Zeros that are read before an image counts as holding something: they are
/// read in a moment, and nobody has an image of terabytes of them read.
const ZEROS_READ_MAX: usize = 256 << 20;
/// No disk is larger: QEMU's own limit is near.
const DISK_BYTES_MAX: u64 = 1 << 62;

/// A disk that moves, as the source tells the destination of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moving {
    /// Its name.
    pub disk: String,
    /// The image's format.
    pub format: Format,
    /// The size that the guest sees.
    pub bytes: u64,
    /// What it takes up at the source.
    pub allocated_bytes: u64,
    /// The image, and what shows whether another is the same.
    pub challenge: Challenge,
}

/// What is to be said of the disks that move, and what removes the files that
/// were made for it: keep it until the destination has answered. `id` names
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
            challenge: challenge::challenge(&image, pid, &name, &mut cleanup),
        });
    }
    (all, cleanup)
}

/// What an operator allows at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allowed {
    /// To make images that aren't there.
    pub create: bool,
    /// To overwrite images that hold data.
    pub overwrite: bool,
}

/// An image that is there and may be written.
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
    /// Whether it was made for this.
    pub created: bool,
}

/// The images for a VM's disks. Those that were made for it are removed when
/// it is dropped, unless they are kept.
#[derive(Debug)]
pub struct Prepared {
    images: Vec<PreparedImage>,
    created: Vec<Created>,
}

#[derive(Debug)]
struct Created {
    path: PathBuf,
    /// Device and number: another file of that name is not ours to remove.
    file: (u64, u64),
}

impl Prepared {
    /// The images, in the order of the disks.
    #[must_use]
    pub fn images(&self) -> &[PreparedImage] {
        &self.images
    }

    /// The files that were made, for who has to remove them after a crash.
    pub fn created(&self) -> impl Iterator<Item = &Path> {
        self.created.iter().map(|one| one.path.as_path())
    }

    /// Lets what was made stay: from now on it may be the only copy.
    pub fn keep(&mut self) {
        self.created.clear();
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        for Created { path, file } in &self.created {
            let ours = fs::symlink_metadata(path).is_ok_and(|it| (it.dev(), it.ino()) == *file);
            let removed = if ours { fs::remove_file(path) } else { Ok(()) };
            if let Err(error) = removed {
                tracing::warn!(path = %path.display(), %error, "an image that was made stays");
            }
        }
    }
}

/// Looks at the images that the disks are to move to, and makes those that
/// aren't there and may be made. `overrides` say what they are called here,
/// relative ones are meant from `cwd`. What comes from the source is not
/// trusted: nothing is written to an image that is there already.
///
/// # Errors
/// If one can't take its disk. What was made is removed again.
pub fn prepare(
    disks: &[Moving],
    overrides: &[(String, String)],
    cwd: &Path,
    allowed: Allowed,
    tool: &QemuImg,
) -> Result<Prepared, ImageError> {
    let mut prepared = Prepared { images: Vec::new(), created: Vec::new() };
    for moving in disks {
        let path = cwd.join(overridden(&moving.challenge.image, overrides));
        let failed =
            |problem| ImageError { disk: moving.disk.clone(), image: path.clone(), problem };
        let created = prepare_one(moving, &path, allowed, tool, &mut prepared).map_err(failed)?;
        prepared.images.push(PreparedImage {
            disk: moving.disk.clone(),
            path,
            format: moving.format.clone(),
            bytes: moving.bytes,
            created,
        });
    }
    Ok(prepared)
}

fn prepare_one(
    moving: &Moving,
    path: &Path,
    allowed: Allowed,
    tool: &QemuImg,
    prepared: &mut Prepared,
) -> Result<bool, ImageProblem> {
    if !path.is_absolute() {
        return Err(ImageProblem::Relative);
    }
    if moving.bytes == 0 || !moving.bytes.is_multiple_of(SECTOR) || moving.bytes > DISK_BYTES_MAX {
        return Err(ImageProblem::Impossible(format!("a disk of {} bytes", moving.bytes)));
    }
    let found = look(moving, path, tool)?;
    if let Found::Image { identity, .. } = &found
        && let Some(twin) = prepared.images.iter().find(|one| identity_of(&one.path) == *identity)
    {
        return Err(ImageProblem::Twice { other: twin.disk.clone() });
    }
    match decide(moving, &found, allowed)? {
        Action::Use => Ok(false),
        Action::Create => {
            create(moving, path, tool, prepared)?;
            Ok(true)
        }
    }
}

/// What is at the image's place.
#[derive(Debug)]
enum Found {
    /// Nothing, in a directory with this much room.
    Nothing { room: u64 },
    /// An image.
    Image {
        identity: Option<(u64, u64)>,
        kinship: Kinship,
        bytes: u64,
        has_backing: bool,
        is_empty: bool,
        /// What it has and its file system would give; none of a block device.
        room: Option<u64>,
    },
}

#[derive(Debug, PartialEq, Eq)]
enum Action {
    Use,
    Create,
}

fn decide(moving: &Moving, found: &Found, allowed: Allowed) -> Result<Action, ImageProblem> {
    let has_room = |available: u64| {
        let needed = moving.allocated_bytes;
        if needed > available { Err(ImageProblem::NoRoom { needed, available }) } else { Ok(()) }
    };
    match found {
        Found::Nothing { .. } if !allowed.create => Err(ImageProblem::Missing),
        Found::Nothing { room } => has_room(*room).map(|()| Action::Create),
        Found::Image { kinship: Kinship::Same, .. } => Err(ImageProblem::Same),
        Found::Image { kinship: Kinship::Unsure(reason), .. } => {
            Err(ImageProblem::Unsure { reason: reason.clone() })
        }
        Found::Image { has_backing: true, .. } => Err(ImageProblem::Backing),
        Found::Image { bytes, .. } if *bytes != moving.bytes => {
            Err(ImageProblem::Size { here: *bytes, wanted: moving.bytes })
        }
        Found::Image { is_empty: false, .. } if !allowed.overwrite => Err(ImageProblem::NotEmpty),
        Found::Image { room, .. } => room.map_or(Ok(()), has_room).map(|()| Action::Use),
    }
}

fn look(moving: &Moving, path: &Path, tool: &QemuImg) -> Result<Found, ImageProblem> {
    let file = match fs::metadata(path) {
        Ok(file) => file,
        // A link that leads nowhere is there, and nothing is made through it.
        Err(error)
            if error.kind() == std::io::ErrorKind::NotFound
                && fs::symlink_metadata(path).is_err() =>
        {
            let folder = path.parent().filter(|folder| folder.is_dir());
            let room = room_in(folder.ok_or(ImageProblem::NoDirectory)?)?;
            return Ok(Found::Nothing { room });
        }
        Err(error) => return Err(error.into()),
    };
    let is_device = file.file_type().is_block_device();
    if !is_device && !file.is_file() {
        return Err(ImageProblem::Odd);
    }
    // First of all: to look into the source's own image would only find that
    // it is in use.
    let kinship = other::compare(path, &moving.challenge.proof);
    if kinship == Kinship::Same {
        return Err(ImageProblem::Same);
    }
    let driver = match (&moving.format, is_device) {
        (Format::Raw, true) => "host_device",
        (format, _) => format.driver(),
    };
    let info = tool.info(driver, path)?;
    let taken = file.blocks().saturating_mul(SECTOR);
    Ok(Found::Image {
        identity: identity_of(path),
        kinship,
        bytes: info["virtual-size"].as_u64().unwrap_or(0),
        has_backing: info.get("backing-filename").is_some(),
        is_empty: match moving.format {
            Format::Raw => holds_zeros(&File::open(path)?)?,
            Format::Qcow2(_) => tool.is_empty(driver, path)?,
        },
        room: if is_device { None } else { Some(room_in(path)?.saturating_add(taken)) },
    })
}

/// Whether a raw image reads as zeros, as far as that is soon found out: a
/// block device has no holes, and even an image just made has a few zeros at
/// its start that take up room.
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

fn identity_of(path: &Path) -> Option<(u64, u64)> {
    let file = fs::metadata(path).ok()?;
    // Of a block device every node is the same device.
    let is_device = file.file_type().is_block_device();
    Some(if is_device { (file.rdev(), 0) } else { (file.dev(), file.ino()) })
}

fn room_in(path: &Path) -> Result<u64, ImageProblem> {
    let system = rustix::fs::statvfs(path).map_err(std::io::Error::from)?;
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

fn create(
    moving: &Moving,
    path: &Path,
    tool: &QemuImg,
    prepared: &mut Prepared,
) -> Result<(), ImageProblem> {
    // The tool would overwrite one that somebody made meanwhile.
    let file = File::create_new(path)?.metadata()?;
    prepared.created.push(Created { path: path.to_owned(), file: (file.dev(), file.ino()) });
    tool.create(&moving.format, path, moving.bytes)
}

#[cfg(test)]
mod tests;
