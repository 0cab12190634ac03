//! Against real QEMU: `DROVEWAY_QEMU`, or `qemu-system-x86_64` from the path,
//! and `qemu-img`, `qemu-io` and `qemu-nbd` from the path. Without them these
//! tests fail.
//!
//! - `programs`: QEMU's programs against this crate's server
//! - `mirror`: a VM's disk mirrored into the server, while it is written
//! - `export`: this crate's client into `qemu-nbd` and into a waiting VM's export
//! - `chain`: mirror, server, client, a waiting VM's export

mod chain;
mod disk;
mod export;
mod mirror;
mod programs;
mod vm;

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Runs a program in a folder.
fn run(dir: &Path, program: &str, arguments: &str) -> Output {
    Command::new(program)
        .args(arguments.split('|').flat_map(pieces))
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}; install qemu-utils"))
}

/// Splits arguments at spaces; a part between bars that starts with `'` is one argument.
fn pieces(part: &str) -> Vec<&str> {
    match part.strip_prefix('\'') {
        Some(whole) => vec![whole],
        None => part.split_whitespace().collect(),
    }
}

/// Runs a program that must succeed, and returns its output.
fn say(dir: &Path, program: &str, arguments: &str) -> String {
    let output = run(dir, program, arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{program} {arguments}: {out} {err}");
    out + &err
}

/// Bytes that don't compress and don't repeat.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut out = Vec::with_capacity(bytes + 8);
    // Not byte by byte: this is compiled without optimization.
    while out.len() < bytes {
        out.extend_from_slice(&next());
    }
    out.truncate(bytes);
    out
}
