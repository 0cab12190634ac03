//! OpenSSH's server, as the distribution has it.

use std::fs;
use std::path::{Path, PathBuf};

use super::apt::{Apt, Scratch, Sources};
use super::say;
use crate::error::{FileContext, Result};

const PACKAGES: [&str; 2] = ["openssh-server", "libwrap0"];

/// The directory that it is unpacked in.
pub(super) fn server(store: &Path) -> Result<PathBuf> {
    let unpacked = store.join("ssh");
    if !unpacked.is_dir() {
        say("unpacking OpenSSH's server");
        let scratch = Scratch::new(store, "ssh")?;
        let apt = Apt::new(store, "ssh", Sources::System)?;
        apt.update()?;
        apt.unpack(&PACKAGES, &scratch.0)?;
        fs::rename(&scratch.0, &unpacked).at("rename", &scratch.0)?;
    }
    Ok(unpacked)
}
