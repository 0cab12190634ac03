//! The environment in which a QEMU was started, as far as it decides which code QEMU runs.
//!
//! A QEMU that an agent starts has the agent's environment. What a wrapper script or a unit set for
//! an adopted QEMU is not carried over: a host that was broken into could name code of its own
//! for the destination to load (`LD_PRELOAD`). Operators read what is missing instead.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;

use crate::process::proc_path;

/// How names of such variables start.
const PREFIXES: [&str; 3] = ["LD_", "QEMU_", "GLIBC_TUNABLES"];
/// A process may overwrite its environment, as long as it is.
const BYTES_MAX: u64 = 1 << 20;
const NAMES_MAX: usize = 16;
const NAME_BYTES_MAX: usize = 64;

/// Variables by name, with their values.
type Variables = BTreeMap<String, Vec<u8>>;

/// The names of variables that decide which code this process loads and its QEMUs load.
#[must_use]
pub fn own() -> Vec<String> {
    own_variables().into_keys().collect()
}

/// The names of variables that decide which code a QEMU loads, and that a QEMU which this process
/// starts lacks, or has with other values. Empty if the QEMU's environment can't be read.
#[must_use]
pub fn not_inherited(pid: u32) -> Vec<String> {
    let mut bytes = Vec::new();
    let read = File::open(proc_path(pid, "environ"));
    // One that can't be read to its end was read as far as it goes.
    let _ = read.and_then(|file| file.take(BYTES_MAX).read_to_end(&mut bytes));
    let words = bytes.split(|byte| *byte == 0);
    let theirs = words.filter_map(|word| {
        let at = word.iter().position(|byte| *byte == b'=')?;
        Some((&word[..at], &word[at + 1..]))
    });
    let ours = own_variables();
    let mut theirs = chosen(theirs);
    theirs.retain(|name, value| ours.get(name) != Some(value));
    theirs.into_keys().collect()
}

fn own_variables() -> Variables {
    let all: Vec<(OsString, OsString)> = std::env::vars_os().collect();
    chosen(all.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())))
}

fn chosen<'v>(all: impl Iterator<Item = (&'v [u8], &'v [u8])>) -> Variables {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    all.filter(|(name, _)| name.len() <= NAME_BYTES_MAX && name.iter().all(plain))
        .filter_map(|(name, value)| Some((str::from_utf8(name).ok()?, value)))
        .filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
        .take(NAMES_MAX)
        .map(|(name, value)| (name.to_owned(), value.to_vec()))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn only_what_decides_which_code_runs_and_is_not_inherited_is_named() {
        let mut child = Command::new("cat")
            .env("QEMU_MODULE_DIR", "/opt/qemu/modules")
            .env("LD_BIND_NOW", "1")
            .env("LD_odd name", "1")
            .env("XDG_RUNTIME_DIR", "/run/user/7")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Until it runs, it may have no readable environment.
        child.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        assert_eq!(not_inherited(child.id()), ["LD_BIND_NOW", "QEMU_MODULE_DIR"]);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(not_inherited(child.id()).is_empty(), "it has ended");
        // This process has what it inherits.
        assert!(not_inherited(std::process::id()).is_empty());
    }

    #[test]
    fn another_value_is_not_inherited() {
        let ours = chosen([(&b"LD_X"[..], &b"1"[..]), (b"PATH", b"/bin")].into_iter());
        assert_eq!(ours.keys().collect::<Vec<_>>(), ["LD_X"]);
        assert_ne!(ours, chosen([(&b"LD_X"[..], &b"2"[..])].into_iter()));
    }
}
