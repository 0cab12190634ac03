//! The distribution's OpenSSH server.

use std::fs;
use std::path::{Path, PathBuf};

use super::apt::Scratch;
use super::{libvirt, say};
use crate::error::{FileContext, Result};

const PACKAGES: [&str; 2] = ["openssh-server", "libwrap0"];

/// The directory into which it is unpacked.
pub(super) fn server(store: &Path) -> Result<PathBuf> {
    let home = store.join("ssh");
    if !home.is_dir() {
        say("unpacking OpenSSH's server (it is not installed)");
        let scratch = Scratch::new(store, "ssh")?;
        libvirt::unpacked(store, |apt| apt.unpack(&PACKAGES, &scratch.0))?;
        fs::rename(&scratch.0, &home).at("create", &home)?;
    }
    Ok(home)
}
