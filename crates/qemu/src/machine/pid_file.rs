//! A VM's PID file (`-pidfile`), where the VM gets another QEMU on the same host.
//!
//! QEMU writes the file when it starts and removes it when it ends in order. The next QEMU starts
//! without that option, with the former one's open file, to which the agent writes its number once
//! it has the VM. So nothing is written that QEMU could not write itself. Such a QEMU removes no
//! file when it ends, and has no lock on it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::Machine;
use super::inherit_error::InheritError;
use super::open_files::take;
use crate::command_line::CommandLine;
use crate::process::{Process, proc_path};

/// The longest content.
const BYTES_MAX: u64 = 32;

/// A process's open PID file. None if the path has no file, or another one: then it isn't QEMU's
/// any more, and stays as it is.
pub(super) fn open_in(process: &Process, path: &Path) -> Result<Option<File>, InheritError> {
    let pid = process.pid();
    let (Ok(named), Ok(real)) = (fs::metadata(path), fs::canonicalize(path)) else {
        return Ok(None);
    };
    let entries = fs::read_dir(proc_path(pid, "fd"))
        .map_err(|_| InheritError::PidFile { path: path.to_owned(), pid })?;
    for entry in entries.flatten() {
        // Others may be on storage that hangs.
        if fs::read_link(entry.path()).ok().as_ref() != Some(&real) {
            continue;
        }
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(file) = number.and_then(|number| take(process, number)) else { continue };
        let flags = rustix::fs::fcntl_getfl(&file);
        let writes = flags.is_ok_and(|flags| flags.intersects(OFlags::WRONLY | OFlags::RDWR));
        let file = File::from(file);
        let is_it = |open: fs::Metadata| {
            open.is_file() && (open.dev(), open.ino()) == (named.dev(), named.ino())
        };
        if writes && file.metadata().is_ok_and(is_it) {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// Writes the number of a QEMU to the file that it has inherited; it has to be the VM's only one.
pub(super) fn take_over(
    machine: &Machine,
    line: &CommandLine,
    running: &CommandLine,
) -> Result<(), String> {
    let Some(path) = line.pid_file().filter(|_| running.pid_file().is_none()) else {
        return Ok(());
    };
    let file = open_in(&machine.process, &machine.cwd.join(path));
    let Some(file) = file.map_err(|error| error.to_string())? else { return Ok(()) };
    write(&file, machine.process.pid()).map_err(|error| format!("{path}: {error}"))
}

fn write(file: &File, pid: u32) -> io::Result<()> {
    let text = format!("{pid}\n");
    file.write_all_at(text.as_bytes(), 0)?;
    file.set_len(text.len() as u64)
}

/// Removes the file of a QEMU that has ended, if it still has its number.
pub(super) fn remove(path: &Path, pid: u32) -> io::Result<()> {
    match remove_its(path, pid) {
        // QEMU has removed it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn remove_its(path: &Path, pid: u32) -> io::Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    // The path may lead elsewhere by the time of the removal: the directory stays the same.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(dir, flags, Mode::empty())?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(&dir, name, flags, Mode::empty()) {
        // QEMU removes the file to which a link leads, and leaves the link.
        Err(Errno::LOOP) => return Ok(()),
        file => File::from(file?),
    };
    if !file.metadata()?.is_file() {
        return Ok(());
    }
    let mut text = String::new();
    let is_text = file.take(BYTES_MAX).read_to_string(&mut text).is_ok();
    if is_text && text.trim() == pid.to_string() {
        rustix::fs::unlinkat(&dir, name, AtFlags::empty())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_that_a_process_writes_to_counts_and_not_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        let me = Process::now(std::process::id()).unwrap();
        assert!(open_in(&me, &path).unwrap().is_none());
        let file = File::create(&path).unwrap();
        write(&file, 1_234_567).unwrap();
        let open = open_in(&me, &path).unwrap().unwrap();
        write(&open, 89).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "89\n");

        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(open_in(&me, &link).unwrap().is_some());
        // Another one has its name.
        fs::rename(&path, dir.path().join("aside")).unwrap();
        fs::write(&path, "another").unwrap();
        assert!(open_in(&me, &path).unwrap().is_none());
        let _reader = File::open(&path).unwrap();
        assert!(open_in(&me, &path).unwrap().is_none());
    }

    #[test]
    fn a_file_is_removed_only_with_the_number_of_the_one_that_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        remove(&path, 7).unwrap();
        for (text, stays) in [("7\n", false), ("7", false), ("77\n", true), ("", true)] {
            fs::write(&path, text).unwrap();
            remove(&path, 7).unwrap();
            assert_eq!(path.exists(), stays, "{text:?}");
        }
        fs::rename(&path, dir.path().join("aside")).unwrap();
        std::os::unix::fs::symlink("aside", &path).unwrap();
        fs::write(&path, "7").unwrap();
        remove(&path, 7).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "7", "a link may lead anywhere");
    }
}
