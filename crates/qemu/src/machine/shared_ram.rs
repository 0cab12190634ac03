//! The files of a VM's RAM, for its next QEMU on the same host.
//!
//! They are opened by what the former QEMU has open, and never by a path: another file may be there
//! by now. A file counts only if that QEMU has mapped it as shared memory that it writes to.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};

use super::Machine;
use super::inherit_error::InheritError;
use crate::command_line::{CommandLine, IN_DIRECTORY, SharedFile};
use crate::process::{command_line_of, proc_path};

/// What the kernel appends to the name of a file that was removed.
const REMOVED: &str = " (deleted)";

/// Open files with a VM's RAM, each with its backend's id, in the order of the command line.
#[derive(Debug, Default)]
pub struct SharedRam(Vec<(String, File)>);

/// A file, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId {
    major: u32,
    minor: u32,
    inode: u64,
}

impl SharedRam {
    /// Those of this QEMU: the memory of its backends in shared files. Nothing of it changes.
    ///
    /// # Errors
    /// If one of those on its command line is not found.
    pub fn of(machine: &Machine) -> Result<Self, InheritError> {
        // A command line that can't be used has none.
        let Ok(line) = CommandLine::parse(&machine.argv) else { return Ok(Self::default()) };
        let backends = line.shared_files();
        if backends.is_empty() {
            return Ok(Self::default());
        }
        let pid = machine.process.pid();
        let running = command_line_of(pid).unwrap_or_default();
        let running = CommandLine::parse(&CommandLine::of_running(&running)).ok();
        let maps = fs::read(proc_path(pid, "maps")).unwrap_or_default();
        let mapped = mapped(&String::from_utf8_lossy(&maps));
        let files = backends.into_iter().map(|backend| {
            let number = running.as_ref().and_then(|line| line.open_file_of(&backend.id));
            let file = match number {
                Some(number) => open_if(&proc_path(pid, &format!("fd/{number}")), &mapped),
                None => named(pid, &backend, &machine.cwd, &mapped),
            };
            let SharedFile { id, .. } = backend;
            match file {
                Some(file) => Ok((id, file)),
                None => Err(InheritError::NoRamFile { id, pid }),
            }
        });
        let files = files.collect::<Result<Vec<_>, _>>()?;
        // The number may be another process's by now.
        match machine.process.is_alive() {
            true => Ok(Self(files)),
            false => Err(InheritError::Exited { pid }),
        }
    }

    /// The ids of the backends.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(id, _)| id.as_str())
    }

    /// The files' numbers, by backend.
    pub(super) fn numbers(&self) -> Vec<(&str, RawFd)> {
        self.0.iter().map(|(id, file)| (id.as_str(), file.as_raw_fd())).collect()
    }

    /// All of them.
    pub(super) fn borrowed(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|(_, file)| file.as_fd())
    }
}

/// The file of a backend whose owner gave it a path.
fn named(pid: u32, backend: &SharedFile, cwd: &Path, mapped: &[FileId]) -> Option<File> {
    let path = cwd.join(backend.path.as_ref()?);
    // Links show where it was when it was opened.
    let path = fs::canonicalize(&path).unwrap_or(path);
    let open = fs::read_dir(proc_path(pid, "fd")).ok()?;
    let mut open = open.flatten().map(|entry| entry.path());
    // Others may be on storage that hangs.
    open.find_map(|file| {
        let is_it = is_of(&fs::read_link(&file).ok()?, &path, &backend.id);
        if is_it { open_if(&file, mapped) } else { None }
    })
}

/// Whether an open file with this link is that of a backend with this path.
fn is_of(link: &Path, path: &Path, id: &str) -> bool {
    let text = link.to_string_lossy();
    let link = PathBuf::from(text.strip_suffix(REMOVED).unwrap_or(&text));
    if link == path {
        return true;
    }
    // QEMU makes a file in a directory; its name has the block's, and six letters.
    let name = link.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let block = name.strip_prefix(IN_DIRECTORY).and_then(|rest| Some(rest.rsplit_once('.')?.0));
    let is_its = |block: &str| block.strip_prefix("_objects_").unwrap_or(block) == id;
    link.parent() == Some(path) && block.is_some_and(is_its)
}

