//! A program on host A that runs VMs, and that a test can replace while they run.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use lab::hosts::RUN_DIR;

use crate::{Side, World};

/// Its directory: agents start only what nobody but root can replace.
const HOME: &str = "files-qemu";
const NAME: &str = "bin/qemu-system-x86_64";

/// A program.
#[derive(Debug)]
pub struct OwnProgram {
    /// As command lines name it.
    pub path: PathBuf,
    outside: PathBuf,
}

impl OwnProgram {
    /// Has agents accept it, for which they restart. It doesn't exist yet.
    ///
    /// # Panics
    /// If there is no room for it.
    #[must_use]
    pub fn new(world: &mut World) -> Self {
        let path = Path::new(RUN_DIR).join(HOME).join(NAME);
        world.list_program(&path.display().to_string());
        let outside = world.host(Side::A).run_dir.join(HOME).join(NAME);
        fs::create_dir_all(outside.parent().unwrap()).unwrap();
        Self { path, outside }
    }

    /// Puts a copy of an installed QEMU there, as its package does. A copy finds modules and
    /// firmware next to itself.
    ///
    /// # Panics
    /// If it can't be copied.
    pub fn copy(&self, qemu: &Path) {
        let installed = qemu.ancestors().nth(2).unwrap();
        let home = self.outside.ancestors().nth(2).unwrap();
        for part in ["share", "lib"].map(Path::new) {
            if !home.join(part).exists() {
                symlink(installed.join(part), home.join(part)).unwrap();
            }
        }
        self.put(|new| {
            fs::copy(qemu, new).unwrap();
        });
    }

    /// Puts a script there that executes a QEMU. If a VM is to arrive in it, it does something else
    /// first.
    ///
    /// # Panics
    /// If it can't be written.
    pub fn script(&self, qemu: &Path, on_arrival: &str) {
        let text = format!(
            "#!/bin/sh\n\
             case \" $* \" in *\" -incoming \"*)\n{on_arrival}\n;; esac\n\
             exec '{}' \"$@\"\n",
            qemu.display()
        );
        self.put(|new| {
            fs::write(new, &text).unwrap();
            fs::set_permissions(new, Permissions::from_mode(0o755)).unwrap();
        });
    }

    fn put(&self, make: impl FnOnce(&Path)) {
        let new = self.outside.with_extension("new");
        make(&new);
        fs::rename(new, &self.outside).unwrap();
    }
}
