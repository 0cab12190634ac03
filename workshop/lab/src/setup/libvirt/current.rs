//! libvirt of the current Debian, with the libraries that it needs. Laid over `/usr`, they serve
//! older programs as well.

use std::fs;
use std::path::Path;

use super::{Libvirt, version_in};
use crate::error::{FileContext, Result};
use crate::setup::apt::{Apt, CURRENT_SUITES, Scratch, Sources, debian_release};
use crate::setup::say;

const NAME: &str = "libvirt-current";
const CAPABILITIES: &str = "libvirt-current-capabilities";
const PACKAGES: [&str; 5] = [
    "libvirt-daemon",
    "libvirt-daemon-driver-qemu",
    "libvirt-daemon-driver-secret",
    "libvirt-daemon-driver-storage",
    "libvirt-clients",
];
const LIBRARIES: &str = "lib/x86_64-linux-gnu";
/// The parts of these packages, and of their dependencies, that are laid over `/usr`.
const PARTS: [&str; 5] = ["bin/virsh", "sbin/libvirtd", "lib/libvirt", LIBRARIES, "share/libvirt"];
/// Left out: hosts have QEMUs of their own, which would find these modules.
const NOT: &str = "lib/x86_64-linux-gnu/qemu";

/// None where packages are not Debian's, or the system is the current Debian. All other fields are
/// those of `usual`.
pub(super) fn ensure(store: &Path, usual: &Libvirt) -> Result<Option<Libvirt>> {
    let home = store.join(NAME);
    if !home.is_dir() {
        if debian_release().is_none_or(|release| release == CURRENT_SUITES[0]) {
            return Ok(None);
        }
        say(
            "unpacking the current libvirt from trixie, with its own libraries (the system's stay \
             as they are)",
        );
        let apt = Apt::new(store, "current", Sources::Suites(&CURRENT_SUITES))?;
        apt.update()?;
        let scratch = Scratch::new(store, NAME)?;
        apt.unpack_root(&PACKAGES, CURRENT_SUITES[0], &scratch.0)?;
        let kept = Scratch::new(store, "libvirt-current-parts")?;
        keep(&scratch.0.join("usr"), &kept.0)?;
        fs::rename(&kept.0, &home).at("create", &home)?;
    }
    let capabilities = store.join(CAPABILITIES);
    fs::create_dir_all(&capabilities).at("create", &capabilities)?;
    let version = version_in(&home.join(LIBRARIES))?;
    Ok(Some(Libvirt { version, tree: Some(home), capabilities, ..usual.clone() }))
}

fn keep(usr: &Path, into: &Path) -> Result<()> {
    let not = usr.join(NOT);
    if not.is_dir() {
        fs::remove_dir_all(&not).at("remove", &not)?;
    }
    for part in PARTS {
        let to = into.join(part);
        let dir = to.parent().unwrap_or(into);
        fs::create_dir_all(dir).at("create", dir)?;
        fs::rename(usr.join(part), &to).at("move", usr.join(part))?;
    }
    Ok(())
}