/// Opens a process's open file, if it is one of these.
fn open_if(file: &Path, those: &[FileId]) -> Option<File> {
    let file = OpenOptions::new().read(true).write(true).open(file).ok()?;
    let metadata = file.metadata().ok().filter(fs::Metadata::is_file)?;
    let device = metadata.dev();
    let id = FileId { major: major(device), minor: minor(device), inode: metadata.ino() };
    those.contains(&id).then_some(file)
}

/// The files that a process has mapped as shared memory that it writes to.
fn mapped(maps: &str) -> Vec<FileId> {
    maps.lines().filter_map(shared_file).collect()
}

/// The file of a line of `maps`, which starts `ADDRESSES rw-s OFFSET MAJOR:MINOR INODE`.
fn shared_file(line: &str) -> Option<FileId> {
    let mut words = line.split(' ');
    let rights = words.nth(1)?;
    if !rights.starts_with("rw") || !rights.ends_with('s') {
        return None;
    }
    let (major, minor) = words.nth(1)?.split_once(':')?;
    let inode = words.next()?.parse::<u64>().ok().filter(|inode| *inode != 0)?;
    let device = |text| u32::from_str_radix(text, 16).ok();
    Some(FileId { major: device(major)?, minor: device(minor)?, inode })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_shared_memory_that_is_written_to_counts() {
        let maps = "7f00-7f10 rw-s 00000000 00:01 2057   /memfd:droveway-ram (deleted)\n\
                    7f10-7f20 rw-p 00000000 00:01 2058   /private\n\
                    7f20-7f30 r--s 00000000 fe:0a 77   /read\n\
                    7f30-7f40 rw-s 00001000 fe:0a 78   /dev/shm/a b\n\
                    7f40-7f50 rw-s 00000000 00:00 0\n\
                    nonsense";
        let ids = [(0, 1, 2057), (0xfe, 0x0a, 78)];
        let ids = ids.map(|(major, minor, inode)| FileId { major, minor, inode });
        assert_eq!(mapped(maps), ids);
    }

    #[test]
    fn a_file_is_known_by_where_it_was_opened() {
        let is = |link: &str, path: &str| is_of(Path::new(link), Path::new(path), "r");
        assert!(is("/srv/ram", "/srv/ram") && is("/srv/ram (deleted)", "/srv/ram"));
        for block in ["r", "_objects_r"] {
            assert!(is(&format!("/huge/qemu_back_mem.{block}.x4Zq1b (deleted)"), "/huge"));
        }
        for (link, path) in [
            ("/srv/other", "/srv/ram"),
            ("/huge/qemu_back_mem.s.x4Zq1b (deleted)", "/huge"),
            ("/huge/qemu_back_mem.r.x4Zq1b (deleted)", "/"),
            ("/huge/r", "/huge"),
            ("socket:[7]", "/srv/ram"),
        ] {
            assert!(!is(link, path), "{link} {path}");
        }
    }

    #[test]
    fn an_open_file_is_opened_only_if_it_is_mapped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ram");
        fs::write(&path, "content").unwrap();
        let metadata = fs::metadata(&path).unwrap();
        let (device, inode) = (metadata.dev(), metadata.ino());
        let id = FileId { major: major(device), minor: minor(device), inode };
        assert!(open_if(&path, &[]).is_none());
        assert!(open_if(&path, &[FileId { inode: inode + 1, ..id }]).is_none());
        let file = open_if(&path, &[id]).unwrap();
        assert_eq!(file.metadata().unwrap().ino(), inode);
        assert!(open_if(dir.path(), &[id]).is_none());
    }
}
