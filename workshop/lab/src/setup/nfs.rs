//! An NFS server that needs nothing of the kernel, unpacked and not installed, since installing one
//! starts it; and the NFS client of QEMU and its tools, since a kernel without NFS mounts nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt::{Apt, Scratch, Sources};
use super::{Kit, field, install, libvirt, qemus, say};
use crate::error::{FileContext, LabError, Result};
use crate::program;

/// The server, its access to file systems, and where its clients ask for its ports.
const SERVER: [&str; 3] = ["nfs-ganesha", "nfs-ganesha-vfs", "rpcbind"];
/// QEMU's client is a module, which the distribution has in this package, at this path.
const CLIENT: &str = "qemu-block-extra";
const INSTALLED: &str = "/usr/lib/x86_64-linux-gnu/qemu/block-nfs.so";
const MODULE: &str = "block-nfs.so";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// An NFS server.
#[derive(Clone, Debug)]
pub struct Nfs {
    /// Where its packages are unpacked.
    pub(crate) home: PathBuf,
    /// The program that knows its ports.
    pub(crate) rpcbind: PathBuf,
    /// The server.
    pub(crate) ganesha: PathBuf,
    /// Its modules.
    pub(crate) modules: PathBuf,
    /// For `LD_LIBRARY_PATH`.
    pub(crate) libraries: String,
}

/// Finds or unpacks it, and gives the kit's QEMU and the distribution's tools their client.
pub(super) fn ensure(store: &Path, kit: &Kit) -> Result<Nfs> {
    if !field::is_root_of_all() {
        let text = "an NFS server opens files by their handles, which needs root, not a user \
                    namespace: run it as root or with sudo";
        return Err(LabError::Unsupported(text.to_owned()));
    }
    install::missing(&[(INSTALLED, CLIENT)])?;
    if !Path::new(INSTALLED).is_file() {
        // A distribution may build the package without it.
        return Err(LabError::Missing { what: INSTALLED.to_owned() });
    }
    give_client(store, kit)?;
    let home = store.join("nfs");
    if !home.is_dir() {
        say("unpacking an NFS server (it is not installed)");
        let scratch = Scratch::new(store, "nfs")?;
        libvirt::unpacked(store, |apt| apt.unpack_missing(&SERVER, &scratch.0))?;
        fs::rename(&scratch.0, &home).at("create", &home)?;
    }
    let find = |name: &str| {
        let unpacked = ["usr/bin", "usr/sbin", "sbin"].map(|dir| home.join(dir).join(name));
        let unpacked = unpacked.into_iter().find(|path| path.is_file());
        let found = unpacked.or_else(|| program::find(name));
        found.ok_or_else(|| LabError::Missing { what: name.to_owned() })
    };
    let libraries = [LIBRARIES, "lib/x86_64-linux-gnu", "usr/lib/ganesha"];
    let libraries = libraries.map(|dir| home.join(dir).display().to_string()).join(":");
    let modules = [home.join(LIBRARIES), Path::new("/").join(LIBRARIES)];
    let modules = modules.map(|dir| dir.join("ganesha")).into_iter().find(|dir| dir.is_dir());
    let modules =
        modules.ok_or_else(|| LabError::Missing { what: "nfs-ganesha-vfs".to_owned() })?;
    Ok(Nfs { rpcbind: find("rpcbind")?, ganesha: find("ganesha.nfsd")?, modules, libraries, home })
}

/// A QEMU that is unpacked, and not the distribution's, has modules of its own. They must be of the
/// same build: libvirt has it load all of them, and it exits at another one's.
fn give_client(store: &Path, kit: &Kit) -> Result<()> {
    let Some(modules) = qemus::modules(&kit.qemu) else { return Ok(()) };
    let module = modules.join(MODULE);
    if module.is_file() {
        return Ok(());
    }
    let shown = program::output(Command::new(&kit.qemu).arg("--version"))?;
    let Some(version) = package_version(&shown) else {
        return Err(LabError::Text { what: "QEMU's package version", text: shown });
    };
    let package = format!("{CLIENT}={version}");
    let scratch = Scratch::new(store, "nfs-client")?;
    let apt = Apt::new(store, "backports", Sources::Suites(&[qemus::NEWER_SUITE]))?;
    apt.update()?;
    apt.unpack(&[package.as_str()], &scratch.0)?;
    let unpacked = scratch.0.join(LIBRARIES).join("qemu").join(MODULE);
    fs::rename(&unpacked, &module).at("create", &module)
}

/// The version of the package that a QEMU is from, which it prints in brackets.
fn package_version(shown: &str) -> Option<&str> {
    let (version, _) = shown.split_once("(Debian ")?.1.split_once(')')?;
    Some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_prints_the_version_of_its_package() {
        let shown = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2~bpo12+1)\nCopyright";
        assert_eq!(package_version(shown), Some("1:10.0.2+ds-2~bpo12+1"));
        assert_eq!(package_version("QEMU emulator version 10.0.2\n(c) 2024"), None);
    }
}
