//! A program on both hosts that runs VMs, and that a test can replace while they run.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use lab::hosts::RUN_DIR;
use lab::setup;
use qemu::programs::USUAL;

use crate::{Side, World};

/// Its directory: agents start only what nobody but root can replace.
const HOME: &str = "files-qemu";
const NAME: &str = "bin/qemu-system-x86_64";

/// A program.
#[derive(Debug)]
pub struct OwnProgram {
    /// As command lines name it.
    pub path: PathBuf,
    /// On each host, as seen from outside.
    files: [PathBuf; 2],
}

impl OwnProgram {
    /// Has agents accept it, for which they restart. It executes the lab's QEMU.
    ///
    /// # Panics
    /// If there is no room for it.
    #[must_use]
    pub fn new(world: &mut World) -> Self {
        let file = |side| world.host(side).run_dir.join(HOME).join(NAME);
        let files = [Side::A, Side::B].map(file);
        for file in &files {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
        }
        let program = Self { path: Path::new(RUN_DIR).join(HOME).join(NAME), files };
        program.script(&world.kit.qemu, ":");
        let arguments = program.arguments();
        world.tell_agents_also(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        program
    }

    /// Arguments by which agents accept it, the usual programs and the lab's own.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let own = setup::own_qemus().into_iter().chain([self.path.clone()]);
        let own = own.map(|path| path.display().to_string());
        let all = USUAL.map(str::to_owned).into_iter().chain(own);
        all.flat_map(|place| ["--qemu-programs".to_owned(), place]).collect()
    }

    /// Puts a copy of an installed QEMU there, as its package does. A copy finds modules and
    /// firmware next to itself.
    ///
    /// # Panics
    /// If it can't be copied.
    pub fn copy(&self, qemu: &Path) {
        let installed = qemu.ancestors().nth(2).unwrap();
        for home in self.files.iter().map(|file| file.ancestors().nth(2).unwrap()) {
            for part in ["share", "lib"].map(Path::new) {
                if !home.join(part).exists() {
                    symlink(installed.join(part), home.join(part)).unwrap();
                }
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

    fn put(&self, make: impl Fn(&Path)) {
        for file in &self.files {
            let new = file.with_extension("new");
            make(&new);
            fs::rename(new, file).unwrap();
        }
    }
}
