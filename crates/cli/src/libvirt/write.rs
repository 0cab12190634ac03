//! Atomic replacement of another program's configuration file, which keeps its owner and
//! mode.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

use client::Problem;

/// The mode of a new file: QEMU's configuration may hold passwords.
const MODE: u32 = 0o600;

/// Reads a file; empty if it does not exist.
pub(crate) fn read(path: &Path) -> Result<String, Problem> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        read => read.map_err(|source| {
            let what = format!("reading {}", path.display());
            Problem::Local { what, source }
        }),
    }
}

/// Replaces a file's contents.
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<()> {
    // Replaces the target of a symbolic link, and keeps the link.
    let path = if path.exists() { fs::canonicalize(path)? } else { path.to_owned() };
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().ok_or(ErrorKind::InvalidInput)?.to_string_lossy();
    let partial = dir.join(format!(".{name}.droveway-{}", std::process::id()));
    let written = write(&partial, &path, text).and_then(|()| fs::rename(&partial, &path));
    if written.is_err() {
        // The file may not exist.
        let _ = fs::remove_file(&partial);
    }
    written?;
    File::open(dir)?.sync_all()
}

fn write(partial: &Path, path: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(partial)?;
    if let Ok(old) = fs::metadata(path) {
        fchown(&file, Some(old.uid()), Some(old.gid()))?;
        file.set_permissions(Permissions::from_mode(old.mode() & 0o7777))?;
    }
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_keeps_its_mode_and_its_links() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("kept.conf"), dir.path().join("qemu.conf"));
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink("kept.conf", &link).unwrap();
        replace(&link, "new\n").unwrap();
        assert_eq!(read(&file).unwrap(), "new\n");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(names(dir.path()), ["kept.conf", "qemu.conf"]);
    }

    #[test]
    fn a_file_is_made_where_there_was_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("qemu.conf");
        assert_eq!(read(&file).unwrap(), "");
        replace(&file, "new\n").unwrap();
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, MODE);
        assert!(replace(&dir.path().join("none/qemu.conf"), "x").is_err());
        assert_eq!(names(dir.path()), ["qemu.conf"]);
    }
}
