//! `nft`, which loads firewall rules.

use std::fs;
use std::path::{Path, PathBuf};

use super::apt::Scratch;
use super::{libvirt, say};
use crate::error::{FileContext, Result};
use crate::program;

/// Where libraries are below an unpacked root, for programs that are not installed.
const LIBRARIES: [&str; 2] = ["usr/lib", "lib"];

/// A program, and the directories of libraries that it needs in addition to those of the system.
#[derive(Clone, Debug)]
pub struct Nft {
    /// The program.
    pub program: PathBuf,
    /// For `LD_LIBRARY_PATH`; empty if it is installed.
    pub libraries: String,
}

/// The system's, or one that is unpacked and not installed.
pub(super) fn nft(store: &Path) -> Result<Nft> {
    if let Some(program) = program::find("nft") {
        return Ok(Nft { program, libraries: String::new() });
    }
    let home = store.join("nft");
    if !home.is_dir() {
        say("unpacking nft (it is not installed)");
        let scratch = Scratch::new(store, "nft")?;
        libvirt::unpacked(store, |apt| apt.unpack_missing(&["nftables"], &scratch.0))?;
        fs::rename(&scratch.0, &home).at("create", &home)?;
    }
    let mut libraries = Vec::new();
    for parent in LIBRARIES.map(|parent| home.join(parent)) {
        for entry in fs::read_dir(&parent).into_iter().flatten() {
            let directory = entry.at("list", &parent)?.path();
            if directory.to_string_lossy().ends_with("-linux-gnu") {
                libraries.push(directory.display().to_string());
            }
        }
    }
    Ok(Nft { program: home.join("usr/sbin/nft"), libraries: libraries.join(":") })
}
