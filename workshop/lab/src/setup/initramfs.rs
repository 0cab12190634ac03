//! The guests' initramfs: `lab-guest`, linked statically, as `/init`, and the
//! drivers that the kernel doesn't have built in.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use crate::cpio::Archive;
use crate::error::{FileContext, Result};
use crate::program;
use crate::setup::{download::LINKER, repository, say, store};

const TARGET: &str = "x86_64-unknown-linux-gnu";
const WITH_HELPER: &str = "initrd-helper";

/// Builds the guests' program.
pub(super) fn guest(store: &Path) -> Result<Vec<u8>> {
    if !store.join("initrd").is_file() {
        say("compiling the guests' program");
    }
    linked_statically(store, "lab-guest")
}

/// Packs it, if it changed.
pub(super) fn pack(store: &Path, program: &[u8], modules: &Path) -> Result<PathBuf> {
    let initrd = store.join("initrd");
    let mut archive = Archive::default();
    archive.directory("dev");
    archive.directory("proc");
    // The kernel opens it for `/init` before anything is mounted.
    archive.character_device("dev/console", 5, 1);
    archive.program("init", program);
    archive.directory("modules");
    add_files(&mut archive, "modules", modules)?;
    store::replace(&initrd, &archive.finish())?;
    Ok(initrd)
}

/// One of the workspace's programs, linked statically, for guests without libraries.
pub(super) fn linked_statically(store: &Path, name: &str) -> Result<Vec<u8>> {
    let target = store.join("guest");
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--release", "--package", name, "--bin", name]);
    // A directory of its own, since its flags differ from the rest of the workspace.
    build.args(["--target", TARGET, "--target-dir"]).arg(&target).current_dir(repository());
    build
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER");
    program::output(&mut build)?;
    let binary = target.join(TARGET).join("release").join(name);
    fs::read(&binary).at("read", &binary)
}

/// Path of the initramfs with the helper, once it is made.
pub(super) fn of_helper(store: &Path) -> PathBuf {
    store.join(WITH_HELPER)
}

/// Adds the helper, which reports what is in the page cache.
pub(super) fn with_helper(store: &Path, initrd: &Path, modules: &Path) -> Result<PathBuf> {
    let mut archive = Archive::default();
    archive.directory("modules");
    add_files(&mut archive, "modules", modules)?;
    archive.program("droveway-guest", &linked_statically(store, "droveway-guest")?);
    after(store, initrd, WITH_HELPER, archive)
}

/// Adds more drivers.
pub(super) fn with_modules(
    store: &Path,
    initrd: &Path,
    name: &str,
    modules: &Path,
) -> Result<PathBuf> {
    let mut archive = Archive::default();
    archive.directory("modules");
    add_files(&mut archive, "modules", modules)?;
    after(store, initrd, name, archive)
}

/// Adds a server and what it needs, as a second archive that the kernel unpacks over the first.
pub(super) fn with_server(
    store: &Path,
    initrd: &Path,
    server: &Path,
    modules: &Path,
) -> Result<PathBuf> {
    let mut archive = Archive::default();
    for directory in ["server", "lib64", "etc", "modules"] {
        archive.directory(directory);
    }
    archive.program("etc/passwd", b"root:x:0:0:root:/:/\n");
    add_files(&mut archive, "server", server)?;
    add_files(&mut archive, "modules", modules)?;
    let linker = server.join(LINKER);
    archive.program(&format!("lib64/{LINKER}"), &fs::read(&linker).at("read", &linker)?);
    after(store, initrd, "initrd-server", archive)
}

/// Writes the initramfs and the archive after it into one file.
fn after(store: &Path, initrd: &Path, name: &str, archive: Archive) -> Result<PathBuf> {
    let both = [fs::read(initrd).at("read", initrd)?, archive.finish()].concat();
    let path = store.join(name);
    store::replace(&path, &both)?;
    Ok(path)
}

/// Adds all files of a directory, always in the same order.
pub(super) fn add_files(archive: &mut Archive, to: &str, from: &Path) -> Result<()> {
    let entries = fs::read_dir(from).at("list", from)?.filter_map(std::io::Result::ok);
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        archive.program(&format!("{to}/{name}"), &fs::read(&path).at("read", &path)?);
    }
    Ok(())
}
