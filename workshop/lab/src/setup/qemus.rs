//! QEMUs besides the distribution's: one that is correct under TCG if the distribution's isn't, and
//! the current one. They are unpacked into the lab's store, not installed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{FileContext, LabError, Result};
use crate::program;
use crate::setup::apt::{Apt, CURRENT_SUITES, Scratch, Sources, debian_release};
use crate::setup::{say, store};

const NEWER: &str = "qemu-10.0";
/// Its suite.
pub(super) const NEWER_SUITE: &str = "bookworm-backports";
/// Without `ipxe-qemu`: backports lacks it, and the system's serves both.
const NEWER_PACKAGES: [&str; 4] =
    ["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"];

const CURRENT: &str = "qemu-current";
const CURRENT_PACKAGE: &str = "qemu-system-x86";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LINKER: &str = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";

fn wrapper(home: &Path) -> PathBuf {
    home.join("bin/qemu-system-x86_64")
}

/// The wrapper and the program of each, whether they exist or not.
pub(super) fn places(store: &Path) -> [PathBuf; 4] {
    let [newer, current] = [NEWER, CURRENT].map(|name| store.join(name));
    [wrapper(&newer), newer.join(PROGRAM), wrapper(&current), current.join(PROGRAM)]
}

/// Where QEMUs besides the distribution's are, if the lab needs them.
#[must_use]
pub fn own_qemus() -> Vec<PathBuf> {
    places(&store()).to_vec()
}

/// The environment variable that the wrapper of an unpacked QEMU sets, and its value. A process
/// that the wrapper has started does not show it on its command line.
pub(super) fn environment(program: &Path) -> Option<String> {
    modules(program).map(|modules| format!("QEMU_MODULE_DIR={}", modules.display()))
}

/// Where the modules of an unpacked QEMU are.
pub(super) fn modules(program: &Path) -> Option<PathBuf> {
    let home = program.parent()?.parent()?;
    Some(home.join(LIBRARIES).join("qemu")).filter(|modules| modules.is_dir())
}

/// QEMU 10.0 from Debian's backports.
pub(super) fn newer(store: &Path) -> Result<PathBuf> {
    let home = store.join(NEWER);
    if wrapper(&home).is_file() {
        return Ok(wrapper(&home));
    }
    if debian_release().as_deref() != Some("bookworm") {
        let text = "KVM can't boot a guest here, and this distribution's QEMU loses pages under \
                    TCG (it is older than 9.0): install QEMU 9.0 or newer, or use a machine with \
                    KVM";
        return Err(LabError::Unsupported(text.to_owned()));
    }
    say("unpacking QEMU 10.0 from bookworm-backports (7.2 loses pages under TCG; the system's \
         QEMU stays as it is)");
    let apt = Apt::new(store, "backports", Sources::Suites(&[NEWER_SUITE]))?;
    apt.update()?;
    let scratch = Scratch::new(store, "qemu")?;
    apt.unpack(&NEWER_PACKAGES, &scratch.0)?;
    keep(&scratch, &home)
}

/// The current QEMU, from the backports of the current Debian, with its own libraries; none where
/// packages are not Debian's.
pub(super) fn current(store: &Path) -> Result<Option<PathBuf>> {
    let home = store.join(CURRENT);
    if wrapper(&home).is_file() {
        return Ok(Some(wrapper(&home)));
    }
    if debian_release().is_none() {
        return Ok(None);
    }
    say("unpacking the current QEMU from trixie-backports, with its own libraries (the system's \
         stay as they are)");
    let apt = Apt::new(store, "current", Sources::Suites(&CURRENT_SUITES))?;
    apt.update()?;
    let scratch = Scratch::new(store, "qemu-current")?;
    apt.unpack_root(&[CURRENT_PACKAGE], CURRENT_SUITES[1], &scratch.0)?;
    bind_libraries(store, &scratch.0, &home)?;
    keep(&scratch, &home).map(Some)
}

/// Has the program use the libraries next to it, and their dynamic linker, at their final paths.
fn bind_libraries(store: &Path, scratch: &Path, home: &Path) -> Result<()> {
    let tool = Scratch::new(store, "patchelf")?;
    let apt = Apt::new(store, "system", Sources::System)?;
    if apt.unpack(&["patchelf"], &tool.0).is_err() {
        // Outdated lists name packages that are gone.
        apt.update()?;
        apt.unpack(&["patchelf"], &tool.0)?;
    }
    let mut patch = Command::new(tool.0.join("usr/bin/patchelf"));
    patch.arg("--set-interpreter").arg(home.join(LINKER));
    // Libraries find their own dependencies by this path, too.
    patch.arg("--force-rpath").arg("--set-rpath").arg(home.join(LIBRARIES));
    program::output(patch.arg(scratch.join(PROGRAM))).map(|_| ())
}

fn keep(scratch: &Scratch, home: &Path) -> Result<PathBuf> {
    let script = wrapper(&scratch.0);
    let bin = scratch.0.join("bin");
    fs::create_dir_all(&bin).at("create", &bin)?;
    fs::write(&script, wrapper_script(home)).at("write", &script)?;
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(&script, executable).at("make executable", &script)?;
    fs::rename(&scratch.0, home).at("create", home)?;
    Ok(wrapper(home))
}

fn wrapper_script(home: &Path) -> String {
    let home = home.display();
    format!(
        "#!/bin/sh\n\
         # The QEMU that is unpacked beside this, with its own modules and firmware.\n\
         home='{home}'\n\
         export QEMU_MODULE_DIR=\"$home/{LIBRARIES}/qemu\"\n\
         exec \"$home/{PROGRAM}\" -L \"$home/usr/share/qemu\" \
         -L \"$home/usr/share/seabios\" -L /usr/lib/ipxe/qemu \"$@\"\n"
    )
}
