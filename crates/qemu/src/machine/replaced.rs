//! Whether a running QEMU's program was replaced on disk.
//!
//! An upgrade of the package gives the program's path to another file. The QEMUs that run keep the
//! former one, until their VMs move or start again.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};

use crate::process::{command_line_of, directory_of, proc_path};

/// What Linux appends to the path of a file that has lost its name.
const DELETED: &str = " (deleted)";
/// The first bytes of a script.
const SCRIPT: [u8; 2] = *b"#!";

/// Whether a process runs another file than the one at its program's path. False as well if that
/// can't be read.
pub(super) fn is_replaced(pid: u32) -> bool {
    let Ok(running) = fs::read_link(proc_path(pid, "exe")) else { return false };
    running.to_string_lossy().ends_with(DELETED) || leads_elsewhere(pid, &running).unwrap_or(false)
}

/// Whether a process runs this file. False as well if that can't be read.
pub(super) fn runs(pid: u32, program: &Path) -> bool {
    let (there, runs) = (fs::metadata(program), fs::metadata(proc_path(pid, "exe")));
    let (Ok(there), Ok(runs)) = (there, runs) else { return false };
    (there.dev(), there.ino()) == (runs.dev(), runs.ino())
}

fn leads_elsewhere(pid: u32, running: &Path) -> Option<bool> {
    let name = command_line_of(pid).ok()?.into_iter().next()?;
    let path = if name.contains('/') {
        directory_of(pid).ok()?.join(name)
    } else {
        // It was found in the PATH of the program that started it.
        running.with_file_name(name)
    };
    // A QEMU in a container has a root directory of its own.
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let root = open(proc_path(pid, "root"), flags, Mode::empty()).ok()?;
    let found = openat2(&root, &path, flags, Mode::empty(), ResolveFlags::IN_ROOT).ok()?;
    let found = File::from(found);
    let (there, runs) = (found.metadata().ok()?, fs::metadata(proc_path(pid, "exe")).ok()?);
    if !there.is_file() {
        return None;
    }
    if (there.dev(), there.ino()) == (runs.dev(), runs.ino()) {
        return Some(false);
    }
    // A script may have started the program under its own name.
    let mut first = [0; SCRIPT.len()];
    let mut readable = File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).ok()?;
    readable.read_exact(&mut first).ok()?;
    Some(first != SCRIPT)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::process::CommandExt;
    use std::path::PathBuf;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A program that runs until it is dropped.
    struct Runs(Child);

    impl Runs {
        fn new(program: &Path, called: &Path) -> Self {
            let mut command = Command::new(program);
            let runs = Self(command.arg0(called).stdin(Stdio::piped()).spawn().unwrap());
            // Linux returns to the one that spawns it before the program has its arguments.
            while command_line_of(runs.0.id()).is_err() {
                std::thread::yield_now();
            }
            runs
        }

        fn is_replaced(&self) -> bool {
            is_replaced(self.0.id())
        }
    }

    impl Drop for Runs {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    /// Directories that each have a file of the same program.
    fn programs() -> (tempfile::TempDir, PathBuf, [PathBuf; 2]) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let programs = ["old", "new"].map(|name| {
            let home = root.join(name);
            fs::create_dir(&home).unwrap();
            // A file that this process had open for writing might not be executable yet: other
            // tests' children may have inherited it.
            assert!(Command::new("cp").arg("/bin/cat").arg(&home).status().unwrap().success());
            home.join("cat")
        });
        (dir, root, programs)
    }

    #[test]
    fn a_program_that_another_file_replaces() {
        let (_dir, _, [old, new]) = programs();
        let runs = Runs::new(&old, &old);
        assert!(!runs.is_replaced());
        assert!(super::runs(runs.0.id(), &old) && !super::runs(runs.0.id(), &new));
        fs::rename(&new, &old).unwrap();
        assert!(runs.is_replaced() && !super::runs(runs.0.id(), &old));
        let next = Runs::new(&old, &old);
        assert!(!next.is_replaced());
        fs::remove_file(&old).unwrap();
        assert!(next.is_replaced());
    }

    #[test]
    fn a_program_that_makes_room_for_another() {
        let (_dir, root, [old, new]) = programs();
        for called in [old.as_path(), Path::new("cat")] {
            let runs = Runs::new(&old, called);
            fs::rename(&old, root.join("old/aside")).unwrap();
            assert!(!runs.is_replaced(), "it is there, and nothing has its name");
            fs::copy(&new, &old).unwrap();
            assert!(runs.is_replaced(), "{}", called.display());
            fs::rename(root.join("old/aside"), &old).unwrap();
            assert!(!runs.is_replaced());
        }
    }

    #[test]
    fn a_link_that_leads_to_another_program() {
        let (_dir, root, [old, new]) = programs();
        let link = root.join("cat");
        symlink(&old, &link).unwrap();
        let runs = Runs::new(&link, &link);
        assert!(!runs.is_replaced());
        fs::remove_file(&link).unwrap();
        symlink(&new, &link).unwrap();
        assert!(runs.is_replaced());
    }

    #[test]
    fn a_script_is_not_the_program_that_it_starts() {
        let (_dir, root, [old, _]) = programs();
        let script = root.join("cat");
        fs::write(&script, "#!/bin/sh\n").unwrap();
        let runs = Runs::new(&old, &script);
        assert!(!runs.is_replaced() && !super::runs(runs.0.id(), &script));
    }

    #[test]
    fn what_cannot_be_read_is_not_reported() {
        assert!(!is_replaced(u32::MAX));
    }
}
