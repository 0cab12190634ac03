//! What is at an image's path at the destination.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use super::ImageProblem;

/// What a path leads to, opened once, so that it can't become another file while
/// it is examined.
#[derive(Debug)]
pub(super) enum PathTarget {
    /// A file or a block device.
    Image(File),
    /// Nothing, in this directory.
    Nothing(File),
}

/// Whether this is in the file system of the devices, which is in memory: a path to a volume that
/// is missing here leads to a directory in it.
pub(super) fn is_among_devices(file: &Metadata) -> io::Result<bool> {
    let system = |path: &str| fs::metadata(path).map(|found| found.dev());
    let devices = system("/dev")?;
    Ok(devices == file.dev() && devices != system("/")?)
}

/// Opens what is at a path, with the rights of the thread.
pub(super) fn open(path: &Path) -> Result<PathTarget, ImageProblem> {
    let with = |flags: OFlags| {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(flags.bits().cast_signed());
        options
    };
    let error = match fs::metadata(path) {
        // Opening a character device may have effects, and opening a FIFO waits for
        // the other end.
        Ok(file) if !file.is_file() && !file.file_type().is_block_device() => {
            return Err(ImageProblem::Odd);
        }
        Ok(_) => match with(OFlags::NONBLOCK).open(path) {
            Ok(image) => return Ok(PathTarget::Image(image)),
            Err(error) => error,
        },
        Err(error) => error,
    };
    let is_free = || match fs::symlink_metadata(path) {
        // A dangling link exists, and nothing is created through it.
        Ok(_) => false,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    match error.kind() {
        io::ErrorKind::NotFound if is_free() => {
            let folder = with(OFlags::PATH | OFlags::DIRECTORY);
            let folder = path.parent().and_then(|path| folder.open(path).ok());
            let folder = folder.ok_or(if path.starts_with("/dev") {
                // A volume group that has no active volume has no directory either.
                ImageProblem::InMemory
            } else {
                ImageProblem::NoDirectory
            })?;
            if is_among_devices(&folder.metadata()?)? {
                return Err(ImageProblem::InMemory);
            }
            Ok(PathTarget::Nothing(folder))
        }
        io::ErrorKind::PermissionDenied => Err(ImageProblem::Closed { what: "open it" }),
        _ => Err(error.into()),
    }
}
