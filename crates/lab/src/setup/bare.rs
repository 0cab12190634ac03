//! The kernel of guests without an operating system: `bare-guest`, for a machine that
//! has none.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use crate::error::{FileContext, Result};
use crate::program;
use crate::setup::{repository, say, store};

/// Without SSE, which a KVM that emulates may not know.
const TARGET: &str = "x86_64-unknown-none";
const NAME: &str = "bare-guest";
/// What cargo puts between flags.
const SEPARATOR: &str = "\x1f";

/// Where it is, once it is built.
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
        // The target may be missing, which is the likeliest. Else it fails again.
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
    // A directory of its own: other flags than the rest of the workspace.
    build.arg(store.join("bare")).current_dir(repository());
    let script = repository().join("crates/bare-guest/kernel/kernel.ld");
    let script = format!("-Clink-arg=-T{}", script.display());
    let flags = ["-Crelocation-model=static", "-Cstrip=symbols", &script];
    build.env("CARGO_ENCODED_RUSTFLAGS", flags.join(SEPARATOR));
    program::output(&mut build).map(drop)
}
