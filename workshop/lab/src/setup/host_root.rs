//! A root for hosts as people have them: this Debian with systemd, a QEMU and our agent, each from
//! its package.

use std::fs;
use std::path::{Path, PathBuf};

use super::apt::{debian_mirror, debian_release, source};
use super::field::{PROGRAMS, install_package, kept_root, mask, require_root_of_all};
use super::{Kit, install, store};
use crate::error::{FileContext, LabError, Result};

/// Packages of the distribution besides QEMU: firmware that a VM of the field lab needs is among
/// them.
const PACKAGES: &str = "systemd,systemd-sysv,dbus,iproute2,ovmf";
/// QEMU's, and those that it needs in a version of its own suite: from backports apt takes only what
/// is named.
const QEMU_PACKAGES: [&str; 5] =
    ["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios", "qemu-utils"];
/// The program of such a QEMU.
pub const HOSTS_QEMU: &str = "/usr/bin/qemu-system-x86_64";
/// Where our package is in the root until it is installed.
const PACKAGE: &str = "var/tmp/droveway.deb";

/// Makes the root, unless it is there, and installs this package of ours in it. Its QEMU is of the
/// release of the kit's.
pub(super) fn root(kit: &Kit, package: &Path) -> Result<PathBuf> {
    let Some(release) = debian_release() else {
        let text = "hosts with packages are Debians of this system's release, which is no Debian";
        return Err(LabError::Unsupported(text.to_owned()));
    };
    require_root_of_all()?;
    install::missing(&PROGRAMS)?;
    let store = store::create()?.join("field");
    fs::create_dir_all(&store).at("create", &store)?;
    let is_newer = kit.qemu != kit.qemu_system;
    let backports = is_newer.then(|| format!("{release}-backports"));
    let suite = backports.as_ref().map(|suite| format!("/{suite}")).unwrap_or_default();
    let qemu = QEMU_PACKAGES.map(|name| format!("{name}{suite}")).join(",");
    let mut words = vec![format!("--include={PACKAGES},{qemu}")];
    if let Some(backports) = &backports {
        words.push(source(&debian_mirror()?, backports));
    }
    let root = kept_root(&store, &format!("{release}-host-root"), &release, &words)?;
    let there = root.join(PACKAGE);
    fs::copy(package, &there).at("copy", package)?;
    install_package(&root, PACKAGE)?;
    mask(&root)?;
    Ok(root)
}
