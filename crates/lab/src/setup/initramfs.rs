//! The guests' initramfs: `lab-guest`, linked statically, as `/init`, and the
//! drivers that the kernel doesn't have built in.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use crate::cpio::Archive;
use crate::error::{FileContext, Result};
use crate::program;
use crate::setup::{repository, say};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds it, if its program changed.
pub(super) fn build(store: &Path, modules: &Path) -> Result<PathBuf> {
    let initrd = store.join("initrd");
    let target = store.join("guest");
    let binary = target.join(TARGET).join("release/lab-guest");
    if !initrd.is_file() {
        say("building the guests' initramfs");
    }
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--release", "--package", "lab-guest", "--bin", "lab-guest"]);
    // A directory of its own: other flags than the rest of the workspace.
    build.args(["--target", TARGET, "--target-dir"]).arg(&target).current_dir(repository());
    build
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    program::output(&mut build)?;
    let program = fs::read(&binary).at("read", &binary)?;
    let archive = pack(&program, modules)?;
    if fs::read(&initrd).is_ok_and(|old| old == archive) {
        return Ok(initrd);
    }
    // In two steps: a guest that boots meanwhile never sees half of it.
    let partial = store.join(format!("initrd.{}", std::process::id()));
    fs::write(&partial, archive).at("write", &partial)?;
    fs::rename(&partial, &initrd).at("create", &initrd)?;
    Ok(initrd)
}

fn pack(program: &[u8], modules: &Path) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    archive.directory("dev");
    archive.directory("proc");
    // The kernel opens it for /init before anything is mounted.
    archive.character_device("dev/console", 5, 1);
    archive.program("init", program);
    archive.directory("modules");
    let entries = fs::read_dir(modules).at("list", modules)?.filter_map(std::io::Result::ok);
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        archive.program(&format!("modules/{name}"), &fs::read(&path).at("read", &path)?);
    }
    Ok(archive.finish())
}
