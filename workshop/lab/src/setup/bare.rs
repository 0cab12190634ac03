//! The kernel of guests without an operating system: `bare-guest`, built for a bare machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use crate::error::{FileContext, Result};
use crate::program;
use crate::setup::{repository, say, store};

/// A target without SSE, which a KVM that emulates instructions may not know.
const TARGET: &str = "x86_64-unknown-none";
const NAME: &str = "bare-guest";
/// Separator between flags in cargo's variable.
const SEPARATOR: &str = "\x1f";

/// Path of the kernel, once it is built.
pub(super) fn path(store: &Path) -> PathBuf {
    store.join("bare-kernel")
}

/// Builds it, if its program changed.
pub(super) fn build(store: &Path) -> Result<PathBuf> {
    let kernel = path(store);
    if !kernel.is_file() {
        say("compiling the kernel of guests without an operating system");
    }
    if compile(store).is_err() {
        // Most likely the target is missing; otherwise this fails again.
        program::output(&mut Command::new(repository().join("scripts/toolchain")))?;
        compile(store)?;
    }
    let built = store.join("bare").join(TARGET).join("release").join(NAME);
    store::replace(&kernel, &fs::read(&built).at("read", &built)?)?;
    Ok(kernel)
}

fn compile(store: &Path) -> Result<()> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--release", "--package", NAME, "--bin", NAME]);
    build.args(["--features", "kernel", "--target", TARGET, "--target-dir"]);
    // A directory of its own, since its flags differ from the rest of the workspace.
    build.arg(store.join("bare")).current_dir(repository());
    let script = repository().join("workshop/bare-guest/kernel/kernel.ld");
    let script = format!("-Clink-arg=-T{}", script.display());
    let flags = ["-Crelocation-model=static", "-Cstrip=symbols", &script];
    build.env("CARGO_ENCODED_RUSTFLAGS", flags.join(SEPARATOR));
    build.env_remove("RUSTC_WORKSPACE_WRAPPER");
    program::output(&mut build).map(drop)
}
