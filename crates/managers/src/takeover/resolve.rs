//! Opens files below a directory whose content others control.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

/// Opens what `path` means in `directory`, within the limits of `resolve`. Only `openat2` can be
/// told these.
///
/// # Errors
/// If it doesn't exist, or the system refuses.
pub(crate) fn open_resolved(
    directory: impl AsFd,
    path: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    openat2(directory, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve).map_err(explained)
}

/// As [`open_resolved`], but opens only a socket, to connect to it by its descriptor, and follows
/// no link.
pub(crate) fn open_socket(
    directory: impl AsFd,
    path: &Path,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW;
    let opened = open_resolved(directory, path, flags, resolve | ResolveFlags::NO_SYMLINKS)?;
    let stat = rustix::fs::fstat(&opened)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(io::Error::other(format!("{} is not a socket", path.display())));
    }
    Ok(opened)
}

/// Checks that the system lets this process open files so.
///
/// # Errors
/// Why it doesn't.
pub fn can_open_resolved() -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    open_resolved(CWD, Path::new("/"), flags, ResolveFlags::NO_MAGICLINKS).map(drop)
}

/// A filter of system calls can't see the flags of `openat2`. One that has to know them refuses the
/// call as if the kernel lacked it.
fn explained(error: Errno) -> io::Error {
    if error != Errno::NOSYS {
        return error.into();
    }
    io::Error::new(
        io::ErrorKind::Unsupported,
        "the system refuses `openat2`: use Linux 5.6 or newer, and a unit without \
         RestrictSUIDSGID=yes",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_call_that_is_refused_is_told_from_a_missing_file() {
        let refused = explained(Errno::NOSYS);
        assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
        assert!(refused.to_string().contains("RestrictSUIDSGID"), "{refused}");
        assert_eq!(explained(Errno::NOENT).kind(), io::ErrorKind::NotFound);
        can_open_resolved().unwrap();
    }
}
