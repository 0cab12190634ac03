//! Reads what is compared.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};

/// Most bytes of an image that are read to compare contents, where nothing else can be compared.
const CONTENT_BYTES_MAX: u64 = 4 << 30;

/// Asked again and again while an image's content is read, which may take minutes: an error, with
/// the reason, ends that.
pub type GoesOn<'g> = &'g dyn Fn() -> Result<(), String>;

/// Opens a regular file that another host has named, and nothing else of that name: opening
/// a pipe would block, and opening a device would have effects.
pub(super) fn open_plain(path: &Path) -> std::io::Result<File> {
    let by_file = OFlags::PATH | OFlags::CLOEXEC;
    let found = rustix::fs::open(path, by_file, Mode::empty())?;
    let stat = rustix::fs::fstat(&found)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(std::io::Error::other("it is not a file"));
    }
    File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))
}

/// Length and hash of a file that nothing writes to.
pub(super) fn content(path: &Path, goes_on: GoesOn<'_>) -> Result<(u64, String), String> {
    content_of(open_plain(path).map_err(|error| error.to_string())?, goes_on)
}

/// As [`content`], of an open file.
pub(super) fn content_of(file: File, goes_on: GoesOn<'_>) -> Result<(u64, String), String> {
    let text = |error: std::io::Error| error.to_string();
    let bytes = file.metadata().map_err(text)?.len();
    if bytes > CONTENT_BYTES_MAX {
        return Err(format!(
            "no file can be created next to it, and with {bytes} bytes it is too large to compare"
        ));
    }
    // Of a file that grows no more than shows that it differs.
    let mut file = file.take(bytes.saturating_add(1));
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        goes_on()?;
        let count = file.read(&mut buffer).map_err(text)?;
        if count == 0 {
            return Ok((bytes, hasher.finalize().to_hex().to_string()));
        }
        hasher.update(&buffer[..count]);
    }
}
