//! A disk image with a file system full of files, made once for all runs: each run gets a copy of
//! it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use lab_guest::cache::{Layout, Use};
use tempfile::TempDir;

use lab::error::{FileContext, Result};
use lab::hosts;
use lab::program;

const MIB: u64 = 1 << 20;
/// Room for the file system's metadata and journal.
const MORE_BYTES: u64 = 96 * MIB;
/// Inodes for directories, and for files that the guest makes.
const MORE_FILES: u64 = 20_000;

/// The image. Dropping it removes it.
pub(crate) struct Files {
    dir: TempDir,
}

impl Files {
    pub(crate) fn make(layout: &Layout) -> Result<Self> {
        let files = Self { dir: hosts::scratch("files")? };
        let below = files.dir.path().join("files");
        fs::create_dir(&below).at("make", &below)?;
        layout.make(&below).at("fill", &below)?;
        let image = files.image();
        let room = if layout.kind == Use::Mail { layout.bytes() / 4 } else { 0 };
        let bytes = (layout.bytes() + room + MORE_BYTES).next_multiple_of(MIB);
        File::create(&image).and_then(|file| file.set_len(bytes)).at("make", &image)?;
        let inodes = (layout.files() + layout.files() / 4 + MORE_FILES).to_string();
        program::output(
            program::command("mkfs.ext4")
                .args(["-q", "-F", "-b", "4096", "-m", "0", "-N", &inodes])
                // Otherwise the kernel would do it while it is measured.
                .args(["-E", "lazy_itable_init=0,lazy_journal_init=0", "-d"])
                .args([&below, &image]),
        )?;
        fs::remove_dir_all(&below).at("remove", &below)?;
        Ok(files)
    }

    /// Path of the image.
    pub(crate) fn image(&self) -> PathBuf {
        Path::new(self.dir.path()).join("image")
    }
}
