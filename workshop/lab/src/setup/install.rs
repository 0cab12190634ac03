//! Programs from the distribution.

use crate::error::{LabError, Result};
use crate::program;
use crate::setup::apt::is_ubuntu;
use crate::setup::say;

/// Programs, each with its Debian package.
const PROGRAMS: [(&str, &str); 10] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-img", "qemu-utils"),
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("dpkg-deb", "dpkg"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("mkfs.btrfs", "btrfs-progs"),
    ("strace", "strace"),
    ("redis-server", "redis-server"),
];

/// Programs that only tests of web pages need.
const BROWSER: [(&str, &str); 2] = [("chromium", "chromium"), ("chromedriver", "chromium-driver")];

/// Installs missing programs with apt-get.
pub(super) fn programs() -> Result<()> {
    missing(&PROGRAMS)
}

/// The same for a browser. Returns whether there is one: Ubuntu has none to install, since its
/// packages only lead to a snap.
pub(super) fn browser() -> Result<bool> {
    let is_missing = BROWSER.iter().any(|(name, _)| program::find(name).is_none());
    if is_missing && is_ubuntu() {
        return Ok(false);
    }
    missing(&BROWSER)?;
    Ok(true)
}

/// Installs those that are missing. A name may be a path, too.
pub(super) fn missing(programs: &[(&str, &'static str)]) -> Result<()> {
    let mut packages: Vec<&str> = programs
        .iter()
        .filter(|(name, _)| program::find(name).is_none())
        .map(|&(_, package)| package)
        .collect();
    packages.dedup();
    if packages.is_empty() {
        return Ok(());
    }
    let list = packages.join(" ");
    if program::find("apt-get").is_none() {
        let text = format!("install {list} (or what your distribution calls them) by hand");
        return Err(LabError::Unsupported(text));
    }
    say(&format!("installing {list} with apt-get"));
    let install = ["install", "-y", "-q", "--no-install-recommends"];
    let arguments: Vec<&str> = install.into_iter().chain(packages).collect();
    if apt_get(&arguments).is_err() {
        // Machines made from an image often have no package lists yet.
        apt_get(&["update", "-q"])?;
        apt_get(&arguments)?;
    }
    Ok(())
}

fn apt_get(arguments: &[&str]) -> Result<()> {
    let mut command = if program::root() {
        program::command("apt-get")
    } else {
        let mut sudo = program::command("sudo");
        sudo.arg("apt-get");
        sudo
    };
    command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
    program::output(&mut command).map(|_| ())
}
